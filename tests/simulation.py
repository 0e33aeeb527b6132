"""The scheduler on a memory in plain dicts that knows what every slot of every block holds.

The next token of a sequence is a function of what its slots hold, so one slot that holds the wrong
token, or the right one after the wrong prefix, is noticed at once, as are lost or doubled tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from mlx_paged.block_pool import BlockPool
from mlx_paged.scheduler import Schedule, Scheduler
from mlx_paged.sequence import Sequence

ROOTS = (b"r" * 32, b"s" * 32)


def digest(before: int, token: int) -> int:
    """Names a token after a prefix."""
    return hash((before, token))


def digests(root: bytes, tokens: list[int]) -> list[int]:
    """[i] names the first i tokens."""
    values = [int.from_bytes(root[:4], "big")]
    for token in tokens:
        values.append(digest(values[-1], token))
    return values


def next_token(prefix: int, index: int, vocab: int) -> int:
    """What sample `index` continues a prefix with."""
    return digest(prefix, 1000 + index) % vocab


@dataclass
class Request:
    """What was asked for, and what came out."""

    prompt: list[int]
    root: bytes
    max_tokens: int
    width: int
    outputs: dict[int, list[int]]

    def expected(self, index: int, vocab: int) -> list[int]:
        """All tokens of one sample, from nothing but the prompt."""
        tokens = list(self.prompt)
        prefix = digests(self.root, tokens)[-1]
        for _ in range(self.max_tokens):
            tokens.append(next_token(prefix, index, vocab))
            prefix = digest(prefix, tokens[-1])
        return tokens[len(self.prompt) :]


class Simulation:
    """Runs a scheduler as the engine does, with `memory` in the place of keys and values."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_batched_tokens: int,
        max_num_seqs: int,
        prefix_caching: bool = True,
        token_reuse: bool = True,
        vocab: int = 3,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, prefix_caching, token_reuse)
        self.scheduler = Scheduler(
            self.pool, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs
        )
        self.vocab = vocab
        self.memory: dict[tuple[int, int], int] = {}
        self.requests: dict[int, Request] = {}  # unfinished
        self.living: dict[tuple[int, int], Sequence] = {}  # by request and sample
        self.prefixes: dict[bytes, int] = {root: digests(root, [])[0] for root in ROOTS}
        self.next_id = 0
        self.finished = 0
        self.computed = 0
        self.copies = 0

    # Actions

    def fits(self, prompt_len: int, max_tokens: int) -> bool:
        """Whether the engine would accept such a request."""
        blocks = -(-(prompt_len + max_tokens - 1) // self.pool.block_size)
        return blocks <= self.pool.num_blocks

    def add(
        self, prompt: list[int], max_tokens: int, width: int = 1, root: bytes = ROOTS[0]
    ) -> int:
        assert self.fits(len(prompt), max_tokens)
        number = self.next_id
        seq = Sequence(prompt, root, (number, 0), width)
        self.scheduler.add(seq)
        self.next_id += 1
        self.requests[number] = Request(prompt, root, max_tokens, width, {})
        for index in range(width):
            self.living[number, index] = seq
        return number

    def step(self, fail: bool = False) -> Schedule:
        """One step; with `fail`, one that breaks off when its first copy is made."""
        running = {seq.age: (seq, list(seq.block_table)) for seq in self.scheduler.running}
        step = self.scheduler.schedule()
        self._check_schedule(step, running)
        if fail:
            for source, target in step.copies[:1]:
                self._copy([(source, target)])
            for _, target in step.copies[1:]:
                for offset in range(self.pool.block_size):
                    self.memory[target, offset] = -1
            self.scheduler.abandon(step)
            return step
        self._copy(step.copies)
        for seq, n in step.rows:
            self._compute(seq, n)
        for seq, n in step.rows:
            self._check_context(seq, seq.num_computed + n)
        self.scheduler.commit(step)
        self.computed += step.num_tokens
        self.copies += len(step.copies)
        for seq, _ in step.rows:
            self._learn_names(seq)
            self._sample(seq)
        return step

    def cancel(self, number: int) -> None:
        keys = [key for key in self.living if key[0] == number]
        for seq in {id(self.living[key]): self.living[key] for key in keys}.values():
            self.scheduler.remove(seq)
        for key in keys:
            del self.living[key]
        del self.requests[number]

    def fork(self, seq: Sequence) -> None:
        """Let a running sequence go on twice; both then give the same tokens."""
        number = self.next_id
        self.next_id += 1
        old = self.requests[seq.age[0]]
        generated = seq.tokens[seq.prompt_len :]
        # The child is a request of its own whose prompt is all that is known by now.
        child = self.scheduler.fork(seq, (number, 0))
        child.prompt_len = len(child.tokens)
        left = old.max_tokens - len(generated)
        self.requests[number] = Request(list(seq.tokens), seq.root, left, 1, {})
        self.living[number, 0] = child

    def preempt(self, seq: Sequence) -> None:
        self.scheduler.preempt(seq)

    def evict(self, count: int) -> None:
        """Somebody takes `count` blocks for a moment."""
        blocks = [self.pool.allocate() for _ in range(min(count, self.pool.num_free))]
        for block in blocks:
            for offset in range(self.pool.block_size):
                self.memory[block, offset] = -2
            self.pool.release(block)

    def drain(self) -> None:
        """Step until nothing is left to do."""
        tokens = sum(
            r.width * (len(r.prompt) + r.max_tokens + self.pool.block_size)
            for r in self.requests.values()
        )
        limit = 20 * (tokens + 10)
        while self.living:
            self.step()
            self.check()
            limit -= 1
            assert limit, "no end in sight"
        assert self.pool.num_free == self.pool.num_blocks

    # The memory

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        size = self.pool.block_size
        held = [[self.memory.get((source, i), -3) for i in range(size)] for source, _ in copies]
        for (_, target), content in zip(copies, held, strict=True):
            for i, value in enumerate(content):
                self.memory[target, i] = value

    def _compute(self, seq: Sequence, n: int) -> None:
        size = self.pool.block_size
        names = digests(seq.root, seq.tokens)
        for position in range(seq.num_computed, seq.num_computed + n):
            block = seq.block_table[position // size]
            assert self.pool.ref_counts[block] == 1, "written while others read it"
            content = self.pool._contents.get(block)
            assert content is None or content.name is None, "a named block is written"
            assert content is None or len(content.tokens) <= position % size, "content overwritten"
            self.memory[block, position % size] = names[position + 1]

    def _check_context(self, seq: Sequence, context: int) -> None:
        size = self.pool.block_size
        names = digests(seq.root, seq.tokens[:context])
        for position in range(context):
            held = self.memory[seq.block_table[position // size], position % size]
            assert held == names[position + 1], f"{seq.age} reads a wrong slot at {position}"

    def _sample(self, seq: Sequence) -> None:
        if seq.num_uncomputed:
            return
        number, first = seq.age
        if seq.width > 1:
            for index in range(first + 1, first + seq.width):
                self.living[number, index] = self.scheduler.fork(seq, (number, index))
            members = [(i, self.living[number, i]) for i in range(first, first + seq.width)]
            seq.width = 1
        else:
            members = [(first, seq)]
        for index, member in members:
            self._take(number, index, member)

    def _take(self, number: int, index: int, seq: Sequence) -> None:
        size = self.pool.block_size
        last = seq.num_computed - 1
        token = next_token(
            self.memory[seq.block_table[last // size], last % size], index, self.vocab
        )
        seq.tokens.append(token)
        request = self.requests[number]
        request.outputs.setdefault(index, []).append(token)
        assert seq.num_uncomputed == 1
        if seq.num_generated < request.max_tokens:
            return
        self.scheduler.remove(seq)
        del self.living[number, index]
        assert request.outputs[index] == request.expected(index, self.vocab)
        if not any(key[0] == number for key in self.living):
            del self.requests[number]
            self.finished += 1

    # Invariants

    def _check_schedule(
        self, step: Schedule, running: dict[tuple[int, int], tuple[Sequence, list[int]]]
    ) -> None:
        size, scheduler = self.pool.block_size, self.scheduler
        assert step.rows or not self.living, "a step that does nothing"
        assert step.num_tokens <= scheduler.max_batched_tokens
        assert all(n >= 1 for _, n in step.rows)
        rows = {seq.age: n for seq, n in step.rows}
        assert len(rows) == len(step.rows), "a sequence twice"
        assert set(rows) == {seq.age for seq in scheduler.running}, "somebody gets no token"
        assert not set(rows) & {seq.age for seq in step.preempted}, "scheduled, then undone"
        assert sum(seq.width for seq in scheduler.running) <= scheduler.max_num_seqs
        if running:
            assert min(running) in rows, "the oldest does not go on"
        kept = [age for age in running if age in rows]
        gone = [age for age in running if age not in rows]
        assert not (kept and gone) or max(kept) < min(gone), "not the youngest was preempted"
        assert not gone or set(rows) <= set(running), "preempted for a newcomer"
        for seq, n in step.rows:
            assert seq.num_computed + n <= len(seq.tokens)
            assert len(seq.block_table) * size >= seq.num_computed + n
            if seq.age not in running:
                assert seq.num_computed < len(seq.tokens), "nothing left to compute"
                continue
            before, after = running[seq.age][1], seq.block_table
            assert len(after) >= len(before)
            for index, (old, new) in enumerate(zip(before, after, strict=False)):
                if old != new:
                    assert index == seq.num_computed // size, "a full block was exchanged"
                    assert (old, new) in step.copies, "a block was exchanged without a copy"
        targets = [target for _, target in step.copies]
        assert len(set(targets)) == len(targets)

    def check(self) -> None:
        """All invariants between two steps."""
        pool, scheduler, size = self.pool, self.scheduler, self.pool.block_size
        tables = [seq.block_table for seq in scheduler.running]
        pool.check(tables)
        users: dict[int, int] = {}
        for table in tables:
            assert len(set(table)) == len(table), "a block twice in one table"
            for block in table:
                users[block] = users.get(block, 0) + 1
        assert pool.ref_counts == [users.get(block, 0) for block in range(pool.num_blocks)]
        assert pool.num_free == pool.num_blocks - len(users)
        assert pool.num_used == len(users)
        assert all(not seq.block_table and not seq.num_computed for seq in scheduler.waiting)
        queued = [*scheduler.running, *scheduler.waiting]
        assert {id(seq) for seq in queued} == {id(seq) for seq in self.living.values()}
        assert len({id(seq) for seq in queued}) == len(queued)
        for queue in (scheduler.running, scheduler.waiting):
            assert [seq.age for seq in queue] == sorted(seq.age for seq in queue)
        for seq in scheduler.running:
            assert seq.num_computed < len(seq.tokens)
            assert len(seq.block_table) * size >= seq.num_computed
            self._check_context(seq, seq.num_computed)
        self._check_findable()

    def _learn_names(self, seq: Sequence) -> None:
        """Compute the names of a sequence's full blocks from the definition."""
        size = self.pool.block_size
        if not self.pool.prefix_caching:
            assert seq.names == []
            return
        full = seq.num_computed // size
        assert len(seq.names) == full
        prefix = digests(seq.root, seq.tokens[: full * size])
        name = seq.root
        for i in range(full):
            key = name + b"".join(
                token.to_bytes(4, "little") for token in seq.tokens[i * size : (i + 1) * size]
            )
            name = hashlib.sha256(key).digest()
            assert seq.names[i] == name
            self.prefixes[name] = prefix[(i + 1) * size]

    def _check_findable(self) -> None:
        """Every block that can be found holds what it is found by."""
        contents = self.pool._contents
        if not self.pool.prefix_caching:
            assert not contents
            return
        for block, content in contents.items():
            assert content.name is not None or self.pool.token_reuse
            value = self.prefixes[content.parent]
            for offset, token in enumerate(content.tokens):
                value = digest(value, token)
                assert self.memory[block, offset] == value, f"block {block} is not what it says"


def random_request(rng: Any, sim: Simulation, longest: int) -> tuple[list[int], int, int, bytes]:
    """A request that fits, often a variation of a prompt that another one has."""
    size, vocab = sim.pool.block_size, sim.vocab
    length = rng.randint(1, longest)
    if rng.random() < 0.3:
        length = max(1, length // size * size)  # whole blocks
    prompt = [rng.randrange(vocab) for _ in range(length)]
    if sim.requests and rng.random() < 0.6:
        other = rng.choice(list(sim.requests.values())).prompt
        keep = rng.randint(0, len(other))
        prompt = (other[:keep] + prompt[: rng.randint(0, len(prompt))])[:longest] or prompt
    width = rng.choice([1, 1, 1, 2, 3, 4])
    width = min(width, sim.scheduler.max_num_seqs)
    room = sim.pool.num_blocks * size + 1 - len(prompt)
    if room < 1:
        prompt, room = prompt[: sim.pool.num_blocks * size], 1
    return prompt, rng.randint(1, min(room, 12)), width, rng.choice([ROOTS[0], *ROOTS])
