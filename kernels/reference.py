"""Attention over paged blocks in plain MLX, on any backend: the specification of the kernel.

Work is grouped once per step. Rows of like length are one batched product, so cost grows with the
sum of the contexts and not with rows times the longest. A prefix that several decode rows share is
read once for all of them, and merged with each row's own part by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_paged.kernels.exponential import exponentials
from mlx_paged.kernels.segments import SharedPrefix, shared_prefixes

IntArray = NDArray[np.int32]

MAX_WASTE = 0.25  # of a group's scores may be padding
FREE_WASTE = 1024  # scores of padding that cost less than one more group
MAX_SCORES = 2**17  # queries times tokens in one product, per query head
ROUND_TOKENS = 64  # contexts are padded to a multiple, so that the shapes of steps repeat
FEW_SCORES = 4096  # up to which one softmax is faster than its parts
MIN_TILE = 16  # queries of a prompt chunk done at once, however long its context
MIN_SHARED_TOKENS = 512  # reads that sharing a prefix must save to be worth a merge


class Work(NamedTuple):
    """Some queries of one row over a run of its blocks."""

    row: int
    first_query: int  # position in the packed stream
    num_queries: int
    first_block: int  # index in the row's table
    first_token: int  # the same in tokens
    num_blocks: int
    behind: int  # the row's queries that come after these


class Group(NamedTuple):
    """Rows of like length: [r] rows of [q] queries over [b] blocks, padded to the largest."""

    works: tuple[Work, ...]
    blocks: mx.array  # [r, kv heads, b] matrices of the pool seen as [blocks * kv heads, ...]
    query_index: mx.array | None  # [r, q] in the packed stream; None if it is the stream itself
    limits: mx.array  # [r, 1, 1, 1] or [r, 1, 1, q, 1]: tokens of the run that a query sees

    @property
    def num_queries(self) -> int:
        """Queries per row, padding included."""
        return 1 if self.limits.ndim == 4 else self.limits.shape[3]


class SharedRun(NamedTuple):
    """One run of full blocks for several decode rows."""

    query_index: mx.array  # [r]
    blocks: mx.array  # [kv heads, b]


class ReferencePlan(NamedTuple):
    """What every layer of a step does.

    Attributes:
        plain: groups whose outputs are final.
        partial: groups of rows that also take part in shared runs.
        shared: those runs.
        merge_index: [rows, m] partial results of each row; the last index is an empty one.
        order: [tokens] where each packed token is in the outputs; None if they are in order.
        finite_tails: whether the pool promises finite values past the computed tokens.
    """

    plain: tuple[Group, ...]
    partial: tuple[Group, ...]
    shared: tuple[SharedRun, ...]
    merge_index: mx.array | None
    order: mx.array | None
    finite_tails: bool

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float
    ) -> mx.array:
        """Attention of all queries of the step, scores and sums in float32.

        Args:
            queries: [tokens, query heads, head dim].
            keys, values: [blocks, kv heads, block size, head dim].
            scale: of the scores.

        Returns:
            [tokens, query heads, head dim], in the queries' dtype.
        """
        pool = _Pool(keys, values, self.finite_tails)
        scaled = queries.astype(mx.float32) * scale
        outputs = []
        if self.merge_index is not None:
            partials = [_attend_shared(run, scaled, pool) for run in self.shared]
            partials += [_attend(group, scaled, pool, whole=False) for group in self.partial]
            outputs.append(_merge(partials, self.merge_index))
        outputs += [_attend(group, scaled, pool, whole=True).outputs for group in self.plain]
        result = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        if self.order is not None:
            result = result[self.order]
        return result.astype(queries.dtype)

    def arrays(self) -> list[mx.array | None]:
        """All arrays that `attend` uses, in a fixed order."""
        found = [self.merge_index, self.order]
        for group in (*self.plain, *self.partial):
            found += [group.blocks, group.query_index, group.limits]
        for run in self.shared:
            found += [run.query_index, run.blocks]
        return found

    def with_arrays(self, arrays: Iterable[Any]) -> ReferencePlan:
        """The same plan over other arrays, as `arrays` lists them."""
        rest = iter(arrays)
        merge_index, order = next(rest), next(rest)
        groups = [
            group._replace(blocks=next(rest), query_index=next(rest), limits=next(rest))
            for group in (*self.plain, *self.partial)
        ]
        shared = tuple(SharedRun(next(rest), next(rest)) for _ in self.shared)
        count = len(self.plain)
        return ReferencePlan(
            tuple(groups[:count]),
            tuple(groups[count:]),
            shared,
            merge_index,
            order,
            self.finite_tails,
        )

    def advance(self, context_lens: IntArray) -> ReferencePlan:
        """The plan of the next step, where the same rows have the same blocks and more tokens."""

        def grown(group: Group) -> Group:
            return group._replace(limits=_limits(group.works, context_lens))

        return self._replace(
            plain=tuple(map(grown, self.plain)), partial=tuple(map(grown, self.partial))
        )


def plan_reference(
    block_tables: IntArray,
    context_lens: IntArray,
    query_lens: IntArray,
    *,
    block_size: int,
    num_kv_heads: int,
    finite_tails: bool = False,
    share: bool = True,
) -> ReferencePlan:
    """Group the rows of a step.

    Args:
        block_tables: [rows, width], padding is never dereferenced.
        context_lens: [rows] tokens each row attends to, its own queries included.
        query_lens: [rows] packed queries of each row, at least 1.
        block_size, num_kv_heads: of the pool.
        finite_tails: whether values past the context of a row's last block are known to be finite.
        share: whether to read shared prefixes once.

    Returns:
        The plan for `ReferencePlan.attend`.
    """
    starts = np.cumsum(query_lens) - query_lens
    groups = _shared_groups(block_tables, context_lens, query_lens, block_size) if share else []
    skip = np.zeros(len(query_lens), np.int32)  # blocks of each row that shared runs cover
    for group in groups:
        skip[group.rows] = group.start + len(group.blocks)
    alone: list[Work] = []
    sharing: list[Work] = []
    lengths = zip(
        starts.tolist(), query_lens.tolist(), context_lens.tolist(), skip.tolist(), strict=True
    )
    for row, (start, count, context, covered) in enumerate(lengths):
        works = _tiles(row, start, count, context, covered, block_size)
        (sharing if covered else alone).extend(works)
    heads = np.arange(num_kv_heads, dtype=np.int32)[:, None]
    plain, partial = (
        tuple(
            _make_group(works, block_tables, context_lens, heads, block_size)
            for works in _alike(kind, block_size)
        )
        for kind in (alone, sharing)
    )
    shared = tuple(
        SharedRun(
            mx.array(starts[g.rows].astype(np.int32)), mx.array(g.blocks * num_kv_heads + heads)
        )
        for g in groups
    )
    merge_index = mx.array(_merge_index(groups, partial)) if groups else None
    order = _order(partial, plain)
    if len(plain) == 1 and order is None and _is_stream(plain[0], int(query_lens.sum())):
        plain = (plain[0]._replace(query_index=None),)
    return ReferencePlan(
        plain,
        partial,
        shared,
        merge_index,
        None if order is None else mx.array(order),
        finite_tails,
    )


# Planning


def _tiles(
    row: int, start: int, count: int, context: int, skip: int, block_size: int
) -> list[Work]:
    """Cut a long prompt chunk, so that no product is huge and each tile ends at its own context."""
    tile = max(MIN_TILE, MAX_SCORES // context)
    works = []
    for first in range(0, count, tile):
        num = min(tile, count - first)
        behind = count - first - num
        blocks = -(-(context - behind) // block_size) - skip
        works.append(Work(row, start + first, num, skip, skip * block_size, blocks, behind))
    return works


def _alike(works: list[Work], block_size: int) -> list[list[Work]]:
    """Split into groups in which padding is a small part."""
    groups: list[list[Work]] = []
    queries = blocks = real = 0
    for work in sorted(works, key=lambda w: (-w.num_queries, -w.num_blocks)):
        scores = work.num_queries * work.num_blocks * block_size
        if groups:
            widest = max(blocks, work.num_blocks)
            padded = queries * widest * block_size * (len(groups[-1]) + 1)
            waste = padded - real - scores
            if padded <= MAX_SCORES and waste <= max(MAX_WASTE * padded, FREE_WASTE):
                groups[-1].append(work)
                blocks, real = widest, real + scores
                continue
        groups.append([work])
        queries, blocks, real = work.num_queries, work.num_blocks, scores
    return [sorted(group, key=lambda w: w.first_query) for group in groups]


def _make_group(
    works: Sequence[Work],
    block_tables: IntArray,
    context_lens: IntArray,
    heads: IntArray,
    block_size: int,
) -> Group:
    step = -(-ROUND_TOKENS // block_size)
    width = -(-max(work.num_blocks for work in works) // step) * step
    queries = max(work.num_queries for work in works)
    blocks = np.empty((len(works), width), np.int32)
    for i, work in enumerate(works):
        run = block_tables[work.row, work.first_block : work.first_block + work.num_blocks]
        blocks[i, : work.num_blocks] = run
        blocks[i, work.num_blocks :] = run[0]  # padding reads what the row reads anyway
    index = np.array([work.first_query for work in works])[:, None] + np.arange(queries)
    last = np.array([work.first_query + work.num_queries - 1 for work in works])[:, None]
    return Group(
        tuple(works),
        mx.array(blocks[:, None, :] * len(heads) + heads),
        mx.array(np.minimum(index, last).astype(np.int32)),
        _limits(works, context_lens),
    )


def _limits(works: Sequence[Work], context_lens: IntArray) -> mx.array:
    """Tokens of its run that each query sees, shaped to broadcast against the scores."""
    queries = max(work.num_queries for work in works)
    last = np.array([context_lens[w.row] - w.behind - w.first_token for w in works], np.int32)
    if queries == 1:
        return mx.array(last.reshape(-1, 1, 1, 1))
    first = last - np.array([w.num_queries - 1 for w in works], np.int32)
    seen = np.minimum(first[:, None] + np.arange(queries, dtype=np.int32), last[:, None])
    return mx.array(seen.reshape(len(works), 1, 1, queries, 1))


def _shared_groups(
    block_tables: IntArray, context_lens: IntArray, query_lens: IntArray, block_size: int
) -> list[SharedPrefix]:
    """Prefixes of decode rows worth reading once."""
    # The last block of a row is written in this step, so it is never shared.
    full = np.where(query_lens == 1, (context_lens - 1) // block_size, 0).astype(np.int32)
    least = max(1, MIN_SHARED_TOKENS // (block_size * max(1, len(full) - 1)))
    if len(full) < 2 or np.count_nonzero(full >= least) < 2:
        return []
    groups = shared_prefixes(block_tables, full, min_rows=2, min_blocks=least)
    return [g for g in groups if g.blocks_saved * block_size >= MIN_SHARED_TOKENS]


def _merge_index(groups: list[SharedPrefix], partial: Sequence[Group]) -> IntArray:
    """[rows, m] partial results of each row that shares, in the order of `partial`'s works."""
    found: dict[int, list[int]] = {work.row: [] for group in partial for work in group.works}
    count = 0
    for group in groups:
        for row in group.rows.tolist():
            found[row].append(count)
            count += 1
    for work in (work for group in partial for work in group.works):
        found[work.row].append(count)
        count += 1
    index = np.full((len(found), max(map(len, found.values()))), count, np.int32)
    for i, numbers in enumerate(found.values()):
        index[i, : len(numbers)] = numbers
    return index


