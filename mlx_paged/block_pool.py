"""Which blocks exist, who refers to them, and which can be found by their content.

No arrays live here: block numbers only. A number names one block in every layer's K and V array.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_BLOCK_SIZE = 256


class OutOfBlocksError(RuntimeError):
    """No block is free and none can be evicted."""


class Content(NamedTuple):
    """What a findable block holds: the tokens at its start, after the prefix called `parent`."""

    parent: bytes
    tokens: tuple[int, ...]
    name: bytes | None  # of a full block; None while only a part of it is known


class Match(NamedTuple):
    """The longest cached prefix of a prompt."""

    blocks: list[int]  # full blocks, to be shared as they are
    names: list[bytes]  # their names
    partial_block: int | None  # a block whose first `partial_tokens` tokens continue the prompt
    partial_tokens: int


@dataclass
class PoolStats:
    """Counts since the pool was made."""

    hit_blocks: int = 0
    hit_tokens: int = 0
    partial_hits: int = 0
    partial_hit_tokens: int = 0
    miss_blocks: int = 0
    miss_tokens: int = 0
    evictions: int = 0


def name_of(parent: bytes, tokens: Iterable[int]) -> bytes:
    """SHA-256 name of a full block: its parent's name, then its token ids (32 bit)."""
    return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()


