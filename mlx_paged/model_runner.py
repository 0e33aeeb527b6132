"""The model's forward pass, compiled once a shape of step repeats."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_paged.batch import Batch
from mlx_paged.kv_cache import KVCache
from mlx_paged.models.qwen2 import Qwen2

REPEATS = 3  # steps of one shape before compiling it pays
MAX_SHAPES = 32  # shapes remembered


class Forward(NamedTuple):
    """A forward pass, not yet computed."""

    logits: mx.array  # [rows, vocab]
    keys: list[mx.array]
    values: list[mx.array]


Compiled = Callable[..., tuple[mx.array, list[mx.array], list[mx.array]]]


class ModelRunner:
    """Runs steps, and replays those whose shapes repeat.

    Building the graph of a step in Python takes a good part of a small model's decode step. Decode
    steps have few shapes (contexts are padded to a step of `reference.ROUND_TOKENS`), so the
    graph of a shape that has come up `REPEATS` times in a row is compiled and replayed. The pools
    go in as arguments and come out as results, which keeps their updates in place.

    Args:
        model: the model; `reset` if its weights change.
        enabled: whether to compile at all.
    """

    def __init__(self, model: Qwen2, *, enabled: bool) -> None:
        model.join()
        self.model = model
        self.enabled = enabled
        self._last: tuple[Any, ...] = ()
        self._repeats = 0
        self._compiled: OrderedDict[tuple[Any, ...], Compiled] = OrderedDict()

    def reset(self) -> None:
        """Forget all compiled steps."""
        self.model.join()
        self._last = ()
        self._compiled.clear()

    def __call__(self, batch: Batch, cache: KVCache) -> Forward:
        """Build the graph of a step. `cache` is not changed: `KVCache.adopt` the result's arrays.

        Args:
            batch: the step.
            cache: keys and values so far, which may not have been computed yet.
        """
        if not self.enabled:
            return self._eager(batch, cache)
        given = batch.arrays()
        shapes = (None if a is None else tuple(a.shape) for a in given)
        shape = (get_ident(), *shapes)  # a graph belongs to the thread that traced it
        step = self._compiled.get(shape)
        if step is None:
            self._repeats = self._repeats + 1 if shape == self._last else 1
            self._last = shape
            if self._repeats < REPEATS:
                return self._eager(batch, cache)
            step = self._compiled[shape] = self.compile(batch, cache)
            if len(self._compiled) > MAX_SHAPES:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(shape)
        arrays = [a for a in given if a is not None]
        return Forward(*step(arrays, cache.keys, cache.values))

    def _eager(self, batch: Batch, cache: KVCache) -> Forward:
        pools = cache.view(cache.keys, cache.values)
        logits = self.model(batch, pools)
        return Forward(logits, pools.keys, pools.values)

    def compile(self, batch: Batch, cache: KVCache) -> Compiled:
        """A function of the arrays of a step, with the graph of this one."""
        present = [a is not None for a in batch.arrays()]
        geometry = cache.view([], [])

        def run(
            arrays: list[mx.array], keys: list[mx.array], values: list[mx.array]
        ) -> tuple[mx.array, list[mx.array], list[mx.array]]:
            rest = iter(arrays)
            traced = batch.with_arrays([next(rest) if there else None for there in present])
            pools = geometry.view(keys, values)
            logits = self.model(traced, pools)
            return logits, pools.keys, pools.values

        return mx.compile(run)
