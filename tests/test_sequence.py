"""Sequences: reserving, copy-on-write, forks, publishing."""

from __future__ import annotations

import pytest

from mlx_paged.block_pool import BlockPool, Match
from mlx_paged.sequence import Sequence

ROOT = b"root"


def computed(pool: BlockPool, tokens: list[int], age: int = 0) -> Sequence:
    """A sequence whose tokens are all computed."""
    seq = Sequence(tokens, ROOT, (age, 0))
    advance(pool, seq)
    return seq


def advance(pool: BlockPool, seq: Sequence, *tokens: int) -> tuple[int, int] | None:
    """Compute what is known and `tokens`; return the block copy it took."""
    seq.tokens.extend(tokens)
    count = seq.num_uncomputed
    free, needed = pool.num_free, seq.blocks_needed(pool, count)
    copy = seq.reserve(pool, count)
    assert free - pool.num_free == needed
    seq.commit(pool, count)
    return copy


def fork(pool: BlockPool, seq: Sequence, age: int) -> Sequence:
    child = seq.fork((age, 0))
    seq.share(pool, child)
    return child


def match(pool: BlockPool, tokens: list[int]) -> Match:
    return pool.match(ROOT, tokens, pool.name_prompt(ROOT, tokens))


def test_blocks_are_taken_when_they_are_needed() -> None:
    pool = BlockPool(8, 4)
    seq = computed(pool, [1, 2, 3])
    assert seq.block_table == [0]
    assert seq.blocks_needed(pool, 1) == 0
    advance(pool, seq, 4)
    assert seq.block_table == [0]
    assert seq.blocks_needed(pool, 1) == 1
    assert seq.blocks_needed(pool, 5) == 2
    advance(pool, seq, 5)
    assert seq.block_table == [0, 1]
    assert (seq.num_computed, seq.num_uncomputed, seq.num_generated) == (5, 0, 2)


def test_the_first_write_into_a_shared_block_copies_it_and_the_last_owner_writes_in_place() -> None:
    pool = BlockPool(8, 4)
    parent = computed(pool, [1, 2, 3, 4, 5, 6])
    children = [fork(pool, parent, age) for age in (1, 2)]
    assert pool.ref_counts[:2] == [3, 3]
    assert advance(pool, parent, 7) == (1, 2)
    assert advance(pool, children[0], 8) == (1, 3)
    assert advance(pool, children[1], 9) is None
    assert [s.block_table for s in (parent, *children)] == [[0, 2], [0, 3], [0, 1]]
    assert pool.ref_counts[:4] == [3, 1, 1, 1]
    pool.check([s.block_table for s in (parent, *children)])


def test_a_fork_at_a_blocks_end_copies_nothing() -> None:
    pool = BlockPool(8, 4)
    parent = computed(pool, [1, 2, 3, 4])
    child = fork(pool, parent, 1)
    assert advance(pool, parent, 5) is None
    assert advance(pool, child, 6) is None
    assert (parent.block_table, child.block_table) == ([0, 1], [0, 2])


def test_a_fork_shares_no_lists() -> None:
    pool = BlockPool(8, 4)
    parent = computed(pool, [1, 2, 3, 4, 5])
    child = fork(pool, parent, 1)
    assert (child.tokens, child.block_table, child.names) == (
        parent.tokens,
        parent.block_table,
        parent.names,
    )
    advance(pool, child, 6, 7, 8, 9)
    assert parent.tokens == [1, 2, 3, 4, 5]
    assert parent.block_table == [0, 1]
    assert len(parent.names) == 1
    assert child.prompt_len == 5


def test_reserved_but_not_computed_blocks_are_not_shared() -> None:
    pool = BlockPool(8, 2)
    seq = Sequence([1, 2, 3, 4, 5], ROOT, (0, 0))
    seq.reserve(pool, 5)
    seq.commit(pool, 1)
    child = fork(pool, seq, 1)
    assert child.block_table == seq.block_table[:1]
    # One more token needs no new block but a copy, although the table is longer than needed.
    assert seq.blocks_needed(pool, 1) == 1
    assert seq.reserve(pool, 1) == (0, 3)


