"""The reference attention against float64, with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_paged.kernels import reference
from mlx_paged.kernels.reference import paged_attention, plan_reference

IntArray = NDArray[np.int32]
TILES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one query at a time": {"MIN_TILE": 1, "MAX_SCORES": 1},
    "small tiles": {"MIN_TILE": 3, "MAX_SCORES": 60},
    "every row alone": {"MAX_WASTE": 0.0, "FREE_WASTE": 0, "ROUND_TOKENS": 1},
    "all rows together": {"MAX_WASTE": 1.0, "FREE_WASTE": 2**30},
    "every shared block": {"MIN_SHARED_TOKENS": 1},
    "shared blocks and small tiles": {"MIN_SHARED_TOKENS": 1, "MIN_TILE": 2, "MAX_SCORES": 40},
}


class Case(NamedTuple):
    """A step: packed queries over a pool."""

    queries: NDArray[Any]
    keys: NDArray[Any]
    values: NDArray[Any]
    tables: IntArray
    contexts: IntArray
    counts: IntArray

    @property
    def starts(self) -> IntArray:
        return np.append(0, np.cumsum(self.counts)).astype(np.int32)


def make_case(
    contexts: list[int],
    counts: list[int],
    *,
    size: int = 4,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    shared: dict[int, tuple[int, int]] | None = None,
    seed: int = 0,
    tails: float = np.nan,
) -> Case:
    """Random queries, keys and values.

    Args:
        contexts, counts: of the rows.
        shared: row -> (earlier row, blocks): it begins with the same blocks.
        tails: what is in the slots past a row's context; every other block is NaN.
    """
    rng = np.random.default_rng(seed)
    lengths = [-(-c // size) for c in contexts]
    total = sum(lengths) + 3
    numbers = iter(rng.permutation(total).tolist())
    tables = np.full((len(contexts), max(lengths)), -1, np.int32)
    for row, length in enumerate(lengths):
        other, blocks = (shared or {}).get(row, (0, 0))
        tables[row, :blocks] = tables[other, :blocks]
        tables[row, blocks:length] = [next(numbers) for _ in range(length - blocks)]
    shape = (total, kv_heads, size, dim)
    keys, values = (np.full(shape, np.nan, np.float32) for _ in range(2))
    for row, context in enumerate(contexts):
        keys[tables[row, : lengths[row]]] = np.nan
        values[tables[row, lengths[row] - 1]] = tails
        for array in (keys, values):
            for i, block in enumerate(tables[row, : lengths[row]]):
                used = min(size, context - i * size)
                fresh = np.random.default_rng((seed, int(block), array is keys))
                array[block, :, :used] = fresh.standard_normal((kv_heads, size, dim))[:, :used]
    queries = 2 * rng.standard_normal((sum(counts), kv_heads * group, dim))
    return Case(
        queries.astype(np.float32),
        keys,
        values,
        tables,
        np.array(contexts, np.int32),
        np.array(counts, np.int32),
    )


def exact(case: Case, scale: float) -> NDArray[np.float64]:
    """The definition, query by query."""
    out: NDArray[Any] = np.zeros(case.queries.shape)
    size = case.keys.shape[2]
    group = case.queries.shape[1] // case.keys.shape[1]
    for row, (context, count) in enumerate(zip(case.contexts, case.counts, strict=True)):
        slots = [(case.tables[row, p // size], p % size) for p in range(context)]
        keys = np.array([case.keys[b, :, o] for b, o in slots], np.float64)
        values = np.array([case.values[b, :, o] for b, o in slots], np.float64)
        for j in range(count):
            token = case.starts[row] + j
            seen = context - count + j + 1
            for head in range(out.shape[1]):
                query = case.queries[token, head].astype(np.float64) * scale
                scores = keys[:seen, head // group] @ query
                weights = np.exp(scores - scores.max())
                out[token, head] = weights @ values[:seen, head // group] / weights.sum()
    return out


def compute(case: Case, scale: float, **options: bool) -> NDArray[Any]:
    plan = plan_reference(
        case.tables,
        case.contexts,
        case.counts,
        block_size=case.keys.shape[2],
        num_kv_heads=case.keys.shape[1],
        **options,
    )
    out = plan.attend(
        mx.array(case.queries), mx.array(case.keys), mx.array(case.values), scale=scale
    )
    return np.array(out)


def check(case: Case, **options: bool) -> None:
    scale = case.queries.shape[-1] ** -0.5
    expected = exact(case, scale)
    np.testing.assert_allclose(compute(case, scale, **options), expected, rtol=0, atol=2e-6)


@contextmanager
def tiled(**constants: Any) -> Iterator[None]:
    """Let the planner's constants be others."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(reference, name, value)
        yield


MIXED: dict[str, Any] = {
    "contexts": [1, 23, 24, 9, 17, 40, 8, 25],
    "counts": [1, 1, 1, 9, 5, 37, 1, 1],
    "shared": {2: (1, 5), 4: (1, 2), 7: (2, 6)},
}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("share", [True, False])
def test_a_mixed_step_in_every_tiling(tiles: str, share: bool) -> None:
    with tiled(**TILES[tiles]):
        check(make_case(**MIXED), share=share)
        check(make_case(**MIXED, tails=1e4), share=share, finite_tails=True)


