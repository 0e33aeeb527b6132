"""Bookkeeping that Ctrl-C cannot cut in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted(*, firm: bool = False) -> Iterator[None]:
    """Hold a Ctrl-C back until the block is done, then let it do what it does.

    A second one is not held back: the block may be waiting for something that never comes.
    Python delivers signals to the main thread only; elsewhere there is nothing to hold back.

    Args:
        firm: hold back every one, in a block that waits for nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 and not firm:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number in received if firm else received[:1]:
            handler(number, None)
