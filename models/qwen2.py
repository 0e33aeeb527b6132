"""Qwen2 and Qwen2.5 on a paged KV cache.

Modules and parameters carry the names of the checkpoint. The packed tokens of all rows of a step
go through together, [tokens, ...]; only rotary positions, slots and attention know of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.kernels.compiled import compiled
from mlx_paged.kernels.exponential import swiglu
from mlx_paged.models.config import Qwen2Config

if TYPE_CHECKING:
    from mlx_paged.batch import Batch
    from mlx_paged.kv_cache import KVCache

Tables = tuple[mx.array, mx.array]


class Rotary:
    """Rotary position embedding of a packed stream, in the half-split form.

    One kernel of MLX does it on a GPU. The CPU backend would compute sines and cosines anew for
    every layer, so there they are made once a step.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim = head_dim
        self.theta = theta
        half = head_dim // 2
        exponents = mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(theta) / half)
        self._frequencies = mx.exp(exponents)
        self._signs = mx.array([[-1.0], [1.0]])
        mx.eval(self._frequencies, self._signs)  # here: another thread could not

    def tables(self, positions: mx.array) -> Tables | None:
        """Cosines and signed sines [tokens, 1, 1 or 2, head_dim / 2], where they are of use."""
        if mx.default_device() == mx.Device(mx.gpu):
            return None
        angles = positions[:, None, None, None] * self._frequencies
        return mx.cos(angles), mx.sin(angles) * self._signs

    def __call__(self, x: mx.array, positions: mx.array, tables: Tables | None) -> mx.array:
        """Rotate x [tokens, heads, head_dim]."""
        if tables is not None:
            return _rotate(x, *tables)
        rotated = mx.fast.rope(
            x[:, :, None],
            self.head_dim,
            traditional=False,
            base=self.theta,
            scale=1.0,
            offset=positions,
        )
        return rotated[:, :, 0]


@compiled
def _rotate(x: mx.array, cos: mx.array, signed_sin: mx.array) -> mx.array:
    halves = x.reshape(*x.shape[:2], 2, -1).astype(mx.float32)
    turned = halves * cos + halves[:, :, ::-1] * signed_sin
    return turned.astype(x.dtype).reshape(x.shape)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, dims: int, eps: float) -> None:
        super().__init__()
        self.weight = mx.ones((dims,))
        self._compiled = compiled(
            lambda x, weight: mx.fast.rms_norm(x, weight, eps), shapeless=True
        )

    def __call__(self, x: mx.array) -> mx.array:
        """x: [tokens, dims]."""
        return self._compiled(x, self.weight)


class Joined:
    """One layer with the outputs of several, side by side.

    The parts keep their names and become views of the joined arrays, so nothing is stored twice.

    Args:
        parts: linear layers, quantized alike or not at all.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.layer = copy(parts[0])
        self._views: list[tuple[nn.Module, str, mx.array]] = []
        for name in parts[0].parameters():
            self.layer[name] = mx.concatenate([part[name] for part in parts])
            start = 0
            for part in parts:
                end = start + part[name].shape[0]
                part[name] = self.layer[name][start:end]
                self._views.append((part, name, part[name]))
                start = end
        mx.eval(self.layer.parameters(), [view for *_, view in self._views])

    @staticmethod
    def fits(parts: Sequence[nn.Module]) -> bool:
        """Whether layers are of one kind."""
        kinds = {
            (type(part), *(getattr(part, name, None) for name in ("group_size", "bits", "mode")))
            for part in parts
        }
        return len(kinds) == 1 and isinstance(parts[0], nn.Linear | nn.QuantizedLinear)

    @property
    def current(self) -> bool:
        """Whether the parts still are what was joined."""
        return all(part[name] is view for part, name, view in self._views)


class Attention(nn.Module):
    """Grouped-query attention over the pool's blocks."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = self.head_dim**-0.5
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)
        self._rotary = Rotary(self.head_dim, config.rope_theta)
        self._joined: Joined | None = None

    def __call__(
        self,
        x: mx.array,
        layer: int,
        batch: Batch,
        cache: KVCache,
        rotary: Tables | None,
    ) -> mx.array:
        """x: [tokens, hidden]."""
        heads = self._project(x).reshape(x.shape[0], -1, self.head_dim)
        values = self.num_heads + self.num_kv_heads  # the first of them
        turned = self._rotary(heads[:, :values], batch.positions, rotary)
        cache.write(layer, turned[:, self.num_heads :], heads[:, values:], batch.slots)
        out = batch.attention.attend(
            turned[:, : self.num_heads], cache.keys[layer], cache.values[layer], scale=self.scale
        )
        return self.o_proj(out.reshape(x.shape[0], -1))

    def _project(self, x: mx.array) -> mx.array:
        """Queries, keys and values side by side."""
        if self._joined is not None and self._joined.current:
            return self._joined.layer(x)
        return mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)

    def join(self) -> None:
        """Do the three projections as one, if they are stored alike."""
        parts = [self.q_proj, self.k_proj, self.v_proj]
        if Joined.fits(parts) and not (self._joined is not None and self._joined.current):
            self._joined = Joined(parts)


class MLP(nn.Module):
    """The gated feed-forward network."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """x: [tokens, hidden]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class TransformerBlock(nn.Module):
    """One layer."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self,
        x: mx.array,
        layer: int,
        batch: Batch,
        cache: KVCache,
        rotary: Tables | None,
    ) -> mx.array:
        """x: [tokens, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), layer, batch, cache, rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2Model(nn.Module):
    """Everything but the head."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [TransformerBlock(config) for _ in range(config.num_hidden_layers)]
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self._rotary = Rotary(config.head_dim, config.rope_theta)

    def __call__(self, batch: Batch, cache: KVCache) -> mx.array:
        """Hidden states [len(batch.logits_indices), hidden] of the tokens that need logits."""
        x = self.embed_tokens(batch.input_ids)
        rotary = self._rotary.tables(batch.positions)
        for layer, block in enumerate(self.layers):
            x = block(x, layer, batch, cache, rotary)
        if batch.logits_indices is not None:
            x = x[batch.logits_indices]
        return self.norm(x)


class Qwen2(nn.Module):
    """Qwen2ForCausalLM.

    Attributes:
        config: what it was built from.
        fingerprint: names these very weights; the root of every block's name.
    """

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.config = config
        self.fingerprint = b""
        self.model = Qwen2Model(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def join(self) -> None:
        """Apply matrices as one that are always applied together; parameters stay as they are."""
        for layer in self.model.layers:
            layer.self_attn.join()

    def __call__(self, batch: Batch, cache: KVCache) -> mx.array:
        """Write the batch's keys and values into `cache`; return its logits [rows, vocab]."""
        x = self.model(batch, cache)
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(x)
        return self.lm_head(x)
