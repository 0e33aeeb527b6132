"""One stream of tokens and the blocks that hold its keys and values."""

from __future__ import annotations

from mlx_paged.block_pool import BlockPool, Match


class Sequence:
    """Tokens, block table, and how many tokens are computed.

    *Computed* tokens have their keys and values in the blocks of the table. Everything a step has
    to do for a sequence follows from the gap between `len(tokens)` and `num_computed`, whether
    that gap is a prompt, a chunk of it, a recomputation or one new token.

    Args:
        prompt: token ids, at least one.
        root: what the names of its blocks start from.
        age: orders sequences; the smallest is the oldest.
        width: how many sequences it becomes once its prompt is computed.
    """

    __slots__ = (
        "age",
        "block_table",
        "names",
        "num_computed",
        "prompt_len",
        "prompt_names",
        "root",
        "table_version",
        "tokens",
        "width",
    )

    def __init__(
        self, prompt: list[int], root: bytes, age: tuple[int, int], width: int = 1
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.root = root
        self.age = age
        self.width = width
        self.block_table: list[int] = []
        self.table_version = 0  # counts its changes
        self.num_computed = 0
        self.names: list[bytes] = []  # of the full, computed blocks
        self.prompt_names: list[bytes] | None = None  # of all full blocks, while it waits

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without keys and values."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_len

    def blocks_needed(self, pool: BlockPool, num_tokens: int) -> int:
        """Blocks that `reserve` would take from the pool for `num_tokens` more tokens."""
        blocks = -(-(self.num_computed + num_tokens) // pool.block_size)
        return max(0, blocks - len(self.block_table)) + self._tail_is_shared(pool)

    def reserve(self, pool: BlockPool, num_tokens: int) -> tuple[int, int] | None:
        """Make the next `num_tokens` slots writable by this sequence alone.

        The caller has made sure that `blocks_needed` blocks are free.

        Returns:
            (source, target) if the partly filled block was shared and must be copied first.
        """
        copy = None
        if self._tail_is_shared(pool):
            index = self.num_computed // pool.block_size
            source, target = self.block_table[index], pool.allocate()
            self.block_table[index] = target
            self.table_version += 1
            pool.release(source)
            copy = (source, target)
        while len(self.block_table) * pool.block_size < self.num_computed + num_tokens:
            self.block_table.append(pool.allocate())
            self.table_version += 1
        return copy

    def attach(self, pool: BlockPool, match: Match) -> tuple[int, int] | None:
        """Start from a cached prefix: share its full blocks, copy the part of a block after them.

        Returns:
            (source, target) of the block copy, if a part of a block is reused.
        """
        assert not self.block_table
        for block in match.blocks:
            pool.retain(block)
        self.block_table = list(match.blocks)
        self.table_version += 1
        self.names = list(match.names)
        self.num_computed = len(match.blocks) * pool.block_size
        if match.partial_block is None:
            return None
        # The source must not be the block that allocation evicts for the target.
        source = match.partial_block
        pool.retain(source)
        target = pool.allocate()
        pool.release(source)
        self.block_table.append(target)
        self.num_computed += match.partial_tokens
        return source, target

    def commit(self, pool: BlockPool, num_tokens: int) -> None:
        """Count `num_tokens` more tokens as computed and publish the blocks they filled."""
        first = self.num_computed
        self.num_computed += num_tokens
        if not pool.prefix_caching:
            return
        size = pool.block_size
        for index in range(first // size, self.num_computed // size):
            tokens = self.tokens[index * size : (index + 1) * size]
            self.names.append(pool.publish(self.block_table[index], self._parent(), tokens))
        if first < self.prompt_len <= self.num_computed:
            self._publish_tail(pool)

    def fork(self, age: tuple[int, int]) -> Sequence:
        """An unattached copy with the same tokens; `share` gives it the blocks."""
        child = Sequence(self.tokens, self.root, age)
        child.prompt_len = self.prompt_len
        return child

    def share(self, pool: BlockPool, child: Sequence) -> None:
        """Let `child` refer to every block of this sequence that holds computed tokens."""
        blocks = self.block_table[: -(-self.num_computed // pool.block_size)]
        for block in blocks:
            pool.retain(block)
        child.block_table = blocks
        child.names = list(self.names)
        child.num_computed = self.num_computed

    def free(self, pool: BlockPool, *, keep: bool = True) -> None:
        """Give up all blocks, the last first, so that a prefix outlives its continuation.

        Args:
            keep: whether the computed part of the last block stays findable.
        """
        if keep and pool.prefix_caching:
            self._publish_tail(pool)
        for block in reversed(self.block_table):
            pool.release(block)
        self.block_table = []
        self.names = []
        self.num_computed = 0

    def _parent(self) -> bytes:
        return self.names[-1] if self.names else self.root

    def _publish_tail(self, pool: BlockPool) -> None:
        start = len(self.names) * pool.block_size
        if start < self.num_computed:
            block = self.block_table[len(self.names)]
            pool.publish_partial(block, self._parent(), self.tokens[start : self.num_computed])

    def _tail_is_shared(self, pool: BlockPool) -> bool:
        index, used = divmod(self.num_computed, pool.block_size)
        return used > 0 and pool.ref_counts[self.block_table[index]] > 1