@pytest.mark.parametrize("size", [1, 2, 7, 16, 256])
@pytest.mark.parametrize("group", [1, 5, 6, 7, 8])
def test_block_sizes_and_groups(size: int, group: int) -> None:
    contexts, counts = [33, 5, 16, 1, 48], [1, 5, 1, 1, 20]
    with tiled(MIN_SHARED_TOKENS=1):
        check(make_case(contexts, counts, size=size, group=group, shared={2: (0, 15 // size)}))


@pytest.mark.parametrize("tiles", TILES)
def test_a_whole_prompt_and_each_of_its_last_chunks(tiles: str) -> None:
    with tiled(**TILES[tiles]):
        for count in (1, 2, 3, 4, 5, 12, 13):
            check(make_case([13], [count]))


def test_decode_rows_of_equal_and_of_very_different_lengths() -> None:
    check(make_case([12] * 5, [1] * 5))
    check(make_case([1, 2, 3, 400, 5, 390], [1] * 6))


def test_a_prefix_shared_by_all_rows_is_read_once() -> None:
    case = make_case([80 + i for i in range(6)], [1] * 6, shared={1: (0, 19), 5: (0, 19)})
    with tiled(MIN_SHARED_TOKENS=64):
        plan = plan_reference(case.tables, case.contexts, case.counts, block_size=4, num_kv_heads=2)
        assert len(plan.shared) == 1
        assert plan.shared[0].blocks.shape == (2, 19)
        assert plan.shared[0].query_index.tolist() == [0, 1, 5]
        check(case)
        alone = plan_reference(
            case.tables, case.contexts, case.counts, block_size=4, num_kv_heads=2, share=False
        )
        assert alone.shared == ()


def test_cost_grows_with_the_sum_of_the_contexts() -> None:
    """One long row among many short ones does not make the short ones long."""
    contexts = [4000] + [8] * 63
    case = make_case(contexts, [1] * 64, kv_heads=1, group=1, dim=2)
    plan = plan_reference(case.tables, case.contexts, case.counts, block_size=4, num_kv_heads=1)
    read = sum(group.blocks.size for group in plan.plain) * 4
    assert read <= 1.3 * (sum(contexts) + len(contexts) * reference.ROUND_TOKENS)
    assert read < 0.1 * len(contexts) * max(contexts)


def test_the_plan_of_the_next_step() -> None:
    """`advance` gives what planning anew would, while the same blocks are read."""
    before = make_case([9, 29, 30, 10], [1] * 4, shared={2: (1, 7)})
    with tiled(MIN_SHARED_TOKENS=1):
        plan = plan_reference(
            before.tables, before.contexts, before.counts, block_size=4, num_kv_heads=2
        )
        after = make_case([11, 31, 32, 12], [1] * 4, shared={2: (1, 7)})
        np.testing.assert_array_equal(before.tables, after.tables)
        plan = plan.advance(after.contexts)
        arrays = (mx.array(a) for a in (after.queries, after.keys, after.values))
        out = plan.attend(*arrays, scale=0.3)
        np.testing.assert_allclose(np.array(out), exact(after, 0.3), rtol=0, atol=2e-6)


def test_the_padding_of_tables_is_never_read() -> None:
    case = make_case([9, 3, 17], [1, 3, 2])
    wide = np.full((3, 40), -(10**6), np.int32)
    wide[:, : case.tables.shape[1]] = np.where(case.tables < 0, -(10**6), case.tables)
    check(case._replace(tables=wide))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_pools_are_summed_in_float32(dtype: mx.Dtype) -> None:
    case = make_case([200, 30], [1, 4], dim=16, tails=0.0)
    rounded = case._replace(
        queries=np.array(mx.array(case.queries).astype(dtype).astype(mx.float32)),
        keys=np.array(mx.array(case.keys).astype(dtype).astype(mx.float32)),
        values=np.array(mx.array(case.values).astype(dtype).astype(mx.float32)),
    )
    queries, keys, values = (
        mx.array(a).astype(dtype) for a in (case.queries, case.keys, case.values)
    )
    out = paged_attention(
        queries, keys, values, case.tables, case.contexts, case.starts, scale=0.25
    )
    assert out.dtype == dtype
    error = np.abs(np.array(out.astype(mx.float32)) - exact(rounded, 0.25)).max()
    assert error < (2e-3 if dtype == mx.float16 else 1.6e-2)  # one rounding, of the result


def test_large_scores_do_not_overflow() -> None:
    case = make_case([40, 41], [1, 1], shared={1: (0, 9)})
    big = case._replace(queries=case.queries * 1e4)
    with tiled(MIN_SHARED_TOKENS=1):
        scale = 0.35
        np.testing.assert_allclose(compute(big, scale), exact(big, scale), rtol=0, atol=1e-3)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_step(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 3, 4, 7, 16]), "block size")
    rows = data.draw(st.integers(1, 7), "rows")
    contexts = [data.draw(st.integers(1, 50)) for _ in range(rows)]
    counts = [data.draw(st.one_of(st.just(1), st.integers(1, c))) for c in contexts]
    shared = {}
    for row in range(1, rows):
        other = data.draw(st.integers(0, row - 1))
        # What a row shares was computed before this step, in both rows.
        full = [(contexts[r] - counts[r]) // size for r in (row, other)]
        shared[row] = (other, data.draw(st.integers(0, min(full))))
    case = make_case(
        contexts,
        counts,
        size=size,
        kv_heads=data.draw(st.integers(1, 3)),
        group=data.draw(st.integers(1, 3)),
        shared=shared,
        seed=data.draw(st.integers(0, 100)),
    )
    with tiled(**TILES[data.draw(st.sampled_from(sorted(TILES)), "tiles")]):
        check(case, share=data.draw(st.booleans(), "share"))
