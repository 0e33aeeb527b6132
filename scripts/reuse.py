"""What a prefix cache finds again in a trace of requests that share prefixes.

A trace names the content of every block of a request by a number: the same number means the same
tokens after the same tokens. `replay` runs the numbers, request after request, through the
project's own block pool, so what is found, kept and evicted is what the engine would find, keep and
evict. To the pool a number is a "token" and a block holds one of them, whatever the block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np

from mlx_paged.block_pool import BlockPool, name_of
from scripts.formats import MOONCAKE_BLOCK, IntArray, Mooncake, Turns
from scripts.report import progress

ROOT = b"trace"


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        prompt: its tokens; the last is always computed.
        blocks: numbers of its full blocks, prompt and answer; then, if it ends inside a block, one
            number of its own for the part.
        full: how many of them are full.
        shared: tokens that a request before it in the file has at its beginning, too.
        source: number of that request's block in which the shared tokens end, if they end inside.
    """

    prompt: int
    blocks: list[int]
    full: int
    shared: int
    source: int | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they arrive, cut into blocks of one size."""

    block_size: int
    requests: list[Request]

    @cached_property
    def names(self) -> dict[int, bytes]:
        """Each block number's name in the pool."""
        names: dict[int, bytes] = {}
        for request in self.requests:
            parent = ROOT
            for number in request.blocks:
                if number not in names:
                    names[number] = name_of(parent, (number,))
                parent = names[number]
        return names

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt for request in self.requests)


def turn_sources(turns: Turns) -> list[int]:
    """For each turn, the earlier one that it is taken to share its prefix with; -1 for none.

    The file says how much a turn shares, not with which. A later turn shares with the turn ahead
    of it where that is long enough; a first turn, and any other, with the latest turn that is.
    """
    total = (turns.prompt + turns.answer).tolist()
    shared, number = turns.shared.tolist(), turns.turn.tolist()
    sources: list[int] = []
    for row, need in enumerate(shared):
        source = row - 1
        if number[row] == 0:
            while source >= 0 and (number[source] != 0 or total[source] < need):
                source -= 1
        else:
            while source >= 0 and total[source] < need:
                source -= 1
        sources.append(source if need else -1)
    return sources


