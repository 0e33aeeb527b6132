"""`mx.compile` for functions that any thread may call."""

from __future__ import annotations

import threading
from collections.abc import Callable

import mlx.core as mx


def compiled(
    function: Callable[..., mx.array], *, shapeless: bool = False
) -> Callable[..., mx.array]:
    """Compile `function`, once in each thread that calls it.

    MLX's streams belong to threads, and a compiled graph to the stream it was traced on.

    Args:
        function: arrays to an array.
        shapeless: as in `mx.compile`.
    """
    local = threading.local()

    def call(*arrays: mx.array) -> mx.array:
        own = getattr(local, "function", None)
        if own is None:
            # A function of its own: MLX finds what it has compiled by the function.
            own = local.function = mx.compile(lambda *x: function(*x), shapeless=shapeless)
        return own(*arrays)

    return call
