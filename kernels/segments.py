"""The work of one decode step as segments: runs of blocks, each read once for a set of rows.

Three things are one list here: plain decode (one row, its blocks), a long context split over the
GPU (one row, several runs) and a prefix that many rows share (many rows, one run). Pure numpy:
the host plans once per step, every layer uses the plan.

Splitting a context and merging partial softmaxes: Flash-Decoding (Dao et al. 2023). One read of a
shared prefix: Hydragen (Juravsky et al. 2024), RelayAttention (Zhu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

THREADGROUPS_PER_CORE = 4  # enough to hide a load's latency behind the others' work
MIN_SPLIT_TOKENS = 128  # below this a split's partial result costs more than it gains
MIN_SHARED_TOKENS = 32  # below this a shared run's partial results cost more than its reads
MAX_SET_ROWS = 64  # rows that one segment serves


@dataclass(frozen=True)
class SharedPrefix:
    """A run of blocks that several rows have in common.

    Attributes:
        rows: row numbers, int32 [n].
        blocks: block numbers of the run, int32 [m]: entries start .. start + m of each row's table.
        start: table index of the run's first block.
    """

    rows: IntArray
    blocks: IntArray
    start: int = 0

    @property
    def blocks_saved(self) -> int:
        """Block reads that sharing avoids."""
        return (len(self.rows) - 1) * len(self.blocks)


@dataclass(frozen=True)
class SegmentList:
    """Segments of one launch. There is one partial result per (segment, row) pair.

    Attributes:
        segments: int32 [n, 5]: the row whose table names the blocks, the first token, the number
            of tokens, the first member, the number of members.
        members: int32 [partials, 2]: row, and the number of its partial result.
        partial_starts: int32 [rows + 1]: row i's partials are partial_starts[i] up to
            partial_starts[i + 1].
    """

    segments: IntArray
    members: IntArray
    partial_starts: IntArray

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def num_partials(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class Segments:
    """What the kernels of one step compute: segments of several rows, and of one row each."""

    shared: SegmentList
    own: SegmentList


def shared_prefixes(
    block_tables: IntArray,
    full_blocks: IntArray,
    min_rows: int = 2,
    min_blocks: int = 1,
    nested: bool = False,
) -> list[SharedPrefix]:
    """Groups of rows whose tables begin with the same blocks.

    Args:
        block_tables: int32 [rows, width], padding -1.
        full_blocks: int32 [rows], how many leading blocks row i attends to in full; only these
            are shared.
        min_rows: the smallest group.
        min_blocks: the shortest run.
        nested: False: every row is in one group at most, and the groups are those that save the
            most reads. True: rows that share a further run form a further group, with `start` > 0;
            the runs of a row follow each other without a gap.

    Returns:
        The groups, an outer one before those inside it.

    Raises:
        ValueError: the arguments' shapes or values do not fit together.
    """
    tables, full = _checked(block_tables, full_blocks)
    if min_rows < 2 or min_blocks < 1:
        raise ValueError(
            f"min_rows must be at least 2 and min_blocks at least 1, not {min_rows}, {min_blocks}"
        )
    if len(tables) < min_rows or not tables.shape[1]:
        return []
    # Most steps share nothing: distinct first blocks say so at once.
    first_blocks = np.where(full > 0, tables[:, 0], -1 - np.arange(len(tables)))
    _, group_of, counts = np.unique(first_blocks, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(counts[group_of] >= min_rows)
    if not len(candidates):
        return []
    order, common = _sorted_with_common(tables, full, candidates)
    groups: list[SharedPrefix] = []
    if nested:
        _nested_groups(tables, order, common, min_rows, min_blocks, groups)
    else:
        _best_groups(tables, order, common, (0, len(order)), (min_rows, min_blocks), groups)
    return groups


def plan_segments(
    block_tables: IntArray,
    context_lens: IntArray,
    *,
    block_size: int,
    num_kv_heads: int,
    gpu_cores: int,
    share: bool = True,
    max_set_rows: int = MAX_SET_ROWS,
    min_split_tokens: int = MIN_SPLIT_TOKENS,
    min_shared_tokens: int = MIN_SHARED_TOKENS,
) -> Segments:
    """Cut the step's contexts into segments.

    Runs are split in proportion to their length until segments x kv heads reaches
    4 threadgroups per GPU core, and not further; no part is shorter than min_split_tokens.

    Args:
        block_tables: int32 [rows, width], padding -1.
        context_lens: int32 [rows], tokens that each row attends to, at least 1.
        block_size: tokens per block.
        num_kv_heads: threadgroups per segment.
        gpu_cores: cores to fill.
        share: read runs that several rows share once.
        max_set_rows: rows per segment, at most 64.

    Raises:
        ValueError: a value is out of range, or a table is too narrow for its context.
    """
    contexts = np.asarray(context_lens, dtype=np.int32)
    _check_plan(block_tables, contexts, block_size, num_kv_heads, gpu_cores, max_set_rows)
    num_rows = len(contexts)
    covered = np.zeros(num_rows, dtype=np.int32)  # tokens in a row's shared runs
    shared: list[tuple[tuple[int, int, int], IntArray]] = []
    single: list[tuple[int, int, int]] = []
    if share and num_rows > 1:
        min_blocks = max(1, -(-min_shared_tokens // block_size))
        full = contexts // np.int32(block_size)
        for group in shared_prefixes(block_tables, full, 2, min_blocks, nested=True):
            first, tokens = group.start * block_size, len(group.blocks) * block_size
            covered[group.rows] = first + tokens
            for rows in _row_sets(group.rows, max_set_rows):
                run = (int(rows[0]), first, tokens)
                if len(rows) > 1:
                    shared.append((run, rows))
                else:
                    single.append(run)
    rest = np.flatnonzero(covered < contexts).astype(np.int32)
    own = np.stack([rest, covered[rest], contexts[rest] - covered[rest]], axis=1)
    if single:
        own = np.concatenate([own, np.array(single, dtype=np.int32)])

    runs = np.array([run for run, _ in shared], dtype=np.int32).reshape(-1, 3)
    wanted = -(-THREADGROUPS_PER_CORE * gpu_cores // num_kv_heads)
    parts = _parts(np.concatenate([runs[:, 2], own[:, 2]]), wanted, min_split_tokens)
    return Segments(
        _assemble(runs, parts[: len(runs)], [rows for _, rows in shared], num_rows),
        _assemble(own, parts[len(runs) :], own[:, :1], num_rows),
    )


def bucket(count: int, smallest: int = 8) -> int:
    """The smallest size of the series 8, 10, 12, 14, 16, 20, 24, ... that holds `count`.

    Four sizes per power of two: arrays padded to them come in few sizes and waste at most a fifth.
    """
    if count <= smallest:
        return smallest
    step = max(1, 1 << ((count - 1).bit_length() - 3))
    return -(-count // step) * step


# ---- shared prefixes -----------------------------------------------------------------------------


def _checked(block_tables: IntArray, full_blocks: IntArray) -> tuple[IntArray, IntArray]:
    tables = np.asarray(block_tables, dtype=np.int32)
    full = np.asarray(full_blocks, dtype=np.int32)
    if tables.ndim != 2:
        raise ValueError(f"block_tables must be [rows, width], not of shape {tables.shape}")
    if full.shape != tables.shape[:1]:
        raise ValueError(f"full_blocks must have shape {tables.shape[:1]}, not {full.shape}")
    if len(full) and (full.min() < 0 or full.max() > tables.shape[1]):
        raise ValueError(
            f"full_blocks must lie in 0 .. {tables.shape[1]} (the width), "
            f"not {full.min()} .. {full.max()}"
        )
    return tables, full


def _sorted_with_common(
    tables: IntArray, full: IntArray, rows: NDArray[np.intp]
) -> tuple[NDArray[np.intp], list[int]]:
    """Sort rows so that common prefixes are neighbours; count the blocks shared with the next."""
    limit = full[rows]
    width = int(limit.max())
    keys = np.full((len(rows), width + 1), -1, dtype=np.int32)
    keys[:, :width] = tables[rows, :width]
    # A mark ends each row's full blocks: a shorter row never lies between two that share more.
    # Any order of the bytes brings equal prefixes together.
    keys[np.arange(len(rows)), limit] = -1
    sort = np.argsort(keys.view(f"V{keys.itemsize * (width + 1)}").ravel())
    keys, limit = keys[sort], limit[sort]
    differ = keys[1:] != keys[:-1]
    equal_run = differ.argmax(axis=1)
    equal_run[~differ[np.arange(len(differ)), equal_run]] = width
    common = np.minimum(equal_run, np.minimum(limit[1:], limit[:-1]))
    return rows[sort], common.tolist()


def _group(tables: IntArray, rows: NDArray[np.intp], start: int, end: int) -> SharedPrefix:
    members: IntArray = np.sort(rows).astype(np.int32)
    return SharedPrefix(members, tables[members[0], start:end], start)


def _children(
    common: list[int], first: int, last: int, depth: int, min_rows: int
) -> list[tuple[int, int]]:
    """Split sorted rows first .. last where neighbours share no more than `depth` blocks."""
    spans = []
    for i in range(first, last):
        if i == last - 1 or common[i] <= depth:
            if i + 1 - first >= min_rows:
                spans.append((first, i + 1))
            first = i + 1
    return spans


def _nested_groups(
    tables: IntArray,
    order: NDArray[np.intp],
    common: list[int],
    min_rows: int,
    min_blocks: int,
    groups: list[SharedPrefix],
) -> None:
    pending = [(0, len(order), 0)]
    while pending:
        first, last, start = pending.pop()
        depth = min(common[first : last - 1])
        inner = start
        if depth - start >= min_blocks:  # else the rows inside take this short run with theirs
            groups.append(_group(tables, order[first:last], start, depth))
            inner = depth
        pending += [(a, b, inner) for a, b in _children(common, first, last, depth, min_rows)]


def _best_groups(
    tables: IntArray,
    order: NDArray[np.intp],
    common: list[int],
    span: tuple[int, int],
    minimum: tuple[int, int],
    groups: list[SharedPrefix],
) -> int:
    """Append the groups within span that save the most reads; returns how many they save."""
    first, last = span
    depth = min(common[first : last - 1])
    inside: list[SharedPrefix] = []
    saved_inside = sum(
        _best_groups(tables, order, common, child, minimum, inside)
        for child in _children(common, first, last, depth, minimum[0])
    )
    saved = (last - first - 1) * depth if depth >= minimum[1] else 0
    if saved >= saved_inside and saved:
        groups.append(_group(tables, order[first:last], 0, depth))
        return saved
    groups.extend(inside)
    return saved_inside


# ---- segments ------------------------------------------------------------------------------------


def _check_plan(
    block_tables: IntArray,
    contexts: IntArray,
    block_size: int,
    num_kv_heads: int,
    gpu_cores: int,
    max_set_rows: int,
) -> None:
    if block_tables.ndim != 2 or contexts.shape != block_tables.shape[:1] or not len(contexts):
        raise ValueError(
            "block_tables must be [rows, width] and context_lens [rows] with at least one row, "
            f"not {block_tables.shape} and {contexts.shape}"
        )
    for name, value in (
        ("block_size", block_size),
        ("num_kv_heads", num_kv_heads),
        ("gpu_cores", gpu_cores),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not 1 <= max_set_rows <= MAX_SET_ROWS:
        raise ValueError(f"max_set_rows must lie in 1 .. {MAX_SET_ROWS}, not {max_set_rows}")
    if contexts.min() < 1:
        row = int(contexts.argmin())
        raise ValueError(f"context_lens must be at least 1, but row {row} has {contexts[row]}")
    capacity = block_tables.shape[1] * block_size
    if contexts.max() > capacity:
        row = int(contexts.argmax())
        raise ValueError(
            f"row {row} attends to {contexts[row]} tokens, but its table of "
            f"{block_tables.shape[1]} blocks of {block_size} holds {capacity}"
        )


def _row_sets(rows: IntArray, most: int) -> list[IntArray]:
    return [rows] if len(rows) <= most else np.array_split(rows, -(-len(rows) // most))


def _parts(tokens: IntArray, wanted: int, min_tokens: int) -> NDArray[np.int64]:
    """Parts per run: `wanted` in all, in proportion to the tokens, none under min_tokens."""
    long = tokens.astype(np.int64)
    fair = -(-long * wanted // max(1, int(long.sum())))
    return np.clip(fair, 1, np.maximum(1, long // min_tokens))


def _assemble(
    runs: IntArray,
    parts: NDArray[np.int64],
    sets: Sequence[IntArray] | IntArray,
    num_rows: int,
) -> SegmentList:
    """Cut run i (table row, first token, tokens) into parts[i] segments for the rows sets[i]."""
    if not len(runs):
        empty = np.zeros(num_rows + 1, dtype=np.int32)
        return SegmentList(np.zeros((0, 5), np.int32), np.zeros((0, 2), np.int32), empty)
    set_sizes = np.array([len(rows) for rows in sets])
    set_rows = np.concatenate(list(sets))
    run_of = np.repeat(np.arange(len(runs)), parts)  # of each segment
    index = np.arange(len(run_of)) - np.repeat(np.cumsum(parts) - parts, parts)
    tokens = runs[run_of, 2].astype(np.int64)
    begin = index * tokens // parts[run_of]
    end = (index + 1) * tokens // parts[run_of]
    sizes = set_sizes[run_of]
    first_member = np.cumsum(sizes) - sizes
    set_start = (np.cumsum(set_sizes) - set_sizes)[run_of]
    within = np.arange(int(sizes.sum())) - np.repeat(first_member, sizes)
    member_rows = set_rows[np.repeat(set_start, sizes) + within]
    # A row's partials are neighbours: the merge reads one range.
    partial = np.empty(len(member_rows), dtype=np.int32)
    partial[np.argsort(member_rows, kind="stable")] = np.arange(len(member_rows), dtype=np.int32)
    counts = np.bincount(member_rows, minlength=num_rows)
    segments = np.stack(
        [runs[run_of, 0], runs[run_of, 1] + begin, end - begin, first_member, sizes], axis=1
    )
    return SegmentList(
        segments=segments.astype(np.int32),
        members=np.stack([member_rows, partial], axis=1).astype(np.int32),
        partial_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    )
