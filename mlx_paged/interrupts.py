"""Bookkeeping that Ctrl-C cannot cut in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Hold:
    """Ctrl-Cs that have come while they were held back."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.received = 0
        self.firm = 0  # blocks, one in the other, that hold back every one

    def take(self, number: int, frame: FrameType | None) -> None:
        """Receive one; a second one does what it does, unless a firm block runs."""
        self.received += 1
        self.let_go()

    def let_go(self, at_most: int = 1) -> None:
        """Let happen what need not be held back: all but `at_most`."""
        while self.received > at_most and not self.firm:
            self.received -= 1
            self.handler(signal.SIGINT, None)


_hold: _Hold | None = None  # of the outermost block; only the main thread has one


@contextmanager
def uninterrupted(*, firm: bool = False) -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, then let it do what it does.

    A second one is not held back: the block may be waiting for something that never comes.
    Python delivers signals to the main thread only; elsewhere there is nothing to hold back.

    Args:
        firm: hold back every one, in a block that waits for nothing.
    """
    global _hold
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _hold is not None:
        hold = _hold
        hold.firm += firm
        try:
            yield
        finally:
            hold.firm -= firm
            hold.let_go()
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    hold = _hold = _Hold(handler)
    hold.firm += firm
    signal.signal(signal.SIGINT, hold.take)
    try:
        yield
    finally:
        _hold = None
        signal.signal(signal.SIGINT, handler)
        hold.firm = 0
        hold.let_go(at_most=0)
