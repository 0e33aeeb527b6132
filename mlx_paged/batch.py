"""The arrays of one step, made once and passed down."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlx_paged.kernels.paged_attention import AttentionBackend, AttentionPlan, ReplayablePlan
from mlx_paged.kv_cache import Slots
from mlx_paged.scheduler import Schedule
from mlx_paged.sequence import Sequence


class Batch(NamedTuple):
    """The packed tokens of all rows of a step.

    Attributes:
        input_ids: [tokens] int32.
        positions: [tokens] int32, of each token in its sequence.
        slots: where each token's keys and values go.
        opened_blocks: [n] blocks that this step fills in part and nobody has written before.
        attention: which blocks each row attends to.
        logits_indices: [rows] tokens whose logits are wanted; None for all, in order.
    """

    input_ids: mx.array
    positions: mx.array
    slots: Slots
    opened_blocks: mx.array | None
    attention: AttentionPlan
    logits_indices: mx.array | None

    def arrays(self) -> list[mx.array | None]:
        """All arrays that the model's forward pass uses, in a fixed order.

        For a backend that `compiles` only, and so is `with_arrays`.
        """
        attention = cast("ReplayablePlan", self.attention)
        return [
            self.input_ids,
            self.positions,
            *self.slots,
            self.logits_indices,
            *attention.arrays(),
        ]

    def with_arrays(self, arrays: list[Any]) -> Batch:
        """The same batch over other arrays, as `arrays` lists them."""
        ids, positions, blocks, heads, offsets, wanted, *rest = arrays
        attention = cast("ReplayablePlan", self.attention)
        return Batch(
            ids,
            positions,
            Slots(blocks, heads, offsets),
            None,
            attention.with_arrays(rest),
            wanted,
        )


class BatchBuilder:
    """Makes batches, and keeps the attention plan while no table changes.

    Args:
        block_size, num_kv_heads: of the pool.
        backend: who computes attention.
    """

    def __init__(self, block_size: int, num_kv_heads: int, backend: AttentionBackend) -> None:
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.backend = backend
        self._heads = mx.array([list(range(num_kv_heads))])
        self._signature: list[tuple[int, int, int, int]] = []
        self._plan: AttentionPlan | None = None

    def build(self, schedule: Schedule, wanted: list[int]) -> Batch:
        """The batch of a schedule.

        Args:
            schedule: rows with their token counts.
            wanted: numbers of the rows whose last token needs logits, ascending.
        """
        rows = schedule.rows
        if len(rows) == schedule.num_tokens and wanted == list(range(len(rows))):
            ids = mx.array([seq.tokens[seq.num_computed] for seq, _ in rows])
            return self._decode(rows, ids, 0)
        size = self.block_size
        counts = np.array([n for _, n in rows], np.int32)
        ends = np.array([seq.num_computed for seq, _ in rows], np.int32) + counts
        tokens, positions, blocks = self._packed(rows)
        last = np.cumsum(counts) - 1
        everything = wanted == list(range(len(tokens)))  # not so for n samples of n tokens
        return Batch(
            input_ids=mx.array(tokens),
            positions=mx.array(positions),
            slots=Slots(
                mx.array(blocks[:, None]), self._heads, mx.array((positions % size)[:, None])
            ),
            opened_blocks=self._opened(rows),
            attention=self._attention(rows, ends, counts),
            logits_indices=None if everything else mx.array(last[wanted].astype(np.int32)),
        )

    def build_next(self, schedule: Schedule, tokens: mx.array) -> Batch:
        """The batch that follows one of decode rows, if all go on within their blocks.

        Args:
            schedule: the step before, not yet counted.
            tokens: [rows] what it samples, not yet computed.
        """
        return self._decode(schedule.rows, tokens.astype(mx.int32), 1)

    def _decode(self, rows: list[tuple[Sequence, int]], ids: mx.array, ahead: int) -> Batch:
        """One token per row, `ahead` tokens after the first that is not computed."""
        size = self.block_size
        at = [seq.num_computed + ahead for seq, _ in rows]
        blocks = [[seq.block_table[i // size]] for (seq, _), i in zip(rows, at, strict=True)]
        ends = np.array(at, np.int32) + 1
        return Batch(
            input_ids=ids,
            positions=mx.array(at),
            slots=Slots(mx.array(blocks), self._heads, mx.array([[i % size] for i in at])),
            opened_blocks=None if ahead else self._opened(rows),
            attention=self._attention(rows, ends, np.ones(len(rows), np.int32)),
            logits_indices=None,
        )

    def _opened(self, rows: list[tuple[Sequence, int]]) -> mx.array | None:
        """Blocks that this step starts, and does not fill."""
        size = self.block_size
        ends = ((seq, n, seq.num_computed + n) for seq, n in rows)
        opened = [seq.block_table[end // size] for seq, n, end in ends if 0 < end % size <= n]
        return mx.array(opened) if opened else None

    def _packed(
        self, rows: list[tuple[Sequence, int]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, positions and block numbers of all rows, one after the other."""
        ids, positions, blocks = [], [], []
        for seq, n in rows:
            span = np.arange(seq.num_computed, seq.num_computed + n, dtype=np.int32)
            ids.append(np.array(seq.tokens[seq.num_computed : seq.num_computed + n], np.int32))
            positions.append(span)
            blocks.append(np.array(seq.block_table, np.int32)[span // self.block_size])
        return np.concatenate(ids), np.concatenate(positions), np.concatenate(blocks)

    def _attention(
        self, rows: list[tuple[Sequence, int]], ends: np.ndarray, counts: np.ndarray
    ) -> AttentionPlan:
        # A chunk goes on through its blocks, so only decode rows stay within the plan's.
        signature = [(*seq.age, seq.table_version, n) for seq, n in rows]
        decode = len(ends) == counts.sum()
        if self._plan is not None and decode and signature == self._signature:
            self._plan = self._plan.advance(ends)
            return self._plan
        tables = np.full((len(rows), max(len(seq.block_table) for seq, _ in rows)), -1, np.int32)
        for i, (seq, _) in enumerate(rows):
            tables[i, : len(seq.block_table)] = seq.block_table
        self._signature = signature
        self._plan = self.backend.plan(
            tables,
            ends,
            counts,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
        )
        return self._plan
