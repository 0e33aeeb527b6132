"""Random models for the tests: ours, and mlx-lm's with the same weights."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen2 as theirs_qwen2
from mlx_lm.models.cache import KVCache as ContiguousCache

from mlx_paged.models.config import Qwen2Config
from mlx_paged.models.qwen2 import Qwen2


def config(
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    layers: int = 2,
    vocab: int = 512,
    tied: bool = True,
    window: int = 4096,
) -> Qwen2Config:
    """A small Qwen2 configuration."""
    return Qwen2Config(
        hidden_size=heads * head_dim,
        num_hidden_layers=layers,
        intermediate_size=2 * heads * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6,
        vocab_size=vocab,
        max_position_embeddings=window,
        tie_word_embeddings=tied,
    )


def random_model(
    cfg: Qwen2Config, seed: int = 0, bits: int | None = None
) -> tuple[Qwen2, theirs_qwen2.Model]:
    """Our model and mlx-lm's with the same random weights, quantized if `bits` is given.

    The weights are large enough for attention to be sharp, so that a wrong block shows.
    """
    rng = np.random.default_rng(seed)
    theirs = theirs_qwen2.Model(
        theirs_qwen2.ModelArgs(
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
    weights = []
    parameters: Any = tree_flatten(theirs.parameters())
    for name, value in parameters:
        if name.endswith("norm.weight"):
            array = 1 + 0.1 * np.asarray(rng.standard_normal(value.shape))
        elif name.endswith(("q_proj.weight", "k_proj.weight")):
            array = rng.standard_normal(value.shape) * 1.5 / value.shape[-1] ** 0.5
        else:
            array = rng.standard_normal(value.shape) / value.shape[-1] ** 0.5
        weights.append((name, mx.array(array.astype(np.float32))))
    ours = Qwen2(cfg)
    for model in (ours, theirs):
        model.update(tree_unflatten(weights))
        if bits is not None:
            nn.quantize(model, group_size=64, bits=bits)
        mx.eval(model.parameters())
    ours.fingerprint = f"random {cfg} {seed} {bits}".encode()
    return ours, theirs


def greedy(model: theirs_qwen2.Model, prompt: list[int], count: int) -> list[int]:
    """mlx-lm's greedy tokens, on its contiguous cache."""
    tokens, logits = [], contiguous_logits(model, prompt, caches := new_caches(model))[-1]
    for _ in range(count):
        tokens.append(int(mx.argmax(logits)))
        logits = contiguous_logits(model, tokens[-1:], caches)[-1]
    return tokens


def new_caches(model: theirs_qwen2.Model) -> list[ContiguousCache]:
    """An empty contiguous cache per layer."""
    return [ContiguousCache() for _ in model.layers]


def contiguous_logits(
    model: theirs_qwen2.Model, tokens: list[int], caches: list[ContiguousCache]
) -> mx.array:
    """mlx-lm's logits [tokens, vocab] after appending `tokens` to its cache."""
    return model(mx.array([tokens]), cache=caches)[0]
