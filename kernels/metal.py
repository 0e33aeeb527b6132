"""Launches the Metal kernels: a plan per step, two or three kernels per layer.

The kernels are in paged_attention.metal. They are compiled by MLX when first used, in a fixed set
of variants per model (see `variants`): no value that changes from step to step is part of one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.kernels.segments import (
    MAX_SET_ROWS,
    IntArray,
    SegmentList,
    bucket,
    plan_segments,
)

HEAD_DIMS = (64, 80, 96, 128, 256)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
MAX_GROUP = 16
MAX_CONTEXT = 131_072
MAX_BLOCK_SIZE = MAX_CONTEXT  # one block per sequence is a contiguous cache
MAX_ROWS = 256
MAX_ELEMENTS = 2**31  # of a pool: the kernels' offsets are 32 bits
LOG2_E = 1.4426950408889634

_THREADS = 256
_SIMD_GROUPS = 8
_REGISTERS = 48  # float accumulators per thread: with the queries and scores, about 128 registers
_TILE_BYTES = 16 * 1024  # K and V tile of shared segments: two threadgroups fit a core
_LEAST = 8  # MLX moves smaller inputs to the constant address space, which is another kernel

KernelFactory = Callable[..., Callable[..., list[mx.array]]]

# GPU cores by chip; of the sizes that were sold, the largest.
_CORES = {
    "M1": (8, 16, 32, 64),
    "M2": (10, 19, 38, 76),
    "M3": (10, 18, 40, 80),
    "M4": (10, 20, 40, 80),
}
_NEWEST_CORES = (10, 20, 40, 80)
_EDITIONS = ("", "Pro", "Max", "Ultra")
_UNKNOWN_CORES = 16


# ---- the plan of a step --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launch:
    """One list of segments on the device. Arrays are padded: few sizes, at least 8 elements."""

    num_segments: int
    num_partials: int  # rounded up: the size of the partial results
    segments: mx.array  # int32 [n * 5]
    members: mx.array  # int32 [n * 2]
    partial_starts: mx.array  # int32 [rows + 1]


@dataclass(frozen=True)
class DecodePlan:
    """What all layers of one step use. Made by `plan_decode`.

    Attributes:
        num_rows: rows, one query token each.
        num_kv_heads, block_size: of the pools it is for.
        num_blocks: the pools must have at least so many blocks.
    """

    num_rows: int
    num_kv_heads: int
    block_size: int
    num_blocks: int
    _tables: mx.array
    _scalars: tuple[mx.array, mx.array]  # table width, block size
    _shared: _Launch
    _own: _Launch


def plan_decode(
    block_tables: IntArray,
    context_lens: IntArray,
    *,
    num_kv_heads: int,
    block_size: int,
    gpu_cores: int | None = None,
    share: bool = True,
    max_set_rows: int = MAX_SET_ROWS,
) -> DecodePlan:
    """Plan one step's decode attention; once per step, for all layers.

    Args:
        block_tables: int32 [rows, width]; row i is valid in its first
            ceil(context_lens[i] / block_size) entries, the rest is never looked at.
        context_lens: int32 [rows], tokens that each row attends to, its new one included.
        num_kv_heads: of the model.
        block_size: tokens per block.
        gpu_cores: cores to fill with work; None: this machine's.
        share: read a prefix that several rows share once.
        max_set_rows: the most rows that one segment serves.

    Raises:
        ValueError: a value is out of what the kernels serve.
    """
    tables = np.asarray(block_tables, dtype=np.int32)
    contexts = np.asarray(context_lens, dtype=np.int32)
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size must lie in 1 .. {MAX_BLOCK_SIZE}, not {block_size}")
    if len(contexts) > MAX_ROWS:
        raise ValueError(f"a step has at most {MAX_ROWS} rows, not {len(contexts)}")
    if len(contexts) and contexts.max() > MAX_CONTEXT:
        raise ValueError(f"a context has at most {MAX_CONTEXT} tokens, not {contexts.max()}")
    work = plan_segments(
        tables,
        contexts,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        gpu_cores=default_gpu_cores() if gpu_cores is None else gpu_cores,
        share=share,
        max_set_rows=max_set_rows,
    )
    used = np.arange(tables.shape[1]) < -(-contexts // block_size)[:, None]
    numbers = tables[used]
    if numbers.min() < 0:
        row = int(np.flatnonzero(((tables < 0) & used).any(axis=1))[0])
        raise ValueError(f"row {row}'s table ends before its context of {contexts[row]} tokens")
    return DecodePlan(
        num_rows=len(contexts),
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        num_blocks=int(numbers.max()) + 1,
        _tables=_padded(tables.ravel(), -1),
        _scalars=(mx.array(tables.shape[1], mx.int32), mx.array(block_size, mx.int32)),
        _shared=_launch(work.shared),
        _own=_launch(work.own),
    )


def _launch(work: SegmentList) -> _Launch:
    return _Launch(
        num_segments=len(work),
        num_partials=bucket(work.num_partials),
        segments=_padded(work.segments.ravel(), 0),
        members=_padded(work.members.ravel(), 0),
        partial_starts=_padded(work.partial_starts, 0),
    )


def _padded(values: np.ndarray, fill: int) -> mx.array:
    padded = np.full(bucket(len(values), _LEAST), fill, dtype=np.int32)
    padded[: len(values)] = values
    return mx.array(padded)


@functools.cache
def default_gpu_cores() -> int:
    """GPU cores of this machine, from the chip's name; 16 where there is none."""
    if not mx.metal.is_available():
        return _UNKNOWN_CORES
    return cores_of(str(mx.device_info().get("device_name", "")))


