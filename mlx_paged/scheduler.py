"""How many tokens each sequence computes in the next step.

There is no prefill phase and no decode phase: *computed* catches up with *known*, whether the gap
is a prompt, a chunk of it, a recomputation after preemption, or one new token.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from mlx_paged.block_pool import BlockPool, Match, common_length
from mlx_paged.sequence import Sequence

MAX_HELD = 64  # waiting sequences looked at in vain before a step goes on without them


@dataclass
class Schedule:
    """What one step computes."""

    rows: list[tuple[Sequence, int]] = field(default_factory=list)  # and their next n tokens
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) blocks
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed forward pass."""
        return sum(n for _, n in self.rows)


class Scheduler:
    """Continuous batching over one block pool, oldest sequence first.

    Every running sequence gets at least one token of each step, prompts share what is left of the
    token budget. When blocks run out the youngest sequence gives up all of its own and goes back
    to the queue.

    Args:
        pool: the blocks.
        max_batched_tokens: tokens in one step, at least `max_num_seqs`.
        max_num_seqs: sequences running at once.
    """

    def __init__(self, pool: BlockPool, *, max_batched_tokens: int, max_num_seqs: int) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if max_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_batched_tokens must be at least max_num_seqs ({max_num_seqs}), "
                f"got {max_batched_tokens}"
            )
        self.pool = pool
        self.max_batched_tokens = max_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Sequence] = []  # both lists: oldest first
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def spare_blocks(self) -> int:
        """Blocks that stay free when a sequence is admitted beside others."""
        return self.pool.num_blocks // 100

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ValueError: it is wider than the scheduler ever runs at once.
        """
        if seq.width > self.max_num_seqs:
            raise ValueError(
                f"n, best_of and width must be at most max_num_seqs ({self.max_num_seqs}), "
                f"got {seq.width}"
            )
        insort(self.waiting, seq, key=_age)

    def remove(self, seq: Sequence, *, keep: bool = True) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        seq.free(self.pool, keep=keep)
        queue = self.running if seq in self.running else self.waiting
        queue.remove(seq)

    def fork(self, seq: Sequence, age: tuple[int, int]) -> Sequence:
        """Let a running sequence go on twice, both on the same blocks."""
        child = seq.fork(age)
        seq.share(self.pool, child)
        insort(self.running, child, key=_age)
        return child

    def preempt(self, seq: Sequence, *, keep: bool = True) -> None:
        """Put a running sequence back into the queue, without its blocks."""
        seq.free(self.pool, keep=keep)
        seq.prompt_names = None
        self.running.remove(seq)
        insort(self.waiting, seq, key=_age)
        self.num_preemptions += 1

    def schedule(self) -> Schedule:
        """Choose the rows of the next step and reserve their slots."""
        step = Schedule()
        while True:
            budget = self.max_batched_tokens - self._continue_running(step)
            if self.waiting and not step.preempted:
                self._admit_waiting(step, budget)
            if step.rows or not (self.waiting and self.running):
                return step
            # Everything that runs waits for a sibling that has no room.
            self.preempt(self.running[-1])
            step.preempted.clear()

    def commit(self, step: Schedule) -> None:
        """Count the tokens of a completed step as computed."""
        for seq, n in step.rows:
            seq.commit(self.pool, n)

    def abandon(self, step: Schedule) -> None:
        """Take back a step that failed before all of it was done.

        Nothing in it counts as computed. Sequences that wait for a block copy, which may not have
        been made, start again, and so do those that got no token.
        """
        targets = {target for _, target in step.copies}
        for seq in list(self.running):
            if not seq.num_uncomputed or not targets.isdisjoint(seq.block_table):
                self.preempt(seq, keep=False)

    def _continue_running(self, step: Schedule) -> int:
        used, index = 0, 0
        while index < len(self.running):
            seq = self.running[index]
            others = len(self.running) - index - 1
            n = min(seq.num_uncomputed, self.max_batched_tokens - used - others)
            if n > 0:
                if not self._make_room(seq, n, step):
                    break
                copy = seq.reserve(self.pool, n)
                if copy:
                    step.copies.append(copy)
                step.rows.append((seq, n))
                used += n
            index += 1
        return used

    def _make_room(self, seq: Sequence, num_tokens: int, step: Schedule) -> bool:
        """Preempt the youngest until `seq` can go on; False if that was `seq` itself."""
        while seq.blocks_needed(self.pool, num_tokens) > self.pool.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            step.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, step: Schedule, budget: int) -> None:
        room = self.max_num_seqs - sum(seq.width for seq in self.running)
        computing = [seq for seq, n in step.rows if n > 1 or seq.num_uncomputed > n]
        index = 0
        while index < len(self.waiting) and budget > 0 and index < MAX_HELD:
            seq = self.waiting[index]
            if seq.width > room:
                break
            match = self._match(seq)
            if any(self._would_find_more(seq, match, other) for other in computing):
                index += 1
                continue
            fitting = self._fit(seq, match)
            if fitting is None:
                break
            del self.waiting[index]
            copy = seq.attach(self.pool, fitting)
            if copy:
                step.copies.append(copy)
            self.pool.count_match(fitting, len(seq.tokens))
            n = min(seq.num_uncomputed, budget)
            seq.reserve(self.pool, n)
            insort(self.running, seq, key=_age)
            step.rows.append((seq, n))
            computing.append(seq)
            budget -= n
            room -= seq.width

    def _match(self, seq: Sequence) -> Match:
        if not self.pool.prefix_caching:
            return Match([], [], None, 0)
        if seq.prompt_names is None:
            seq.prompt_names = self.pool.name_prompt(seq.root, seq.tokens)
        return self.pool.match(seq.root, seq.tokens, seq.prompt_names)

    def _would_find_more(self, seq: Sequence, match: Match, other: Sequence) -> bool:
        """Whether `other` is computing a part of `seq`'s prefix, so that it pays to wait."""
        if not self.pool.prefix_caching or other.root != seq.root:
            return False
        size = self.pool.block_size
        limit = len(seq.tokens) - 1
        blocks = common_length(seq.prompt_names or (), other.prompt_names or ())
        shared = min(blocks * size, limit)
        if self.pool.token_reuse:
            shared += common_length(
                seq.tokens[shared : min(shared + size, limit)], other.tokens[shared : shared + size]
            )
        else:
            shared = shared // size * size
        return shared > len(match.blocks) * size + match.partial_tokens

    def _fit(self, seq: Sequence, match: Match) -> Match | None:
        """The match if the whole of `seq` fits beside it now, without its copy if need be."""
        pool = self.pool
        blocks = -(-len(seq.tokens) // pool.block_size) - len(match.blocks)
        blocks += sum(pool.ref_counts[b] == 0 for b in match.blocks)
        # A pool filled to the brim would preempt the newcomer at once.
        spare = pool.num_free - blocks - (self.spare_blocks if self.running else 0)
        if spare < 0:
            return None
        source = match.partial_block
        if source is not None and spare == 0 and pool.ref_counts[source] == 0:
            return match._replace(partial_block=None, partial_tokens=0)
        return match


def _age(seq: Sequence) -> tuple[int, int]:
    return seq.age
