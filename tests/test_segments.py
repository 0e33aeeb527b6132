"""Shared prefixes and the planner, against slow and obvious counterparts."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.kernels.segments import (
    SharedPrefix,
    bucket,
    plan_segments,
    shared_prefixes,
)


def tables_from_tree(seed: int, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Random tables in which rows branch off earlier rows; the unused tail is -1."""
    rng = np.random.default_rng(seed)
    fresh = iter(rng.permutation(rows * width))
    tables = np.full((rows, width), -1, np.int32)
    full = np.zeros(rows, np.int32)
    for i in range(rows):
        used = int(rng.integers(1, width + 1))
        full[i] = rng.integers(0, used + 1)
        keep = int(rng.integers(0, used + 1)) if i and rng.random() < 0.7 else 0
        parent = int(rng.integers(0, i)) if i else 0
        keep = min(keep, int((tables[parent] >= 0).sum())) if i else 0
        tables[i, :keep] = tables[parent, :keep]
        tables[i, keep:used] = [next(fresh) for _ in range(used - keep)]
    return tables, full


def check_group(group: SharedPrefix, tables: np.ndarray, full: np.ndarray) -> None:
    end = group.start + len(group.blocks)
    assert len(group.rows) >= 2
    assert len(group.blocks) >= 1
    assert (np.diff(group.rows) > 0).all()
    for row in group.rows:
        assert end <= full[row]
        assert (tables[row, group.start : end] == group.blocks).all()
        assert (tables[row, : group.start] == tables[group.rows[0], : group.start]).all()


def most_saved(tables: np.ndarray, full: np.ndarray, rows: list[int], depth: int) -> int:
    """The most block reads that disjoint groups of `rows` can save, by trying every depth."""
    if len(rows) < 2:
        return 0
    children: dict[int, list[int]] = {}
    for row in rows:
        if depth < full[row]:
            children.setdefault(int(tables[row, depth]), []).append(row)
    inside = sum(most_saved(tables, full, child, depth + 1) for child in children.values())
    return max((len(rows) - 1) * depth, inside)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9), width=st.integers(1, 7))
def test_flat_groups_are_disjoint_and_save_the_most(seed: int, rows: int, width: int) -> None:
    tables, full = tables_from_tree(seed, rows, width)
    groups = shared_prefixes(tables, full)
    seen: set[int] = set()
    for group in groups:
        check_group(group, tables, full)
        assert group.start == 0
        assert not seen & set(group.rows.tolist())
        seen |= set(group.rows.tolist())
    assert sum(g.blocks_saved for g in groups) == most_saved(tables, full, list(range(rows)), 0)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9), width=st.integers(1, 7))
def test_nested_groups_read_every_distinct_block_once(seed: int, rows: int, width: int) -> None:
    tables, full = tables_from_tree(seed, rows, width)
    covered = np.zeros(rows, int)
    reads = 0
    for group in shared_prefixes(tables, full, nested=True):
        check_group(group, tables, full)
        assert (covered[group.rows] == group.start).all()  # runs follow without a gap
        covered[group.rows] += len(group.blocks)
        reads += len(group.blocks)
    reads += int((full - covered).sum())
    prefixes = {tuple(tables[i, : j + 1]) for i in range(rows) for j in range(full[i])}
    assert reads == len(prefixes)


def test_short_runs_and_small_groups_are_left_out() -> None:
    tables = np.array([[1, 2, 3], [1, 2, 4], [1, 5, 6], [7, 8, 9]], np.int32)
    full = np.full(4, 3, np.int32)
    (flat,) = shared_prefixes(tables, full)
    assert flat.rows.tolist() in ([0, 1, 2], [0, 1])
    assert flat.blocks_saved == 2
    (pair,) = shared_prefixes(tables, full, min_blocks=2)
    assert (pair.rows.tolist(), pair.blocks.tolist()) == ([0, 1], [1, 2])
    (three,) = shared_prefixes(tables, full, min_rows=3, nested=True)
    assert (three.rows.tolist(), three.blocks.tolist()) == ([0, 1, 2], [1])
    outer, inner = shared_prefixes(tables, full, nested=True)
    assert (outer.rows.tolist(), outer.blocks.tolist(), outer.start) == ([0, 1, 2], [1], 0)
    assert (inner.rows.tolist(), inner.blocks.tolist(), inner.start) == ([0, 1], [2], 1)
    # A run too short to be read apart goes to the group inside it.
    (whole,) = shared_prefixes(tables, full, min_blocks=2, nested=True)
    assert (whole.rows.tolist(), whole.blocks.tolist(), whole.start) == ([0, 1], [1, 2], 0)


def test_a_short_row_does_not_separate_longer_ones() -> None:
    tables = np.array([[1, 2, 3], [1, -1, -1], [1, 2, 4]], np.int32)
    (group,) = shared_prefixes(tables, np.array([3, 0, 3], np.int32))
    assert (group.rows.tolist(), group.blocks.tolist()) == ([0, 2], [1, 2])


@pytest.mark.parametrize("nested", [False, True])
def test_planning_is_fast(nested: bool) -> None:
    tables = np.random.default_rng(0).permutation(64 * 512).reshape(64, 512).astype(np.int32)
    tables[:, :256] = tables[0, :256]
    full = np.full(64, 511, np.int32)
    best = 1.0
    for _ in range(50):
        start = time.perf_counter()
        shared_prefixes(tables, full, nested=nested)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3  # about 0.1 ms on an idle machine; the bound allows for a busy one


