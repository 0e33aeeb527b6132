"""Six ways to give memory to requests, under one scheduler.

The scheduler and the block pool are the engine's own. A *paged* manager lets the scheduler do all:
admit, grow, preempt. A *contiguous* one decides by its allocator when a request may start, and then
hands it to the scheduler with a pool that never runs out. vAttention's manager is a pool whose
blocks are pages of the virtual memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlx_paged.block_pool import BlockPool
from scripts.simulation.allocators import ALLOCATORS
from scripts.simulation.arrivals import Arrival
from scripts.simulation.costs import Preset

PAGE_BYTES = 2 * 2**20
BLOCK_SIZE = 16


class Usage(NamedTuple):
    """Where the memory's slots are at one moment; they add up to all of them.

    Attributes:
        real: hold keys and values.
        reserved: kept for tokens that the same request is going to have.
        internal: given to a request that is never going to use them.
        external: not given to any request, or lost by rounding up.
    """

    real: int
    reserved: int
    internal: int
    external: int


class Manager(Protocol):
    """Decides which requests get memory.

    Attributes:
        pool: what the scheduler hands out.
        swaps: whether a preempted request's keys and values go to the host instead of away.
    """

    name: str
    slots: int
    pool: BlockPool
    swaps: bool

    def fits(self, request: Arrival) -> bool:
        """Whether the request fits into an empty memory."""
        ...

    def admit(self, number: int, request: Arrival) -> bool:
        """Give memory to a request that waits; False if it has to wait on."""
        ...

    def release(self, number: int) -> None:
        """Take a finished request's memory back."""
        ...

    def usage(self, real: int) -> Usage:
        """Where the slots are, of which `real` hold keys and values."""
        ...


@dataclass
class Contiguous:
    """One piece of memory for each request, from its start to its end.

    Args:
        policy: how large: max, the window; pow2, the prompt and the next power of two of the
            answer; oracle, prompt and answer.
        allocator: first-fit, or buddy as the paper assumes of Orca.
    """

    policy: str
    slots: int
    window: int
    allocator: str = "buddy"
    name: str = field(init=False)
    pool: BlockPool = field(init=False, repr=False)
    swaps: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.name = self.policy
        # More blocks than 1,024 requests could ever need: here it is the allocator that says no.
        self.pool = BlockPool(2 * self.slots // BLOCK_SIZE + 1024, BLOCK_SIZE, False, False)
        self.memory = ALLOCATORS[self.allocator](self.slots)
        self._given: dict[int, tuple[int, int, int]] = {}  # number: start, asked for, final length

    def size(self, request: Arrival) -> int:
        """Slots that a request asks for."""
        if self.policy == "max":
            return self.window
        if self.policy == "pow2":
            return request.prompt + (1 << (request.answer - 1).bit_length())
        return request.prompt + request.answer

    def fits(self, request: Arrival) -> bool:
        return self.size(request) <= self.memory.largest()

    def admit(self, number: int, request: Arrival) -> bool:
        size = self.size(request)
        start = self.memory.allocate(size)
        if start is None:
            return False
        self._given[number] = start, size, request.prompt + request.answer
        return True

    def release(self, number: int) -> None:
        self.memory.free(self._given.pop(number)[0])

    def usage(self, real: int) -> Usage:
        asked = sum(size for _, size, _ in self._given.values())
        final = sum(length for _, _, length in self._given.values())
        return Usage(real, final - real, asked - final, self.slots - asked)


@dataclass
class Paged:
    """Blocks on demand; out of blocks, the youngest request gives up its own.

    Args:
        swaps: its keys and values go to the host and come back; otherwise they are computed again.
        block_size: tokens in a block.
        name: how tables call it.
    """

    slots: int
    swaps: bool = False
    block_size: int = BLOCK_SIZE
    name: str = "paged"
    pool: BlockPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        blocks = self.slots // self.block_size
        if blocks < 1:
            raise ValueError(
                f"memory is {self.slots} slots, less than one block of {self.name} "
                f"({self.block_size} slots)"
            )
        self.pool = BlockPool(blocks, 1, prefix_caching=False, token_reuse=False)
        # A page of virtual memory can hold more tokens than an attention kernel's block may.
        self.pool.block_size = self.block_size

    def fits(self, request: Arrival) -> bool:
        return request.prompt + request.answer <= self.pool.num_blocks * self.block_size

    def admit(self, number: int, request: Arrival) -> bool:
        return True  # the scheduler asks the pool

    def release(self, number: int) -> None:
        pass  # the scheduler did

    def usage(self, real: int) -> Usage:
        given = self.pool.num_used * self.block_size
        return Usage(real, 0, given - real, self.slots - given)


def page_tokens(preset: Preset, page_bytes: int = PAGE_BYTES) -> int:
    """Tokens whose keys (or values) of one layer fill a page; a part of a token is left empty.

    Raises:
        ValueError: a page does not hold a token.
    """
    tokens = page_bytes // (2 * preset.kv_heads * preset.head_dim)
    if tokens < 1:
        raise ValueError(f"page is {page_bytes} bytes, less than a token's keys in one layer")
    return tokens


def make_managers(
    preset: Preset, allocator: str = "buddy", page_bytes: int = PAGE_BYTES
) -> dict[str, Manager]:
    """The six managers, in the order of the tables.

    vAttention (Prabhu et al. 2025): each request is contiguous in virtual memory, and physical
    pages are mapped as it grows, one for each layer's keys and one for each layer's values at a
    time: a block of `page_tokens` tokens.
    """
    slots, window = preset.slots, preset.window
    managers: list[Manager] = [
        Contiguous(policy, slots, window, allocator) for policy in ("max", "pow2", "oracle")
    ]
    managers += [
        Paged(slots, name="paged, recompute"),
        Paged(slots, swaps=True, name="paged, swap"),
        Paged(slots, block_size=page_tokens(preset, page_bytes), name="vAttention"),
    ]
    return {manager.name: manager for manager in managers}
