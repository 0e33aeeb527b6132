"""From a name to a model and its tokenizer."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from mlx_paged.checkpoint import Checkpoint, read_config, weight_paths
from mlx_paged.models.qwen2 import Qwen2

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

TINY = Path(__file__).parent / "models" / "tiny"
# What is fetched of a repository on the Hugging Face Hub.
NEEDED_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
]
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load(
    path_or_id: str | Path = "tiny",
    tokenizer_config: dict[str, Any] | None = None,
    *,
    revision: str | None = None,
    dtype: mx.Dtype | str | None = None,
    lazy: bool = False,
) -> tuple[Qwen2, "TokenizerWrapper"]:
    """Load a Qwen2 or Qwen2.5 model and its tokenizer.

    Args:
        path_or_id: "tiny", the small model that comes with this package (a folder of that name
            is "./tiny"); an existing folder with config.json, safetensors and tokenizer; or
            "owner/name" on the Hugging Face Hub, which is downloaded once and read from the
            local cache when the Hub cannot be reached.
        tokenizer_config: arguments for transformers' AutoTokenizer.
        revision: a branch, tag or commit of the repository on the Hub.
        dtype: what floating weights are converted to: float32, float16 or bfloat16; as stored
            by default. Packed weights stay as they are (their scales are converted).
        lazy: leave the weights on the disk until they are used.

    Returns:
        The model, and mlx-lm's wrapper of the tokenizer. `model.fingerprint` (32 bytes) tells
        the model from any other whose keys and values may differ: see `Checkpoint.fingerprint`.
        Whoever changes the weights afterwards has to change it too.

    Raises:
        TypeError: when `path_or_id` is neither text nor a path.
        FileNotFoundError: when there is no such folder, or it lacks a file, or the repository is
            neither cached nor to be had.
        ValueError: when an argument or anything in the checkpoint is not what it must be; the
            message names file, key or tensor, what was found and what would be right.
    """
    converted = _dtype(dtype)
    folder = find_folder(path_or_id, revision)
    checkpoint = Checkpoint.open(folder)
    tokenizer = _load_tokenizer(checkpoint, tokenizer_config)
    return load_model(checkpoint, dtype=converted, lazy=lazy), tokenizer


def load_model(
    checkpoint: Checkpoint, *, dtype: mx.Dtype | None = None, lazy: bool = False
) -> Qwen2:
    """Build the model of a checkpoint and fill it; see `load`."""
    model = Qwen2(checkpoint.config)
    packings = {path: asdict(packing) for path, packing in checkpoint.packings.items()}
    if packings:
        nn.quantize(model, class_predicate=lambda path, _: packings.get(path, False))
    weights: dict[str, mx.array] = {}
    for file in checkpoint.files:
        tensors = mx.load(str(file.path))
        assert isinstance(tensors, dict)
        weights.update((n, a) for n, a in tensors.items() if n not in checkpoint.dropped)
    if dtype is not None:
        for name, array in weights.items():
            if mx.issubdtype(array.dtype, mx.floating):
                weights[name] = array.astype(dtype)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    model.fingerprint = checkpoint.fingerprint(None if dtype is None else str(dtype))
    return model


def find_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint, after downloading it if need be; see `load`."""
    if not isinstance(path_or_id, str | Path):
        raise TypeError(f"path_or_id must be a folder or a Hub id, got {path_or_id!r}")
    try:
        path = Path(path_or_id).expanduser()
    except RuntimeError:  # no such user
        path = Path(path_or_id)
    is_tiny = path_or_id == "tiny"
    if is_tiny or (path_or_id != "" and path.is_dir()):
        if revision is not None:
            raise ValueError(
                f"revision is {revision!r}; it must be None for {str(path_or_id)!r}, as only "
                "repositories on the Hugging Face Hub have revisions"
            )
        return TINY if is_tiny else path
    if path.is_file():
        raise ValueError(f"{path} is a file; it must be the folder that holds config.json")
    if isinstance(path_or_id, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path_or_id):
        return _download(path_or_id, revision)
    raise FileNotFoundError(
        f"there is no folder {str(path_or_id)!r}; a model is 'tiny', an existing folder, or "
        "'owner/name' on the Hugging Face Hub"
    )


def _download(repo_id: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    def snapshot(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                allow_patterns=NEEDED_FILES,
                local_files_only=local_files_only,
            )
        )

    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        # A commit does not change: if it is cached whole, the Hub need not be asked.
        try:
            folder = snapshot(local_files_only=True)
            if read_config(folder) and weight_paths(folder) and _has_tokenizer(folder):
                return folder
        except FileNotFoundError:
            pass
    at = repo_id if revision is None else f"{repo_id} at revision {revision}"
    try:
        return snapshot(local_files_only=False)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a repository's id: {error}") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub does not answer"
        raise FileNotFoundError(
            f"offline ({why}), and {at} is not, or not wholly, in the Hugging Face cache "
            f"{constants.HF_HUB_CACHE}; download it once while online, or name a folder"
        ) from error
    except Exception as error:  # refused: no such repository or revision, gated; no disk space
        raise FileNotFoundError(f"the Hugging Face Hub does not give {at}: {error}") from error


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def _load_tokenizer(
    checkpoint: Checkpoint, tokenizer_config: dict[str, Any] | None
) -> "TokenizerWrapper":
    folder = checkpoint.folder
    if not _has_tokenizer(folder):
        raise FileNotFoundError(
            f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt"
        )
    from mlx_lm import tokenizer_utils  # here, because transformers takes seconds to import

    try:
        return tokenizer_utils.load(
            folder, tokenizer_config, eos_token_ids=list(checkpoint.config.eos_token_ids) or None
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"{folder}: the tokenizer cannot be read: {error}") from error


def _dtype(dtype: mx.Dtype | str | None) -> mx.Dtype | None:
    if dtype is None or dtype in DTYPES.values():
        return dtype if isinstance(dtype, mx.Dtype) else None
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ValueError(f"dtype is {dtype!r}; it must be None or one of {', '.join(DTYPES)}")
