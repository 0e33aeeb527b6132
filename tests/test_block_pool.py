"""The block pool against lists and dictionaries that do the obvious."""

from __future__ import annotations

import hashlib
import random
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.block_pool import BlockPool, Match, OutOfBlocksError, common_length, name_of

ROOT = b"root"


def publish_chain(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> list[int]:
    """Allocate, publish and keep the blocks of a computed sequence."""
    blocks: list[int] = []
    size, parent = pool.block_size, root
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        blocks.append(pool.allocate())
        if len(part) == size:
            parent = pool.publish(blocks[-1], parent, part)
        else:
            pool.publish_partial(blocks[-1], parent, part)
    return blocks


def release_all(pool: BlockPool, blocks: list[int]) -> None:
    for block in reversed(blocks):
        pool.release(block)


def find(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> Match:
    return pool.match(root, tokens, pool.name_prompt(root, tokens))


def contents_of(pool: BlockPool) -> set[int]:
    """Blocks that can be found, by trying."""
    return set(pool._contents)


# Free list


def test_blocks_come_in_order_and_unhashed_ones_come_back_first() -> None:
    pool = BlockPool(6, 2)
    hashed = publish_chain(pool, [1, 2, 3, 4])
    plain = [pool.allocate() for _ in range(2)]
    assert (hashed, plain) == ([0, 1], [2, 3])
    release_all(pool, hashed)
    release_all(pool, plain)
    assert pool.cached_blocks() == [1, 0]  # the continuation goes first
    assert [pool.allocate() for _ in range(6)] == [4, 5, 3, 2, 1, 0]
    assert pool.stats.evictions == 2


def test_least_recently_used_is_evicted_first() -> None:
    pool = BlockPool(3, 1)
    blocks = [pool.allocate() for _ in range(3)]
    for block, token in zip(blocks, (7, 8, 9), strict=True):
        pool.publish(block, ROOT, [token])
    for block in blocks:
        pool.release(block)
    pool.retain(0)
    pool.release(0)
    assert pool.cached_blocks() == [1, 2, 0]
    assert pool.allocate() == 1
    assert find(pool, [8, 0]).blocks == []
    assert find(pool, [7, 0]).blocks == [0]
    pool.check([[1]])


def test_a_full_pool_refuses() -> None:
    pool = BlockPool(2, 4)
    pool.allocate()
    pool.retain(0)
    pool.allocate()
    with pytest.raises(OutOfBlocksError, match="all 2 blocks"):
        pool.allocate()
    assert (pool.num_free, pool.num_used, pool.num_cached) == (0, 2, 0)
    pool.check([[0, 1], [0]])


def test_releasing_a_free_block_is_noticed() -> None:
    pool = BlockPool(1, 4)
    with pytest.raises(AssertionError, match="no user"):
        pool.release(0)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "name"),
    [(0, 16, "num_blocks"), (-1, 16, "num_blocks"), (1, 0, "block_size"), (1, 257, "block_size")],
)
def test_sizes_are_checked(num_blocks: int, block_size: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        BlockPool(num_blocks, block_size)


# Names


def test_names_are_sha256_of_parent_and_tokens() -> None:
    pool = BlockPool(4, 3)
    tokens = [5, 70_000, 151_935, 1, 2, 3, 9]
    first = hashlib.sha256(ROOT + struct.pack("<3i", *tokens[:3])).digest()
    second = hashlib.sha256(first + struct.pack("<3i", *tokens[3:6])).digest()
    assert pool.name_prompt(ROOT, tokens) == [first, second]
    assert name_of(first, tokens[3:6]) == second
    assert pool.name_prompt(ROOT, tokens[:2]) == []


def test_the_first_copy_of_a_content_wins() -> None:
    pool = BlockPool(4, 2)
    first, second = publish_chain(pool, [1, 2]), publish_chain(pool, [1, 2])
    assert find(pool, [1, 2, 3]).blocks == first
    release_all(pool, second)
    assert pool.num_cached == 0  # the duplicate cannot be found
    release_all(pool, first)
    assert pool.cached_blocks() == first
    pool.check([])


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    pool = BlockPool(8, 2)
    publish_chain(pool, [1, 2, 3, 4])
    other = publish_chain(pool, [9, 9, 3, 4])
    assert find(pool, [9, 9, 3, 4, 0]).blocks == other
    assert find(pool, [3, 4, 0]) == Match([], [], None, 0)
    assert find(pool, [1, 2, 3, 4, 0], b"other root") == Match([], [], None, 0)


# Matches


@pytest.mark.parametrize("length", range(1, 14))
def test_a_match_stops_before_the_last_token(length: int) -> None:
    pool = BlockPool(8, 4)
    tokens = list(range(13))
    blocks = publish_chain(pool, tokens)
    match = find(pool, tokens[:length])
    full, partial = divmod(length - 1, 4)
    assert match.blocks == blocks[:full]
    assert match.partial_tokens == partial
    assert match.partial_block == (blocks[full] if partial else None)
    assert match.names == pool.name_prompt(ROOT, tokens)[:full]


def test_without_token_reuse_only_full_blocks_match() -> None:
    pool = BlockPool(8, 4, token_reuse=False)
    blocks = publish_chain(pool, list(range(13)))
    assert find(pool, list(range(8))) == Match(
        blocks[:1], pool.name_prompt(ROOT, list(range(4))), None, 0
    )
    release_all(pool, blocks)
    assert pool.num_cached == 3


def test_without_prefix_caching_nothing_matches() -> None:
    pool = BlockPool(8, 4, prefix_caching=False)
    blocks = publish_chain(pool, list(range(13)))
    assert find(pool, list(range(13))) == Match([], [], None, 0)
    release_all(pool, blocks)
    assert (pool.num_cached, pool.num_free) == (0, 8)
    pool.count_match(Match([], [], None, 0), 13)
    assert pool.stats.miss_tokens == 0


def test_a_longer_part_replaces_a_shorter_one() -> None:
    pool = BlockPool(8, 4)
    (a,) = publish_chain(pool, [1, 2])
    (b,) = publish_chain(pool, [1, 2])  # offers nothing new
    assert contents_of(pool) == {a}
    pool.publish_partial(b, ROOT, [1, 2, 3])
    assert find(pool, [1, 2, 3, 4]) == Match([], [], b, 3)
    assert find(pool, [1, 5, 0]).partial_tokens == 1
    pool.check([[a], [b]])


def test_clear_cache_forgets_used_and_cached_blocks() -> None:
    pool = BlockPool(8, 2)
    used, cached = publish_chain(pool, [1, 2, 3]), publish_chain(pool, [4, 5])
    release_all(pool, cached)
    pool.clear_cache()
    assert pool.num_cached == 0
    assert find(pool, [1, 2, 3, 4]) == Match([], [], None, 0)
    pool.check([used])
    release_all(pool, used)
    assert pool.num_free == 8


def test_the_best_part_is_found_among_many() -> None:
    """Prompts often begin alike: thousands of blocks may follow one prefix."""
    rng = random.Random(5)
    pool = BlockPool(20_000, 16)
    contents = [[1, *(rng.randrange(12) for _ in range(15))] for _ in range(20_000)]
    for tokens in contents:
        pool.publish(pool.allocate(), ROOT, tokens)
    queries = [
        [*rng.choice(contents)[:5], *(rng.randrange(12) for _ in range(12))] for _ in range(200)
    ]
    start = time.perf_counter()
    matches = [pool.match(ROOT, tokens, []) for tokens in queries]
    assert time.perf_counter() - start < 1  # looking at each takes ten times as long
    for tokens, match in list(zip(queries, matches, strict=True))[:5]:
        assert match.partial_tokens == max(common_length(c, tokens[:16]) for c in contents)
        assert match.partial_block is not None
        found = contents[match.partial_block]
        assert common_length(found, tokens) == match.partial_tokens
    pool.check([list(range(20_000))])


def test_match_statistics() -> None:
    pool = BlockPool(8, 4)
    publish_chain(pool, list(range(10)))
    tokens = [*range(6), 99, 99, 99]
    pool.count_match(find(pool, tokens), len(tokens))
    stats = pool.stats
    assert (stats.hit_blocks, stats.hit_tokens) == (1, 4)
    assert (stats.partial_hits, stats.partial_hit_tokens) == (1, 2)
    assert (stats.miss_blocks, stats.miss_tokens) == (2, 3)


def test_common_length() -> None:
    assert common_length([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_length([], [1]) == 0
    assert common_length([1, 2], [1, 2]) == 2


@pytest.mark.parametrize("fault", ["count", "leak", "name", "index"])
def test_check_notices(fault: str) -> None:
    pool = BlockPool(4, 2)
    table = publish_chain(pool, [1, 2, 3, 4])
    if fault == "count":
        pool.ref_counts[0] += 1
    elif fault == "leak":
        del pool._free[3]
    elif fault == "name":
        content = pool._contents[0]
        pool._contents[0] = content._replace(tokens=(1, 3))
    else:
        pool._by_parent.clear()
    with pytest.raises(AssertionError):
        pool.check([table])


class Naive:
    """The pool again, without a single index."""

    def __init__(self, num_blocks: int, block_size: int, token_reuse: bool) -> None:
        self.block_size = block_size
        self.token_reuse = token_reuse
        self.free = list(range(num_blocks))
        self.cached: list[int] = []
        self.users = [0] * num_blocks
        self.prefixes: dict[int, list[int]] = {}  # findable block: all tokens up to its last one

    def allocate(self) -> int:
        block = (self.free or self.cached).pop(0)
        self.prefixes.pop(block, None)
        self.users[block] = 1
        return block

    def retain(self, block: int) -> None:
        if block in self.cached:
            self.cached.remove(block)
        self.users[block] += 1

    def release(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            (self.cached if block in self.prefixes else self.free).append(block)

    def longest(self, tokens: list[int]) -> int:
        """How many tokens can be reused at most."""
        limit, size = len(tokens) - 1, self.block_size
        full = 0
        while full + size <= limit and tokens[: full + size] in self.prefixes.values():
            full += size
        if not self.token_reuse:
            return full
        best = full
        for prefix in self.prefixes.values():
            start = (len(prefix) - 1) // size * size
            if start == full and prefix[:full] == tokens[:full]:
                best = max(best, min(common_length(prefix, tokens), limit))
        return best


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 5),
    blocks=st.integers(2, 20),
    token_reuse=st.booleans(),
)
def test_random_lives_agree_with_the_naive_pool(
    seed: int, size: int, blocks: int, token_reuse: bool
) -> None:
    rng = random.Random(seed)
    pool, naive = BlockPool(blocks, size, True, token_reuse), Naive(blocks, size, token_reuse)
    tables: list[list[int]] = []
    for _ in range(40):
        if tables and rng.random() < 0.5:
            table = tables.pop(rng.randrange(len(tables)))
            for block in reversed(table):
                pool.release(block)
                naive.release(block)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 3 * size + 1))]
            match = find(pool, tokens)
            full = len(match.blocks) * size
            assert full + match.partial_tokens == naive.longest(tokens)
            assert [naive.prefixes[b] for b in match.blocks] == [
                tokens[: (i + 1) * size] for i in range(len(match.blocks))
            ]
            if match.partial_block is not None:
                end = full + match.partial_tokens
                assert naive.prefixes[match.partial_block][:end] == tokens[:end]
            table = list(match.blocks)
            for block in table:
                pool.retain(block)
                naive.retain(block)
            names = list(match.names)
            for start in range(full, len(tokens), size):
                if not pool.num_free:
                    break
                table.append(pool.allocate())
                assert table[-1] == naive.allocate()
                part, parent = tokens[start : start + size], names[-1] if names else ROOT
                known = tokens[: start + size] in naive.prefixes.values()
                if len(part) == size:
                    names.append(pool.publish(table[-1], parent, part))
                    if not known:
                        naive.prefixes[table[-1]] = tokens[: start + size]
                elif token_reuse:
                    if naive.longest([*tokens, -1]) < len(tokens):
                        naive.prefixes[table[-1]] = list(tokens)
                    pool.publish_partial(table[-1], parent, part)
            tables.append(table)
        pool.check(tables)
        assert list(pool._free) == naive.free
        assert pool.cached_blocks() == naive.cached
        assert contents_of(pool) == set(naive.prefixes)
