"""Several texts that grow at once, printed one after the other."""

from __future__ import annotations

from collections.abc import Callable


class OrderedPrinter:
    """Prints text 0 as it grows, then text 1, and so on; what comes early waits.

    Args:
        count: of texts; each gets a heading if there are several.
        write: takes what is to be printed.
    """

    def __init__(self, count: int, write: Callable[[str], object]) -> None:
        self._count = count
        self._write = write
        self._waiting = [""] * count
        self._finished = [False] * count
        self._current = -1
        self._next()

    def add(self, index: int, text: str, finished: bool = False) -> None:
        """Take the next piece of a text."""
        self._waiting[index] += text
        self._finished[index] |= finished
        while self._current < self._count:
            self._flush()
            if not self._finished[self._current]:
                return
            self._write("\n")
            self._next()

    def close(self) -> None:
        """Print what there is of unfinished texts."""
        for index in range(self._count):
            if not self._finished[index]:
                self.add(index, "", finished=True)

    def _next(self) -> None:
        self._current += 1
        if self._count > 1 and self._current < self._count:
            self._write(f"[{self._current + 1}/{self._count}]\n")

    def _flush(self) -> None:
        if self._waiting[self._current]:
            self._write(self._waiting[self._current])
            self._waiting[self._current] = ""