def _order(partial: Sequence[Group], plain: Sequence[Group]) -> IntArray | None:
    """Where each packed token is in the outputs; None if they are in order."""
    outputs: list[int] = [work.first_query for group in partial for work in group.works]
    offset = len(outputs)
    order: dict[int, int] = {query: i for i, query in enumerate(outputs)}
    for group in plain:
        for work in group.works:
            for j in range(work.num_queries):
                order[work.first_query + j] = offset + j
            offset += group.num_queries
    index = np.array([order[token] for token in range(len(order))], np.int32)
    return None if offset == len(index) and (index == np.arange(offset)).all() else index


def _is_stream(group: Group, num_tokens: int) -> bool:
    """Whether a group's queries are the packed stream as it is."""
    equal = all(work.num_queries == group.num_queries for work in group.works)
    return equal and len(group.works) * group.num_queries == num_tokens


# Execution


class _Pool:
    """Reads runs of blocks, in float32."""

    def __init__(self, keys: mx.array, values: mx.array, finite_tails: bool) -> None:
        self._keys = keys.reshape(-1, *keys.shape[2:])
        self._values = values.reshape(-1, *values.shape[2:])
        self._finite_tails = finite_tails
        self.num_kv_heads = keys.shape[1]

    def read(self, blocks: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values [..., tokens, head dim] of the runs `blocks` [..., b]."""
        keys, values = self._keys[blocks], self._values[blocks]
        shape = (*blocks.shape[:-1], -1, keys.shape[-1])
        return (
            keys.reshape(shape).astype(mx.float32),
            values.reshape(shape).astype(mx.float32),
        )

    def clean(self, values: mx.array, seen: mx.array) -> mx.array:
        """Values without what no query of their row sees: zero times NaN is NaN."""
        if self._finite_tails:
            return values
        while seen.ndim > values.ndim:
            seen = seen.max(axis=-2)  # a row's last query sees the most
        return mx.where(seen.swapaxes(-1, -2), values, 0)


class _Partial(NamedTuple):
    """Attention over a part of the tokens: outputs [n, heads, dim] for that part alone."""

    outputs: mx.array
    maxima: mx.array | None  # of the scores, [n, heads, 1]; None if there are no other parts
    sums: mx.array | None  # of exp(score - maximum), [n, heads, 1]


def _attend(group: Group, scaled: mx.array, pool: _Pool, *, whole: bool) -> _Partial:
    """Each row's queries over its own run, be it the whole context: [r * q, heads, ...]."""
    rows, q = group.blocks.shape[0], group.num_queries
    heads, dim = scaled.shape[1:]
    queries = scaled if group.query_index is None else scaled[group.query_index]
    keys, values = pool.read(group.blocks)
    if q == 1:
        queries = queries.reshape(rows, pool.num_kv_heads, -1, dim)
    else:
        queries = queries.reshape(rows, q, pool.num_kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    seen = mx.arange(keys.shape[-2]) < group.limits
    values = pool.clean(values, seen)
    if q > 1:
        keys, values = keys[:, :, None], values[:, :, None]
    scores = mx.where(seen, queries @ keys.swapaxes(-1, -2), -mx.inf)

    def packed(x: mx.array) -> mx.array:
        if q > 1:
            x = x.transpose(0, 3, 1, 2, 4)
        return x.reshape(rows * q, heads, -1)

    if whole and scores.size <= FEW_SCORES:
        return _Partial(packed(mx.softmax(scores, axis=-1) @ values), None, None)
    weights, maxima, sums = exponentials(scores)
    return _Partial(packed((weights @ values) / sums), packed(maxima), packed(sums))


def _attend_shared(run: SharedRun, scaled: mx.array, pool: _Pool) -> _Partial:
    """All rows' queries over a shared run, in one product per kv head: [r, heads, ...]."""
    heads, dim = scaled.shape[1:]
    rows = run.query_index.size
    keys, values = pool.read(run.blocks)
    queries = scaled[run.query_index].reshape(rows, pool.num_kv_heads, -1, dim)
    queries = queries.swapaxes(0, 1).reshape(pool.num_kv_heads, -1, dim)
    weights, maxima, sums = exponentials(queries @ keys.swapaxes(-1, -2))
    out = (weights @ values) / sums

    def packed(x: mx.array) -> mx.array:
        x = x.reshape(pool.num_kv_heads, rows, -1, x.shape[-1]).swapaxes(0, 1)
        return x.reshape(rows, heads, -1)

    return _Partial(packed(out), packed(maxima), packed(sums))


def _merge(partials: Sequence[_Partial], index: mx.array) -> mx.array:
    """Combine the partial results [rows, m] of each row: [rows, heads, dim]."""
    heads, dim = partials[0].outputs.shape[1:]
    empty = _Partial(
        mx.zeros((1, heads, dim)), mx.full((1, heads, 1), -mx.inf), mx.zeros((1, heads, 1))
    )
    parts: Any = zip(*partials, empty, strict=True)
    outputs, maxima, sums = (mx.concatenate(part)[index] for part in parts)
    weights = sums * mx.exp(maxima - mx.max(maxima, axis=1, keepdims=True))
    return (weights * outputs).sum(axis=1) / weights.sum(axis=1)


def paged_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    block_tables: IntArray,
    context_lens: IntArray,
    cu_seqlens_q: IntArray,
    *,
    scale: float,
) -> mx.array:
    """Causal attention of packed queries over the blocks of each row.

    Args:
        queries: [tokens, query heads, head dim]; row i's are cu_seqlens_q[i] to cu_seqlens_q[i+1],
            the last of a row's tokens so far.
        keys, values: [blocks, kv heads, block size, head dim].
        block_tables: int32 [rows, width].
        context_lens: int32 [rows].
        cu_seqlens_q: int32 [rows + 1].
        scale: of the scores.

    Returns:
        [tokens, query heads, head dim].
    """
    plan = plan_reference(
        block_tables,
        context_lens,
        np.diff(cu_seqlens_q),
        block_size=keys.shape[2],
        num_kv_heads=keys.shape[1],
    )
    return plan.attend(queries, keys, values, scale=scale)