def test_bad_arguments_are_refused() -> None:
    tables = np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match="block_tables"):
        shared_prefixes(tables[0], np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="full_blocks"):
        shared_prefixes(tables, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="full_blocks must lie"):
        shared_prefixes(tables, np.array([4, 0], np.int32))
    with pytest.raises(ValueError, match="min_rows"):
        shared_prefixes(tables, np.zeros(2, np.int32), min_rows=1)
    plan: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "gpu_cores": 8}
    with pytest.raises(ValueError, match="row 1 has 0"):
        plan_segments(tables, np.array([1, 0], np.int32), **plan)
    with pytest.raises(ValueError, match="row 0 attends to 13 tokens"):
        plan_segments(tables, np.array([13, 1], np.int32), **plan)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        plan_segments(tables, np.array([1, 1], np.int32), **{**plan, "block_size": 0})
    with pytest.raises(ValueError, match="max_set_rows"):
        plan_segments(tables, np.array([1, 1], np.int32), **plan, max_set_rows=65)


def plain_tables(rows: int, width: int) -> np.ndarray:
    return np.arange(rows * width, dtype=np.int32).reshape(rows, width)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 12),
    width=st.integers(1, 8),
    block_size=st.sampled_from([1, 4, 16, 100]),
    cores=st.integers(1, 60),
    max_set_rows=st.integers(1, 5),
    min_shared=st.integers(1, 40),
)
def test_a_plan_covers_every_token_of_every_row_once(
    seed: int,
    rows: int,
    width: int,
    block_size: int,
    cores: int,
    max_set_rows: int,
    min_shared: int,
) -> None:
    tables, full = tables_from_tree(seed, rows, width)
    rng = np.random.default_rng(seed)
    used = (tables >= 0).sum(axis=1)
    full = np.minimum(full, used - 1)
    contexts = (full * block_size + rng.integers(1, block_size + 1, rows)).astype(np.int32)
    plan = plan_segments(
        tables,
        contexts,
        block_size=block_size,
        num_kv_heads=2,
        gpu_cores=cores,
        max_set_rows=max_set_rows,
        min_split_tokens=8,
        min_shared_tokens=min_shared,
    )
    counts = np.zeros((rows, width * block_size), int)
    for kind in (plan.shared, plan.own):
        partials: dict[int, list[int]] = {i: [] for i in range(rows)}
        for table_row, first, tokens, start, size in kind.segments:
            assert tokens > 0
            assert (2 <= size <= max_set_rows) if kind is plan.shared else size == 1
            blocks = slice(first // block_size, -(-(first + tokens) // block_size))
            for row, partial in kind.members[start : start + size]:
                assert (tables[row, blocks] == tables[table_row, blocks]).all()
                counts[row, first : first + tokens] += 1
                partials[row].append(int(partial))
        for row in range(rows):
            begin, end = kind.partial_starts[row : row + 2]
            assert sorted(partials[row]) == list(range(begin, end))
        assert kind.partial_starts[-1] == kind.num_partials
    for row in range(rows):
        assert (counts[row, : contexts[row]] == 1).all()
        assert (counts[row, contexts[row] :] == 0).all()


@pytest.mark.parametrize(
    ("rows", "context", "kv_heads", "cores", "segments"),
    [
        (1, 100, 2, 16, 1),  # too short to split
        (1, 131072, 2, 40, 80),  # 4 threadgroups per core
        (1, 1024, 2, 40, 8),  # 128 tokens each
        (16, 4096, 2, 16, 32),
        (16, 4095, 2, 16, 32),
        (16, 4096, 2, 8, 16),  # rows and heads fill the GPU
        (256, 4096, 8, 40, 256),
    ],
)
def test_contexts_are_split_until_the_gpu_is_full_and_not_further(
    rows: int, context: int, kv_heads: int, cores: int, segments: int
) -> None:
    plan = plan_segments(
        plain_tables(rows, -(-context // 16)),
        np.full(rows, context, np.int32),
        block_size=16,
        num_kv_heads=kv_heads,
        gpu_cores=cores,
    )
    assert len(plan.shared) == 0
    assert len(plan.own) == segments
    assert np.ptp(plan.own.segments[:, 2]) <= 1


def test_a_long_row_among_short_ones_is_split() -> None:
    contexts = np.array([8192, 256, 256, 256], np.int32)
    plan = plan_segments(plain_tables(4, 512), contexts, block_size=16, num_kv_heads=2, gpu_cores=8)
    assert np.diff(plan.own.partial_starts).tolist() == [15, 1, 1, 1]


def test_sharing_can_be_switched_off() -> None:
    tables = plain_tables(4, 8)
    tables[:, :6] = tables[0, :6]
    contexts = np.full(4, 128, np.int32)
    arguments: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "gpu_cores": 1}
    assert len(plan_segments(tables, contexts, **arguments).shared) == 1
    assert len(plan_segments(tables, contexts, **arguments, share=False).shared) == 0


def test_buckets_are_few_and_waste_little() -> None:
    sizes = [bucket(n) for n in range(1, 4097)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(size <= max(8, n * 1.25) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 4 * 9 + 1