def test_every_change_of_a_table_counts() -> None:
    pool = BlockPool(8, 2)
    seq = computed(pool, [1, 2])
    version = seq.table_version
    advance(pool, seq, 3)
    assert seq.table_version > version
    version = seq.table_version
    fork(pool, seq, 1)
    assert advance(pool, seq, 4) is not None
    assert seq.table_version > version
    version = seq.table_version
    seq.free(pool)
    seq.attach(pool, Match([], [], None, 0))
    assert seq.table_version > version


def test_full_blocks_are_published_as_they_fill() -> None:
    pool = BlockPool(8, 2)
    seq = Sequence([1, 2, 3, 4, 5], ROOT, (0, 0))
    seq.reserve(pool, 3)
    seq.commit(pool, 3)
    assert match(pool, [1, 2, 3, 4, 5]).blocks == [0]
    assert match(pool, [1, 2, 3, 4, 5]).partial_tokens == 0  # the prompt goes on
    advance(pool, seq)
    assert match(pool, [1, 2, 3, 4, 9]).blocks == [0, 1]
    assert match(pool, [1, 2, 3, 4, 5, 6]).partial_block == 2  # its tail counts at its end
    advance(pool, seq, 6)
    assert match(pool, [1, 2, 3, 4, 5, 6, 7]).blocks == [0, 1, 2]
    pool.check([seq.block_table])


@pytest.mark.parametrize("keep", [True, False])
def test_free_keeps_the_computed_part_of_the_last_block_or_not(keep: bool) -> None:
    pool = BlockPool(8, 4)
    seq = computed(pool, [1, 2, 3])
    seq.prompt_len = 2  # so that 3 is generated
    pool.clear_cache()
    seq.free(pool, keep=keep)
    assert match(pool, [1, 2, 3, 4]).partial_tokens == (3 if keep else 0)
    assert (seq.block_table, seq.names, seq.num_computed) == ([], [], 0)
    assert pool.num_free == 8
    pool.check([])


def test_a_table_is_freed_from_its_tail() -> None:
    pool = BlockPool(3, 2)
    computed(pool, [1, 2, 3, 4, 5]).free(pool)
    assert pool.cached_blocks() == [2, 1, 0]
    pool.allocate()
    assert match(pool, [1, 2, 3, 4, 5]).blocks == [0, 1]


def test_attach_shares_full_blocks_and_copies_a_part() -> None:
    pool = BlockPool(8, 4)
    first = computed(pool, [1, 2, 3, 4, 5, 6, 7])
    second = Sequence([1, 2, 3, 4, 5, 6, 9], ROOT, (1, 0))
    assert second.attach(pool, match(pool, second.tokens)) == (1, 2)
    assert second.block_table == [0, 2]
    assert second.num_computed == 6
    assert pool.ref_counts[:3] == [2, 1, 1]
    assert second.reserve(pool, 1) is None
    second.commit(pool, 1)
    assert match(pool, [1, 2, 3, 4, 5, 6, 9, 9]).partial_tokens == 3
    pool.check([first.block_table, second.block_table])


def test_the_source_of_a_copy_is_not_evicted_for_its_target() -> None:
    pool = BlockPool(2, 4)
    computed(pool, [1, 2, 3]).free(pool)
    holder = pool.allocate()
    pool.publish_partial(holder, b"somebody else", [5])
    pool.release(holder)
    assert pool.cached_blocks() == [0, holder]  # the source would be next
    seq = Sequence([1, 2, 3, 4], ROOT, (0, 0))
    assert seq.attach(pool, match(pool, seq.tokens)) == (0, holder)
    pool.check([seq.block_table])


def test_forked_tails_of_different_lengths_are_both_found() -> None:
    pool = BlockPool(8, 4)
    parent = computed(pool, [1, 2])
    child = fork(pool, parent, 1)
    advance(pool, parent, 3)
    advance(pool, child, 4, 5)
    child.free(pool)
    parent.free(pool)
    assert match(pool, [1, 2, 3, 0]).partial_tokens == 3
    assert match(pool, [1, 2, 4, 0]).partial_tokens == 3
    assert match(pool, [1, 2, 0]).partial_tokens == 2
    pool.check([])


def test_without_prefix_caching_nothing_is_named() -> None:
    pool = BlockPool(8, 2, prefix_caching=False)
    seq = computed(pool, [1, 2, 3, 4, 5])
    assert seq.names == []
    seq.free(pool)
    assert pool.num_cached == 0
    pool.check([])