def common_length(a: Sequence[object], b: Sequence[object]) -> int:
    """How many leading items two sequences share."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


@dataclass
class BlockPool:
    """Reference counts, the free list and the prefix index of `num_blocks` blocks.

    A block without a user waits in one of two queues: `_free` if nothing is known of its content,
    `_cached` if it can still be found. Blocks are handed out from `_free` first, then from
    `_cached`, least recently used first: allocation is eviction.

    Args:
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens in a block, 1 to 256.
        prefix_caching: whether blocks can be found by content at all.
        token_reuse: whether a part of a block can be found, to be copied into a block of its own.
    """

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    token_reuse: bool = True
    ref_counts: list[int] = field(init=False, repr=False)
    stats: PoolStats = field(init=False, default_factory=PoolStats)

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {self.num_blocks}")
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size must be from 1 to {MAX_BLOCK_SIZE}, got {self.block_size}"
            )
        self.ref_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._contents: dict[int, Content] = {}
        self._by_name: dict[bytes, int] = {}
        # Candidates for a partial match: (tokens, block) after each prefix, in order.
        self._by_parent: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}

    # Counts

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without a user that can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one user."""
        return self.num_blocks - self.num_free

    def cached_blocks(self) -> list[int]:
        """Blocks without a user that can still be found, next to be evicted first."""
        return list(self._cached)

    # References

    def allocate(self) -> int:
        """Hand out a block with one reference; its old content is forgotten.

        Raises:
            OutOfBlocksError: every block has a user.
        """
        if self._free:
            block, _ = self._free.popitem(last=False)
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.stats.evictions += 1
        else:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        self.ref_counts[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add a reference to a block that is in use or cached."""
        if self.ref_counts[block] == 0:
            del self._cached[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference; a block without a user becomes free, or cached if it can be found."""
        assert self.ref_counts[block] > 0, f"block {block} has no user"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            (self._cached if block in self._contents else self._free)[block] = None

    # Prefix index

    def publish(self, block: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Make a full, computed block findable; the first copy of a content wins.

        Returns:
            The block's name, whether or not this copy got it.
        """
        assert len(tokens) == self.block_size, "only a full block has a name"
        name = name_of(parent, tokens)
        self._forget(block)
        if self.prefix_caching and name not in self._by_name:
            self._remember(block, Content(parent, tuple(tokens), name))
            self._by_name[name] = block
        return name

    def publish_partial(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Make the first tokens of a block findable, unless another block already offers them."""
        if not (self.prefix_caching and self.token_reuse) or not tokens:
            return
        assert len(tokens) < self.block_size, "a full block is published under its name"
        self._forget(block)
        _, found = self._find_partial(parent, tokens)
        if found < len(tokens):
            self._remember(block, Content(parent, tuple(tokens), None))

    def name_prompt(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Names of all full blocks of a prompt, in order."""
        names: list[bytes] = []
        size = self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            root = name_of(root, tokens[start : start + size])
            names.append(root)
        return names

    def match(self, root: bytes, tokens: Sequence[int], names: Sequence[bytes]) -> Match:
        """The longest cached prefix of `tokens`, at most all but the last of them.

        Args:
            root: what the first block's name starts from (the model, and extra keys).
            tokens: the prompt.
            names: `name_prompt(root, tokens)`.
        """
        blocks: list[int] = []
        if not self.prefix_caching:
            return Match(blocks, [], None, 0)
        limit = len(tokens) - 1
        for name in names[: limit // self.block_size]:
            block = self._by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        names = list(names[: len(blocks)])
        if not self.token_reuse:
            return Match(blocks, names, None, 0)
        start = len(blocks) * self.block_size
        rest = tokens[start : min(start + self.block_size, limit)]
        block, length = self._find_partial(names[-1] if names else root, rest)
        return Match(blocks, names, block, length)

    def count_match(self, match: Match, num_tokens: int) -> None:
        """Add a match that a prompt of `num_tokens` tokens made use of to the statistics."""
        if not self.prefix_caching:
            return
        full = len(match.blocks) * self.block_size
        self.stats.hit_blocks += len(match.blocks)
        self.stats.hit_tokens += full
        self.stats.partial_hits += match.partial_tokens > 0
        self.stats.partial_hit_tokens += match.partial_tokens
        self.stats.miss_blocks += -(-num_tokens // self.block_size) - len(match.blocks)
        self.stats.miss_tokens += num_tokens - full - match.partial_tokens

    def clear_cache(self) -> None:
        """Forget the content of every block."""
        for block in list(self._contents):
            self._forget(block)
        self._free.update(self._cached)
        self._cached.clear()

    def _find_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int | None, int]:
        best, length = None, 0
        siblings = self._by_parent.get(parent)
        if siblings and tokens:
            # In lexical order nobody shares more with `tokens` than one of its neighbours does.
            at = bisect_left(siblings, (tuple(tokens),))
            for content, block in siblings[max(0, at - 1) : at + 1]:
                n = common_length(content, tokens)
                if n > length:
                    best, length = block, n
        return best, length

    def _remember(self, block: int, content: Content) -> None:
        self._contents[block] = content
        if self.token_reuse:
            insort(self._by_parent.setdefault(content.parent, []), (content.tokens, block))

    def _forget(self, block: int) -> None:
        content = self._contents.pop(block, None)
        if content is None:
            return
        if content.name is not None:
            del self._by_name[content.name]
        if self.token_reuse:
            siblings = self._by_parent[content.parent]
            del siblings[bisect_left(siblings, (content.tokens, block))]
            if not siblings:
                del self._by_parent[content.parent]

    # Invariants

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the pool's invariants, given the block tables of all living sequences."""
        users = Counter(block for table in tables for block in table)
        assert users == Counter({b: n for b, n in enumerate(self.ref_counts) if n}), (
            "reference counts differ from the tables"
        )
        waiting = set(self._free) | set(self._cached)
        assert len(waiting) == self.num_free, "a block is both free and cached"
        assert waiting == {b for b, n in enumerate(self.ref_counts) if n == 0}
        assert all(b in self._contents for b in self._cached), "a cached block cannot be found"
        assert not any(b in self._contents for b in self._free), "a free block can be found"
        named = {c.name: b for b, c in self._contents.items() if c.name is not None}
        assert named == self._by_name
        for content in self._contents.values():
            full = len(content.tokens) == self.block_size
            assert full == (content.name is not None), "only full blocks have names"
            if full:
                assert content.name == name_of(content.parent, content.tokens)
        if self.token_reuse:
            assert all(siblings == sorted(siblings) for siblings in self._by_parent.values())
            listed = [(b, p, t) for p, siblings in self._by_parent.items() for t, b in siblings]
            assert sorted(listed) == sorted((b, c[0], c[1]) for b, c in self._contents.items())
