"""Which attention a step uses: the Metal kernel where there is Metal, plain MLX elsewhere."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged.kernels.reference import plan_reference

IntArray = NDArray[np.int32]
Backend = Literal["metal", "reference"]


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


def default_backend() -> Backend:
    """ "metal" where MLX computes on an Apple GPU, else "reference"."""
    gpu = mx.default_device() == mx.Device(mx.gpu)
    return "metal" if gpu and mx.metal.is_available() else "reference"


def check_backend(backend: str | None) -> Backend:
    """The backend named, or the default.

    Raises:
        ValueError: no such backend.
    """
    if backend is None:
        return default_backend()
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}")
    return backend  # type: ignore[return-value]


def plan_attention(
    backend: Backend,
    block_tables: IntArray,
    context_lens: IntArray,
    query_lens: IntArray,
    *,
    block_size: int,
    num_kv_heads: int,
) -> AttentionPlan:
    """Plan one step.

    Args:
        backend: who computes.
        block_tables: [rows, width] block numbers; the padding is never dereferenced.
        context_lens: [rows] tokens each row attends to, those of this step included.
        query_lens: [rows] packed tokens of each row in this step.
        block_size, num_kv_heads: of the pool.
    """
    return plan_reference(
        block_tables,
        context_lens,
        query_lens,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        finite_tails=True,
    )
