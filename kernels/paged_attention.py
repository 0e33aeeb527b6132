"""Who computes attention: the Metal kernel where there is Metal, plain MLX elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged.kernels import metal
from mlx_paged.kernels.reference import plan_reference

IntArray = NDArray[np.int32]


class AttentionPlan(Protocol):
    """What all layers of one step need to know about its rows."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float
    ) -> mx.array:
        """Attention of the packed `queries` [tokens, query heads, head dim] over the pool."""
        ...

    def advance(self, context_lens: IntArray) -> AttentionPlan:
        """The plan for the same rows and blocks with more tokens."""
        ...


class ReplayablePlan(AttentionPlan, Protocol):
    """A plan of a backend that `compiles`: its graph can be replayed over other arrays."""

    def arrays(self) -> list[mx.array | None]:
        """The arrays that `attend` uses, in a fixed order."""
        ...

    def with_arrays(self, arrays: Iterable[Any]) -> ReplayablePlan:
        """The same plan over other arrays."""
        ...


class AttentionBackend(Protocol):
    """Plans steps."""

    compiles: bool  # whether a step's graph may be compiled and replayed: plans are ReplayablePlan

    def check(self, *, dtype: mx.Dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError if a model of this shape is not served."""
        ...

    def plan(
        self,
        block_tables: IntArray,
        context_lens: IntArray,
        query_lens: IntArray,
        *,
        block_size: int,
        num_kv_heads: int,
    ) -> AttentionPlan:
        """Plan one step.

        Args:
            block_tables: [rows, width] block numbers; the padding is never dereferenced.
            context_lens: [rows] tokens each row attends to, those of this step included.
            query_lens: [rows] packed tokens of each row in this step.
            block_size, num_kv_heads: of the pool.
        """
        ...


class ReferenceAttention:
    """Plain MLX, on any device."""

    compiles = True

    def check(self, *, dtype: mx.Dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Every shape is served."""

    def plan(
        self,
        block_tables: IntArray,
        context_lens: IntArray,
        query_lens: IntArray,
        *,
        block_size: int,
        num_kv_heads: int,
    ) -> AttentionPlan:
        """As `AttentionBackend.plan`; the cache keeps what follows a context finite."""
        return plan_reference(
            block_tables,
            context_lens,
            query_lens,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            finite_tails=True,
        )


@dataclass(frozen=True)
class MetalAttention:
    """The Metal kernel for decode rows, gathered blocks and MLX's attention for prompt chunks.

    Attributes:
        kernel_factory: stands in for `mx.fast.metal_kernel`, where there is no Metal.
        gpu_cores: cores to fill; by default this machine's.
    """

    kernel_factory: metal.KernelFactory | None = None
    gpu_cores: int | None = None
    compiles = False

    def check(self, *, dtype: mx.Dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise ValueError if the kernel does not serve the shape, or there is no Metal."""
        metal.variants(dtype, num_heads, num_kv_heads, head_dim)
        if self.kernel_factory is None and not mx.metal.is_available():
            raise ValueError("backend must be 'reference' on a machine without Metal, got 'metal'")

    def plan(
        self,
        block_tables: IntArray,
        context_lens: IntArray,
        query_lens: IntArray,
        *,
        block_size: int,
        num_kv_heads: int,
    ) -> MetalPlan:
        """As `AttentionBackend.plan`."""
        decode = np.flatnonzero(query_lens == 1)
        plan = None
        if len(decode):
            plan = metal.plan_decode(
                block_tables[decode],
                context_lens[decode],
                num_kv_heads=num_kv_heads,
                block_size=block_size,
                gpu_cores=self.gpu_cores,
            )
        starts = np.cumsum(query_lens) - query_lens
        prompts = tuple(
            Chunk(int(starts[row]), int(query_lens[row]), int(context_lens[row]), block_tables[row])
            for row in np.flatnonzero(query_lens > 1)
        )
        stream = [starts[decode], *(chunk.first + np.arange(chunk.count) for chunk in prompts)]
        return MetalPlan(
            self,
            (block_tables, query_lens, block_size, num_kv_heads),
            plan,
            mx.array(starts[decode].astype(np.int32)) if prompts else None,
            prompts,
            mx.array(np.argsort(np.concatenate(stream)).astype(np.int32)) if prompts else None,
        )


@dataclass(frozen=True)
class Chunk:
    """Consecutive prompt tokens of one row."""

    first: int  # in the packed stream
    count: int
    context_len: int
    block_table: IntArray


@dataclass(frozen=True)
class MetalPlan:
    """What all layers of a step give to the kernel."""

    backend: MetalAttention
    step: tuple[IntArray, IntArray, int, int]  # what it was made from, but for the lengths
    decode: metal.DecodePlan | None
    decode_index: mx.array | None  # [rows] of decode tokens in the stream; None: all of it
    prompts: tuple[Chunk, ...]
    order: mx.array | None  # [tokens] where each packed token is in the outputs

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float
    ) -> mx.array:
        """As `AttentionPlan.attend`."""
        outputs = []
        if self.decode is not None:
            rows = queries if self.decode_index is None else queries[self.decode_index]
            outputs.append(
                metal.paged_decode(
                    rows,
                    keys,
                    values,
                    self.decode,
                    scale=scale,
                    kernel_factory=self.backend.kernel_factory,
                )
            )
        for chunk in self.prompts:
            part = queries[chunk.first : chunk.first + chunk.count]
            outputs.append(
                metal.paged_prefill(part, keys, values, chunk.block_table, chunk.context_len, scale)
            )
        if self.order is None:
            return outputs[0]
        return mx.concatenate(outputs)[self.order]

    def advance(self, context_lens: IntArray) -> MetalPlan:
        """As `AttentionPlan.advance`: segments are cut anew."""
        block_tables, query_lens, block_size, num_kv_heads = self.step
        return self.backend.plan(
            block_tables,
            context_lens,
            query_lens,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
        )


def choose_backend(
    backend: str | AttentionBackend | None,
    *,
    dtype: mx.Dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> AttentionBackend:
    """The backend asked for, or the best one that serves the model's shape here.

    Args:
        backend: "metal", "reference", an object, or None: the kernel where MLX computes on an
            Apple GPU and serves the shape, else the reference.
        dtype, num_heads, num_kv_heads, head_dim: of the model.

    Raises:
        TypeError: it is no backend.
        ValueError: no such backend, or it does not serve the shape.
    """
    named: dict[str, AttentionBackend] = {
        "metal": MetalAttention(),
        "reference": ReferenceAttention(),
    }
    shape: dict[str, Any] = {
        "dtype": dtype,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    if backend is None:
        gpu = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
        return named["metal" if gpu and _serves(named["metal"], shape) else "reference"]
    if isinstance(backend, str):
        if backend not in named:
            raise ValueError(f"backend must be one of {', '.join(named)}, got {backend!r}")
        backend = named[backend]
    if not callable(getattr(backend, "plan", None)):
        raise TypeError(
            f"backend must be a name, or an object that plans attention, got {backend!r}"
        )
    backend.check(**shape)
    return backend


def _serves(backend: AttentionBackend, shape: dict[str, Any]) -> bool:
    try:
        backend.check(**shape)
    except ValueError:
        return False
    return True