def cores_of(device_name: str) -> int:
    """GPU cores of a chip such as "Apple M2 Max": the most that it was sold with."""
    words = device_name.split()
    chip = next((w for w in words if w[:1] == "M" and w[1:].isdigit()), None)
    if chip is None:
        return _UNKNOWN_CORES
    edition = next((e for e in _EDITIONS[1:] if e in words), "")
    return _CORES.get(chip, _NEWEST_CORES)[_EDITIONS.index(edition)]


# ---- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for."""

    dtype: mx.Dtype
    head_dim: int
    group: int  # query heads per kv head

    @property
    def elements_per_lane(self) -> int:
        width = 2 if self.head_dim == 64 else 4
        return -(-self.head_dim // (32 * width)) * width

    @property
    def row_fits(self) -> bool:
        """One SIMD group can hold all query heads of a row: attend_row serves it."""
        return self.group * self.elements_per_lane <= _REGISTERS

    @property
    def queries(self) -> int:
        """Queries that a SIMD group holds in attend_rows."""
        return min(16, _REGISTERS // self.elements_per_lane)

    @property
    def tile(self) -> int:
        """Tokens of a K and V tile in attend_rows."""
        return min(64, _TILE_BYTES // (2 * self.head_dim * self.dtype.size) // 8 * 8)

    @property
    def suffix(self) -> str:
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"{dtype}_d{self.head_dim}_g{self.group}"


_ATTEND_INPUTS = (
    *("queries", "keys", "values", "block_tables", "segments", "members"),
    *("table_width", "block_size", "scale"),
)
_PLACE = (
    "threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_threadgroup, "
    "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
)
_ATTEND_CALL = ", ".join((*_ATTEND_INPUTS, "acc", "stats"))

_ROW_BODY = f"""
  threadgroup T query_tile[G * D];
  threadgroup float parts[8 * (256 / D) * D];
  threadgroup float maxima[8 * G];
  threadgroup float sums[8 * G];
  attend_row<T, D, G>({_ATTEND_CALL},
      query_tile, parts, maxima, sums, {_PLACE});
"""
_ROWS_BODY = f"""
  threadgroup T key_tile[TILE * D];
  threadgroup T value_tile[TILE * D];
  threadgroup uint offsets[TILE];
  attend_rows<T, D, G, Q, TILE>({_ATTEND_CALL},
      key_tile, value_tile, offsets, {_PLACE});
"""
_MERGE_BODY = """
  merge_partials<T, D>(shared_acc, shared_stats, shared_starts, own_acc, own_stats, own_starts,
      heads, out, thread_position_in_grid.x / 32, thread_index_in_simdgroup);
"""


@functools.cache
def kernel_source() -> str:
    """The text of paged_attention.metal."""
    return (Path(__file__).parent / "paged_attention.metal").read_text()


@dataclass(frozen=True)
class Variant:
    """One kernel to compile: everything that decides its machine code."""

    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    template: tuple[tuple[str, int | mx.Dtype], ...]


def variants(dtype: mx.Dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Variant]:
    """All kernels that decoding with a model of this shape can compile, whatever the batch.

    Raises:
        ValueError: the kernels do not serve the shape.
    """
    shape = _shape(dtype, num_heads, num_kv_heads, head_dim)
    names = {v.name: v for v in (_own_variant(shape), _rows_variant(shape), _merge_variant(shape))}
    return list(names.values())


def _own_variant(shape: Shape) -> Variant:
    if not shape.row_fits:
        return _rows_variant(shape)
    return Variant(
        name=f"paged_attend_row_{shape.suffix}",
        body=_ROW_BODY,
        inputs=_ATTEND_INPUTS,
        outputs=("acc", "stats"),
        template=(("T", shape.dtype), ("D", shape.head_dim), ("G", shape.group)),
    )


def _rows_variant(shape: Shape) -> Variant:
    return Variant(
        name=f"paged_attend_rows_{shape.suffix}",
        body=_ROWS_BODY,
        inputs=_ATTEND_INPUTS,
        outputs=("acc", "stats"),
        template=(
            ("T", shape.dtype),
            ("D", shape.head_dim),
            ("G", shape.group),
            ("Q", shape.queries),
            ("TILE", shape.tile),
        ),
    )


def _merge_variant(shape: Shape) -> Variant:
    dtype = str(shape.dtype).removeprefix("mlx.core.")
    return Variant(
        name=f"paged_merge_{dtype}_d{shape.head_dim}",
        body=_MERGE_BODY,
        inputs=(
            *("shared_acc", "shared_stats", "shared_starts"),
            *("own_acc", "own_stats", "own_starts", "heads"),
        ),
        outputs=("out",),
        template=(("T", shape.dtype), ("D", shape.head_dim)),
    )


@functools.lru_cache(maxsize=256)
def _kernel(variant: Variant, factory: KernelFactory | None) -> Callable[..., list[mx.array]]:
    make: Any = mx.fast.metal_kernel if factory is None else factory
    kernel: Callable[..., list[mx.array]] = make(
        name=variant.name,
        input_names=list(variant.inputs),
        output_names=list(variant.outputs),
        source=variant.body,
        header=kernel_source(),
    )
    return kernel


@functools.cache
def _no_partials() -> mx.array:
    return mx.zeros((_LEAST,), mx.float32)


@functools.lru_cache(maxsize=64)
def _scalar(value: float, dtype: mx.Dtype) -> mx.array:
    return mx.array(value, dtype)


# ---- decode --------------------------------------------------------------------------------------


def paged_decode(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    plan: DecodePlan,
    *,
    scale: float,
    kernel_factory: KernelFactory | None = None,
) -> mx.array:
    """Attention of one query token per row over the blocks of its table; one layer.

    Args:
        queries: [rows, query heads, head dim].
        keys, values: the layer's pools, [blocks, kv heads, block size, head dim], same dtype.
        plan: of this step.
        scale: multiplies the scores, usually head_dim ** -0.5.
        kernel_factory: stands in for mx.fast.metal_kernel (tests on machines without Metal).

    Returns:
        [rows, query heads, head dim] in the queries' dtype.

    Raises:
        ValueError: the kernels do not serve these shapes, or they do not fit the plan.
        RuntimeError: there is no Metal and no kernel_factory.
    """
    shape = _checked_shape(queries, keys, values, plan)
    if kernel_factory is None and not mx.metal.is_available():
        raise RuntimeError(
            "the paged attention kernel needs Metal, which this machine does not have; "
            "use the reference (kernels/reference.py) here"
        )
    num_heads = queries.shape[1]
    inputs = (queries, keys, values)
    shared = _attend(plan, plan._shared, _rows_variant(shape), inputs, scale, kernel_factory)
    own = _attend(plan, plan._own, _own_variant(shape), inputs, scale, kernel_factory)
    merge = _merge_variant(shape)
    (out,) = _kernel(merge, kernel_factory)(
        inputs=[
            *(*shared, plan._shared.partial_starts),
            *(*own, plan._own.partial_starts),
            _scalar(num_heads, mx.int32),
        ],
        template=list(merge.template),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
        grid=(32 * plan.num_rows * num_heads, 1, 1),
        threadgroup=(_THREADS, 1, 1),
    )
    return out


def _attend(
    plan: DecodePlan,
    launch: _Launch,
    variant: Variant,
    inputs: tuple[mx.array, mx.array, mx.array],
    scale: float,
    factory: KernelFactory | None,
) -> Sequence[mx.array]:
    """Partial results of one list of segments: acc [partials, heads, head dim], stats [.., 2]."""
    if not launch.num_segments:
        return _no_partials(), _no_partials()
    queries, keys, values = inputs
    _, heads, head_dim = queries.shape
    return _kernel(variant, factory)(
        inputs=[
            *(queries, keys, values, plan._tables, launch.segments, launch.members),
            *plan._scalars,
            _scalar(scale * LOG2_E, mx.float32),
        ],
        template=list(variant.template),
        output_shapes=[(launch.num_partials, heads, head_dim), (launch.num_partials, heads, 2)],
        output_dtypes=[mx.float32, mx.float32],
        grid=(_THREADS * launch.num_segments, plan.num_kv_heads, 1),
        threadgroup=(_THREADS, 1, 1),
    )


def _shape(dtype: mx.Dtype, num_heads: int, num_kv_heads: int, head_dim: int) -> Shape:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, not {dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head dim must be one of {HEAD_DIMS}, not {head_dim}")
    group, rest = divmod(num_heads, num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"query heads must be 1 to {MAX_GROUP} times the kv heads, "
            f"not {num_heads} and {num_kv_heads}"
        )
    return Shape(dtype, head_dim, group)


def _checked_shape(queries: mx.array, keys: mx.array, values: mx.array, plan: DecodePlan) -> Shape:
    _check_pools(queries, keys, values)
    if keys.shape[1:3] != (plan.num_kv_heads, plan.block_size):
        raise ValueError(
            f"the plan is for {plan.num_kv_heads} kv heads and blocks of {plan.block_size} tokens, "
            f"the pools have {keys.shape[1]} and {keys.shape[2]}"
        )
    if keys.shape[0] < plan.num_blocks:
        raise ValueError(
            f"a block table names block {plan.num_blocks - 1}, the pools have {keys.shape[0]}"
        )
    if queries.shape[0] != plan.num_rows:
        raise ValueError(f"the plan is for {plan.num_rows} rows, queries has {queries.shape[0]}")
    return _shape(queries.dtype, queries.shape[1], keys.shape[1], queries.shape[2])


def _check_pools(queries: mx.array, keys: mx.array, values: mx.array) -> None:
    if queries.ndim != 3:
        raise ValueError(f"queries must be [rows, query heads, head dim], not {queries.shape}")
    if keys.ndim != 4 or keys.shape != values.shape:
        raise ValueError(
            "keys and values must both be [blocks, kv heads, block size, head dim], "
            f"not {keys.shape} and {values.shape}"
        )
    if keys.shape[3] != queries.shape[2]:
        raise ValueError(f"head dims differ: queries {queries.shape[2]}, keys {keys.shape[3]}")
    if not queries.dtype == keys.dtype == values.dtype:
        raise ValueError(
            f"dtypes differ: queries {queries.dtype}, keys {keys.dtype}, values {values.dtype}"
        )
    if keys.size >= MAX_ELEMENTS:
        raise ValueError(f"a pool must have fewer than 2^31 elements, not {keys.size}")


# ---- prompt chunks -------------------------------------------------------------------------------


def paged_prefill(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    table: IntArray,
    context_len: int,
    scale: float,
) -> mx.array:
    """Causal attention of a prompt chunk of one sequence, after its cached prefix; one layer.

    Gathers the sequence's blocks and uses MLX's fused attention: with many queries the gathered
    bytes are small beside the work. The gathered size goes in few steps, so that MLX's buffer
    cache has a fitting buffer at hand. Works on every MLX device.

    Args:
        queries: [query tokens, query heads, head dim], the last tokens of the context.
        keys, values: [blocks, kv heads, block size, head dim].
        table: int32 [width], the sequence's block table.
        context_len: tokens of the sequence, the chunk included.
        scale: multiplies the scores.

    Returns:
        [query tokens, query heads, head dim].

    Raises:
        ValueError: the arguments do not fit together.
    """
    _check_pools(queries, keys, values)
    num_blocks, kv_heads, block_size, head_dim = keys.shape
    used = -(-context_len // block_size)
    if not 1 <= queries.shape[0] <= context_len:
        raise ValueError(
            f"a chunk of {queries.shape[0]} tokens does not fit a context of {context_len}"
        )
    if queries.shape[1] % kv_heads:
        raise ValueError(f"{queries.shape[1]} query heads for {kv_heads} kv heads")
    blocks = np.asarray(table, dtype=np.int32)[:used]
    if len(blocks) < used or blocks.min() < 0 or blocks.max() >= num_blocks:
        raise ValueError(
            f"table must name {used} of the pool's {num_blocks} blocks for {context_len} tokens"
        )
    padded = np.full(bucket(used), blocks[-1], dtype=np.int32)
    padded[:used] = blocks
    index = mx.array(padded)

    def sequence(pool: mx.array) -> mx.array:
        gathered = pool[index].transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, head_dim)
        return gathered[:, :, :context_len]

    out = mx.fast.scaled_dot_product_attention(
        queries.transpose(1, 0, 2)[None],
        sequence(keys),
        sequence(values),
        scale=scale,
        mask="causal",
    )
    return out[0].transpose(1, 0, 2)
