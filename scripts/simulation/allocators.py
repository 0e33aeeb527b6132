"""Allocators of contiguous slots, one token a slot, as servers without paging use them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Protocol


class Allocator(Protocol):
    """Hands out contiguous pieces of `slots` slots."""

    slots: int

    def allocate(self, size: int) -> int | None:
        """The first slot of a piece of at least `size` slots; None where there is none."""
        ...

    def free(self, start: int) -> None:
        """Take back the piece that begins at `start`."""
        ...

    def largest(self) -> int:
        """The largest size that an empty allocator can hand out."""
        ...


class FirstFit:
    """The lowest hole that is large enough; neighbouring holes become one."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._holes = [(0, slots)] if slots else []  # (start, size), by start
        self._pieces: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        for index, (start, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[index : index + 1] = [(start + size, hole - size)][: hole > size]
                self._pieces[start] = size
                return start
        return None

    def free(self, start: int) -> None:
        size = self._pieces.pop(start)
        index = bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == start + size:
            size += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            start, before = self._holes.pop(index - 1)
            size += before
        insort(self._holes, (start, size))

    def largest(self) -> int:
        return self.slots


class Buddy:
    """Pieces of powers of two: halved on demand, joined with their other half when both are free.

    Slots that are no power of two are cut into powers of two, the largest first.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: list[set[int]] = [set() for _ in range(slots.bit_length())]  # by exponent
        self._pieces: dict[int, int] = {}
        self._arena: dict[int, int] = {}  # a whole arena's start: its exponent
        start = 0
        for exponent in reversed(range(slots.bit_length())):
            if slots >> exponent & 1:
                self._free[exponent].add(start)
                self._arena[start] = exponent
                start += 1 << exponent

    def allocate(self, size: int) -> int | None:
        wanted = max(size - 1, 0).bit_length()
        for exponent in range(wanted, len(self._free)):
            if self._free[exponent]:
                start = min(self._free[exponent])
                self._free[exponent].remove(start)
                while exponent > wanted:
                    exponent -= 1
                    self._free[exponent].add(start + (1 << exponent))
                self._pieces[start] = wanted
                return start
        return None

    def free(self, start: int) -> None:
        exponent = self._pieces.pop(start)
        # Arenas lie one behind the other, the larger first, so each begins at a multiple of its
        # size, and a piece's other half is one bit away.
        while self._arena.get(start) != exponent:
            other = start ^ (1 << exponent)
            if other not in self._free[exponent]:
                break
            self._free[exponent].remove(other)
            start = min(start, other)
            exponent += 1
        self._free[exponent].add(start)

    def largest(self) -> int:
        return 1 << (self.slots.bit_length() - 1) if self.slots else 0


ALLOCATORS: dict[str, Callable[[int], Allocator]] = {"first-fit": FirstFit, "buddy": Buddy}
