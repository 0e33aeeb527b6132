"""The command line's options that several commands share, and what they mean in Python.

An option that is not given is absent from the parsed arguments, so that the defaults are those of
`SamplingParams` and `Engine`, written in one place. Nothing here loads MLX.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_paged.models.qwen2 import Qwen2

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "K": 10**3, "M": 10**6, "G": 10**9}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

# Names of the parsed arguments; those of SamplingParams and of Engine.
SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "presence_context_size",
    "frequency_penalty",
    "frequency_context_size",
    "logit_bias",
    "stop_token_ids",
    "stop",
    "ignore_eos",
    "logprobs",
    "seed",
    "n",
    "best_of",
)
ENGINE_OPTIONS = (
    "block_size",
    "memory_limit",
    "num_blocks",
    "max_batched_tokens",
    "max_num_seqs",
    "prefix_caching",
    "token_reuse",
    "backend",
)


def parse_bytes(text: str) -> int:
    """A size such as 512MB, 1.5GiB or 1000000 in bytes.

    Raises:
        argparse.ArgumentTypeError: it is not a number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number and KB, MB, GB, KiB, MiB or GiB"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def unescape(text: str) -> str:
    """Text of the command line with its \\n and \\t made real, as mlx-lm does."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `load_model` reads."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="tiny",
        metavar="NAME",
        help="'tiny' (the default: a small model that comes with this package and answers "
        "questions about facts in its prompt), a folder with config.json and safetensors, or "
        "an id on the Hugging Face Hub such as Qwen/Qwen2.5-1.5B-Instruct",
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="what floating weights are converted to; as stored by default",
    )


def load_model(args: argparse.Namespace) -> tuple[Qwen2, TokenizerWrapper]:
    """Load what `add_model_arguments` named; raises what `mlx_paged.load` raises."""
    from mlx_paged.loader import load

    return load(args.model, revision=args.revision, dtype=args.dtype)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `sampling_fields` reads, in mlx-lm's spelling."""
    group = parser.add_argument_group("sampling")
    absent = argparse.SUPPRESS

    def add(*names: str, **how: Any) -> None:
        group.add_argument(*names, default=absent, **how)

    add(
        "--max-tokens",
        "-m",
        type=int,
        metavar="N",
        help="the most tokens to generate (256); -1: up to the model's window",
    )
    add("--min-tokens", type=int, metavar="N", help="no end before N tokens (0)")
    add(
        "--temp",
        "--temperature",
        dest="temperature",
        type=float,
        metavar="T",
        help="temperature; 0, the default, always takes the most likely token",
    )
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="keep the most likely tokens that together reach this probability (1: all)",
    )
    add("--top-k", type=int, metavar="K", help="keep the K most likely tokens (0: all)")
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="keep tokens at least P times as likely as the most likely one (0: all)",
    )
    add("--seed", type=int, help="the same seed gives the same tokens; sample i uses SEED + i")
    add("--n", "-n", type=int, metavar="N", help="samples of the prompt, computed once (1)")
    add("--best-of", type=int, metavar="N", help="make N samples, show the --n most likely ones")
    add("--repetition-penalty", type=float, metavar="X", help="divide repeated tokens' logits by X")
    add(
        "--presence-penalty", type=float, metavar="X", help="subtract X from present tokens' logits"
    )
    add("--frequency-penalty", type=float, metavar="X", help="subtract X for each occurrence")
    for name in ("repetition", "presence", "frequency"):
        add(
            f"--{name}-context-size",
            type=int,
            metavar="N",
            help=f"how many of the last tokens the {name} penalty looks at (20)",
        )
    add(
        "--logit-bias",
        type=_token_and_bias,
        action="append",
        metavar="ID=X",
        help="add X to a token's logit (-inf forbids it); may be repeated",
    )
    add(
        "--stop",
        type=unescape,
        action="append",
        metavar="TEXT",
        help="end before this text (\\n is a line break); may be repeated",
    )
    add(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        metavar="ID",
        help="end at this token; may be repeated",
    )
    add("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    add(
        "--logprobs",
        type=int,
        metavar="K",
        help="log-probability of each token, and of the K most likely ones",
    )


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given; `max_tokens` may be -1."""
    given = {name: getattr(args, name) for name in SAMPLING_FIELDS if name in args}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `engine_options` reads."""
    group = parser.add_argument_group("engine")
    absent = argparse.SUPPRESS

    def add(*names: str, **how: Any) -> None:
        group.add_argument(*names, default=absent, **how)

    add("--block-size", type=int, metavar="N", help="tokens in a block, 1 to 256 (16)")
    add(
        "--memory-limit",
        type=parse_bytes,
        metavar="SIZE",
        help="memory for keys and values, such as 512MB or 2GiB; never exceeded. By default, on a "
        "Mac, a share of what it recommends; elsewhere 256MiB",
    )
    add("--num-blocks", type=int, metavar="N", help="the same, in blocks")
    add("--max-batched-tokens", type=int, metavar="N", help="tokens computed in one step (512)")
    add("--max-num-seqs", type=int, metavar="N", help="sequences running at once (256)")
    add(
        "--no-prefix-cache",
        dest="prefix_caching",
        action="store_false",
        help="do not reuse the blocks of earlier requests",
    )
    add(
        "--no-token-reuse",
        dest="token_reuse",
        action="store_false",
        help="reuse whole blocks only, and no part of one",
    )
    add(
        "--backend",
        choices=("metal", "reference"),
        help="who computes attention; by default whichever fits the machine",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `Engine` that were given."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS if name in args}


def _token_and_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=NUMBER, such as 42=-1.5") from None
