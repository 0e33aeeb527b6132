"""Inputs for the paged kernels, what they must give, and what they must load.

Blocks that no table names and the unused tail of every last block hold NaN.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels.metal import paged_decode, plan_decode
from tests import metal_on_cpu
from tests.metal_on_cpu.kernel import to_numpy

METAL = mx.metal.is_available()

# Largest error relative to the largest output.
TOLERANCE = {mx.float32: 1e-6, mx.float16: 5e-4, mx.bfloat16: 4e-3}


def require_emulator() -> None:
    """Skip the calling test module, with one message, where kernels cannot run at all.

    With CI set to "true" a missing compiler is a failure: nothing is skipped there.
    """
    missing = None if METAL else metal_on_cpu.missing_clang()
    if missing and os.environ.get("CI") == "true":
        pytest.fail(missing, pytrace=False)
    if missing:
        pytest.skip(missing, allow_module_level=True)


def kernel_factory(**checks: Any) -> Callable[..., Any] | None:
    """None (the real kernels) where Metal is real, else the emulator's factory."""
    if METAL:
        return None
    return metal_on_cpu.factory(may_stay_unwritten=("acc", "stats"), **checks)


@contextlib.contextmanager
def compiling_ahead(
    request: pytest.FixtureRequest, launches: Iterable[Callable[[Any], object]]
) -> Iterator[None]:
    """While the tests of a module run, compile what they will need.

    Args:
        request: of a fixture of the module; a run of a few of its tests compiles nothing ahead.
        launches: each calls kernels made by the factory that it is given.
    """
    tests = sum(item.path == request.path for item in request.session.items)
    if METAL or tests < 20:
        yield
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for launch in launches:
            launch(metal_on_cpu.factory(compile_in=pool))
        try:
            yield
        finally:
            pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Case:
    """One step's decode attention."""

    queries: mx.array
    keys: mx.array
    values: mx.array
    block_tables: np.ndarray
    context_lens: np.ndarray
    scale: float
    expected: np.ndarray  # float64

    @property
    def distinct_bytes(self) -> int:
        """Bytes of K and V of the different tokens attended to."""
        _, kv_heads, block_size, head_dim = self.keys.shape
        slots = set()
        for table, context in zip(self.block_tables, self.context_lens, strict=True):
            tokens = np.arange(context)
            slots.update((table[tokens // block_size] * block_size + tokens % block_size).tolist())
        return 2 * len(slots) * kv_heads * head_dim * int(self.keys.itemsize)


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        error: the largest, relative to the largest output.
        loaded: bytes of K and V loaded, in units of the distinct bytes (emulator only).
        other: bytes of everything else, loaded and stored, in units of the loaded K and V.
        output: what the kernel gave.
    """

    error: float
    loaded: float
    other: float
    output: np.ndarray


def make_case(
    contexts: Sequence[int],
    *,
    group: int,
    head_dim: int = 128,
    block_size: int = 16,
    kv_heads: int = 2,
    dtype: mx.Dtype = mx.float32,
    shared_tokens: int = 0,
    scattered: bool = True,
    spare_columns: int = 0,
    seed: int = 0,
) -> Case:
    """Random queries and pools; the first shared_tokens // block_size blocks are common."""
    rng = np.random.default_rng(seed)
    context_lens = np.array(contexts, dtype=np.int32)
    rows, used = len(context_lens), -(-context_lens // block_size)
    common = shared_tokens // block_size
    num_blocks = common + int((used - common).sum()) + 3
    numbers = np.arange(num_blocks)
    if scattered:
        rng.shuffle(numbers)
    tables = np.full((rows, int(used.max()) + spare_columns), -1, dtype=np.int32)
    next_block = common
    for i in range(rows):
        own = int(used[i]) - common
        tables[i, :common] = numbers[:common]
        tables[i, common : used[i]] = numbers[next_block : next_block + own]
        next_block += own
    pools = np.full((2, num_blocks, kv_heads, block_size, head_dim), np.nan, dtype=np.float32)
    for i in range(rows):
        for j in range(int(used[i])):
            tokens = min(block_size, int(context_lens[i]) - j * block_size)
            shape = (2, kv_heads, tokens, head_dim)
            pools[:, tables[i, j], :, :tokens] = rng.standard_normal(shape)
    queries = rng.standard_normal((rows, kv_heads * group, head_dim)).astype(np.float32)
    q, k, v = (mx.array(a).astype(dtype) for a in (queries, pools[0], pools[1]))
    scale = head_dim**-0.5
    expected = reference(q, k, v, tables, context_lens, scale)
    return Case(q, k, v, tables, context_lens, scale, expected)


def as_float64(array: mx.array) -> np.ndarray:
    return to_numpy(array).astype(np.float64)


def reference(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    block_tables: np.ndarray,
    context_lens: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Attention by its definition, in float64."""
    out = np.empty(queries.shape)
    kv_heads, block_size, head_dim = keys.shape[1:]
    q64, *pools = (as_float64(a) for a in (queries, keys, values))
    for i, context in enumerate(context_lens):
        blocks = block_tables[i, : -(-context // block_size)]
        k, v = (
            pool[blocks].swapaxes(0, 1).reshape(kv_heads, -1, head_dim)[:, :context]
            for pool in pools
        )
        q = q64[i].reshape(kv_heads, -1, head_dim)
        scores = q @ k.swapaxes(1, 2) * scale
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[i] = (weights @ v).reshape(-1, head_dim)
    return out


def run_case(
    case: Case, factory: Callable[..., Any] | None, *, gpu_cores: int = 16, **plan: Any
) -> Outcome:
    """Run the kernels; counts cover this run only."""
    kernels = getattr(factory, "kernels", [])
    before = [(k, len(k.reports)) for k in kernels]
    decode_plan = plan_decode(
        case.block_tables,
        case.context_lens,
        num_kv_heads=case.keys.shape[1],
        block_size=case.keys.shape[2],
        gpu_cores=gpu_cores,
        **plan,
    )
    out = as_float64(
        paged_decode(
            case.queries,
            case.keys,
            case.values,
            decode_plan,
            scale=case.scale,
            kernel_factory=factory,
        )
    )
    error = float(np.abs(out - case.expected).max() / np.abs(case.expected).max())
    seen = dict(before)
    reports = [r for k in kernels for r in k.reports[seen.get(k, 0) :]]
    kv = other = 0
    for report in reports:
        for name, buffer in report.buffers.items():
            if name in ("keys", "values"):
                kv += buffer.loaded
            else:
                other += buffer.loaded + buffer.stored
    return Outcome(error, kv / case.distinct_bytes, other / max(kv, 1), out)