def trace_of_turns(turns: Turns, block_size: int, conversations: int = 1) -> Trace:
    """Turns as a trace: in file order, or with so many conversations open at once.

    Raises:
        ValueError: a block size or number of conversations below 1; a turn that shares more than
            any turn before it has.
    """
    if block_size < 1:
        raise ValueError(f"block size is {block_size}; it must be at least 1")
    prompts, shares = turns.prompt.tolist(), turns.shared.tolist()
    totals = (turns.prompt + turns.answer).tolist()
    requests: list[Request] = []
    fresh = 0
    for row, source in enumerate(turn_sources(turns)):
        full, part = divmod(shares[row], block_size)
        if source < 0 and shares[row]:
            raise ValueError(
                f"turn {row + 1} of the file shares {shares[row]} tokens with a turn before it, "
                "but none has as many"
            )
        blocks = requests[source].blocks[:full] if source >= 0 else []
        length = -(-totals[row] // block_size)
        blocks += range(fresh, fresh + length - len(blocks))
        fresh += length
        inside = requests[source].blocks[full] if source >= 0 and part else None
        whole = totals[row] // block_size
        requests.append(Request(prompts[row], blocks, whole, shares[row], inside))
    return Trace(block_size, [requests[row] for row in interleave(turns, conversations)])


def interleave(turns: Turns, conversations: int) -> list[int]:
    """Rows in the order of `conversations` people who take turns, each turn by turn.

    Raises:
        ValueError: `conversations` is below 1.
    """
    if conversations < 1:
        raise ValueError(f"conversations is {conversations}; it must be at least 1")
    starts = [0, *(np.flatnonzero(np.diff(turns.conversation)) + 1).tolist(), len(turns)]
    waiting = (iter(range(*span)) for span in pairwise(starts))
    active = list(islice(waiting, conversations))
    order: list[int] = []
    while active:
        still = []
        for one in active:
            row = next(one, None)
            if row is None:
                following = next(waiting, None)
                if following is None:
                    continue
                one, row = following, next(following)
            order.append(row)
            still.append(one)
        active = still
    return order


def trace_of_mooncake(mooncake: Mooncake, block_size: int = MOONCAKE_BLOCK) -> Trace:
    """A Mooncake trace, whose blocks of 512 tokens can be joined into larger ones.

    Answers have no ids in it, so only prompts are cached.

    Raises:
        ValueError: a block size that is not a multiple of 512.
    """
    joined, rest = divmod(block_size, MOONCAKE_BLOCK)
    if rest or joined < 1:
        raise ValueError(
            f"block size is {block_size}; the trace knows multiples of {MOONCAKE_BLOCK} only"
        )
    seen: set[int] = set()
    requests: list[Request] = []
    for prompt, ids in zip(mooncake.lengths.prompt.tolist(), mooncake.hash_ids, strict=True):
        # An id stands for its block and all before it, so a joined block is named by its last.
        blocks = ids[joined - 1 : prompt // block_size * joined : joined]
        shared = 0
        while shared < len(blocks) and blocks[shared] in seen:
            shared += 1
        seen.update(blocks)
        requests.append(Request(prompt, blocks, len(blocks), shared * block_size))
    return Trace(block_size, requests)


def unlimited(turns: Turns, block_size: int) -> dict[str, Any]:
    """What a cache that keeps everything reuses: block size * floor(shared / block size) tokens.

    At least the last token of each prompt is computed.
    """
    usable = np.minimum(turns.shared, turns.prompt - 1)
    reused: IntArray = usable // block_size * block_size
    first = turns.turn == 0
    return {
        "reused_tokens": int(reused.sum()),
        "reused_fraction": _fraction(reused, turns.prompt),
        "first_turn_fraction": _fraction(reused[first], turns.prompt[first]),
        "later_turn_fraction": _fraction(reused[~first], turns.prompt[~first]),
        "requests_with_reuse": int((reused > 0).sum()),
    }


def replay(
    trace: Trace, num_blocks: int | None = None, to_the_token: bool = False, title: str = "replay"
) -> dict[str, Any]:
    """Run a trace through a block pool, one request at a time, least recently used evicted first.

    Args:
        num_blocks: the pool's size; None holds all of the trace.
        to_the_token: also reuse the beginning of a cached block that a prompt departs from.
    """
    names = trace.names
    pool = BlockPool(num_blocks or max(len(names), 1), block_size=1, token_reuse=False)
    reused = copied = too_large = 0
    size = trace.block_size
    for request in progress(trace.requests, title):
        blocks = request.blocks
        if len(blocks) > pool.num_blocks:
            too_large += 1
            continue
        usable = min(request.shared, request.prompt - 1)
        limit = (request.prompt - 1) // size
        found = pool.match(ROOT, range(limit + 1), [names[n] for n in blocks[:limit]]).blocks
        table = list(found)
        for block in found:
            pool.retain(block)
        reused += len(found) * size
        part = usable - len(found) * size
        if to_the_token and 0 < part < size and _touch(pool, trace, request, len(found)):
            copied += part
        findable = len(blocks) if to_the_token else request.full
        parent = names[blocks[len(found) - 1]] if found else ROOT
        for index in range(len(found), len(blocks)):
            table.append(pool.allocate())
            if index < findable:
                parent = pool.publish(table[-1], parent, (blocks[index],))
        for block in reversed(table):
            pool.release(block)
    tokens = trace.prompt_tokens
    return {
        "num_blocks": pool.num_blocks,
        "cache_tokens": pool.num_blocks * size,
        "reused_tokens": reused + copied,
        "reused_fraction": round((reused + copied) / tokens, 6),
        "copied_tokens": copied,
        "evictions": pool.stats.evictions,
        "too_large": too_large,
    }


def _touch(pool: BlockPool, trace: Trace, request: Request, found: int) -> bool:
    """Whether the block that holds the tokens after those found is cached; then it is used now."""
    inside = request.source
    if found < request.shared // trace.block_size:
        inside = request.blocks[found]  # the same block to its end, but its last token is computed
    if inside is None:
        return False
    names = [trace.names[n] for n in (*request.blocks[:found], inside)]
    match = pool.match(ROOT, range(found + 2), names)
    if len(match.blocks) <= found:
        return False
    pool.retain(match.blocks[-1])
    pool.release(match.blocks[-1])
    return True


def _fraction(part: IntArray, whole: IntArray) -> float:
    return round(int(part.sum()) / max(int(whole.sum()), 1), 6)
