"""Both sides' model on the same weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_paged.loader import DTYPES, find_folder, load
from mlx_paged.models.config import Qwen2Config
from mlx_paged.models.qwen2 import Qwen2

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class ModelSpec:
    """Which model to measure.

    Attributes:
        model: folder, id or "tiny"; None for a random model.
        random: layers and hidden size of a random model, as "4x256".
        heads, kv_heads, vocab, intermediate: of a random model; None follows the hidden size.
        dtype: of weights, keys and values; None for float32 on a CPU, and elsewhere as stored or
            float16.
        window: positions of a random model.
        seed: of its weights.
    """

    model: str | None = None
    random: str = "4x256"
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int = 4096
    intermediate: int | None = None
    dtype: str | None = None
    window: int = 32768
    seed: int = 0

    @property
    def label(self) -> str:
        """What to call it."""
        return f"random {self.random}" if self.model is None else self.model

    @property
    def chosen_dtype(self) -> str | None:
        """The dtype to convert to; None leaves what is stored."""
        if self.dtype is not None:
            return self.dtype
        if mx.default_device() == mx.Device(mx.cpu):
            return "float32"
        return "float16" if self.model is None else None

    def config(self) -> Qwen2Config:
        """The configuration of the random model.

        Raises:
            ValueError: sizes that do not fit each other.
        """
        match = re.fullmatch(r"(\d+)x(\d+)", self.random)
        if match is None:
            raise ValueError(f"random is {self.random!r}; it must be LAYERSxHIDDEN, such as 4x256")
        layers, hidden = int(match[1]), int(match[2])
        heads = self.heads or max(1, hidden // 64)
        kv_heads = self.kv_heads or max(1, heads // 2)
        sizes = (("layers", layers), ("hidden", hidden), ("vocab", self.vocab))
        for name, value in sizes:
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if hidden % heads or heads % kv_heads or hidden // heads % 2:
            raise ValueError(
                f"hidden {hidden}, heads {heads} and kv_heads {kv_heads} do not fit: heads must "
                "divide hidden into an even head dim, kv_heads must divide heads"
            )
        return Qwen2Config(
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=self.intermediate or round(hidden * 2.6875),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            rms_norm_eps=1e-6,
            vocab_size=self.vocab,
            max_position_embeddings=self.window,
        )


@dataclass(frozen=True)
class Models:
    """Ours and mlx-lm's, which share their arrays."""

    ours: Qwen2
    theirs: Any
    tokenizer: TokenizerWrapper | None

    @property
    def dtype(self) -> mx.Dtype:
        """Of norms, keys and values."""
        return self.ours.model.norm.weight.dtype

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values in all layers."""
        config = self.ours.config
        heads = config.num_hidden_layers * config.num_key_value_heads
        return 2 * heads * config.head_dim * self.dtype.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(array.nbytes for array in _parameters(self.ours).values())

    @property
    def parameters(self) -> int:
        """Number of parameters; packed ones count as they are stored."""
        return sum(array.size for array in _parameters(self.ours).values())


def _parameters(model: Qwen2) -> dict[str, mx.array]:
    found: Any = tree_flatten(model.parameters())
    return dict(found)


def load_models(spec: ModelSpec) -> Models:
    """Load or make the model for both sides.

    Raises:
        ValueError, FileNotFoundError: as `mlx_paged.load`, or sizes that do not fit.
    """
    if spec.model is None:
        return _random(spec)
    from mlx_lm.utils import load_model

    ours, tokenizer = load(spec.model, dtype=spec.chosen_dtype)
    theirs, _ = load_model(find_folder(spec.model), lazy=True)
    theirs.update(ours.parameters())
    return Models(ours, theirs, tokenizer)


def _random(spec: ModelSpec) -> Models:
    """Weights large enough for attention to be sharp, so that a wrong block shows."""
    from mlx_lm.models import qwen2

    cfg = spec.config()
    dtype = DTYPES[spec.chosen_dtype or "float32"]
    ours = Qwen2(cfg)
    theirs = qwen2.Model(
        qwen2.ModelArgs(
            model_type="qwen2",
            hidden_size=cfg.hidden_size,
            num_hidden_layers=cfg.num_hidden_layers,
            intermediate_size=cfg.intermediate_size,
            num_attention_heads=cfg.num_attention_heads,
            rms_norm_eps=cfg.rms_norm_eps,
            vocab_size=cfg.vocab_size,
            num_key_value_heads=cfg.num_key_value_heads,
            max_position_embeddings=cfg.max_position_embeddings,
            rope_theta=cfg.rope_theta,
            tie_word_embeddings=cfg.tie_word_embeddings,
        )
    )
    rng = np.random.default_rng(spec.seed)
    weights = []
    for name, value in _parameters(ours).items():
        noise = rng.standard_normal(value.shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            noise = 1 + 0.1 * noise
        else:
            sharp = 1.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0
            noise *= sharp / value.shape[-1] ** 0.5
        weights.append((name, mx.array(noise).astype(dtype)))
    for model in (ours, theirs):
        model.update(tree_unflatten(weights))
        model.eval()
    mx.eval(ours.parameters())
    ours.fingerprint = f"{spec}".encode()
    return Models(ours, theirs, None)
