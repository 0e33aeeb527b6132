"""Where the time of a decode step goes: our own Python, or MLX.

Every phase of `Engine.step` is timed by a wrapper around the method that does it, and every
`mx.eval` inside by another; what is left of the step is counted as ours. Whatever runs outside of
`mx.eval` is ours, building and replaying MLX's graph included, although that is C++ in part. The
wrappers themselves, some tenths of a microsecond each, are counted as ours, too.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_paged.engine as engine_module
from mlx_paged.engine import Engine
from scripts.benchmark.models import Models
from scripts.benchmark.ours import add
from scripts.benchmark.workloads import Context

WARM_UP = 12  # steps before those that count
PHASES = ("schedule", "build", "graph", "sample", "update", "other")


@dataclass(frozen=True)
class Case:
    """A batch to profile.

    Attributes:
        rows: sequences that decode.
        context: tokens of each at the start.
        pool: bytes of the pool; None for what is needed.
    """

    rows: int
    context: int
    pool: int | None = None


class Clock:
    """Seconds spent in each phase of one step, without what MLX took inside of it."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._inner = [0.0]  # seconds of nested phases, per level

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which adds its own time to `phase`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = perf_counter() - begin
                own = took - self._inner.pop()
                self._inner[-1] += took
                self.spent[phase] = self.spent.get(phase, 0.0) + own

        return call


def steps(engine: Engine, count: int) -> list[dict[str, float]]:
    """Seconds per phase of each of `count` steps; "mlx" is the wait, "total" the whole."""
    found = []
    for _ in range(count):
        clock = Clock()
        with _wrapped(engine, clock):
            begin = perf_counter()
            clock.timed("other", engine.step)()
            total = perf_counter() - begin
        found.append({**clock.spent, "total": total})
    return found


def profile(models: Models, context: Context, case: Case, count: int, **options: Any) -> Any:
    """Medians of decode steps.

    Returns:
        Microseconds per phase, per step and in MLX, and the share of the step that is ours.
    """
    engine = decoding(models, context, case, WARM_UP + count, **options)
    for _ in range(WARM_UP):
        engine.step()
    measured = steps(engine, count)
    phases = {
        phase: float(np.median([1e6 * one.get(phase, 0.0) for one in measured]))
        for phase in (*PHASES, "mlx", "total")
    }
    shares = [1 - one["mlx"] / one["total"] for one in measured]
    return {
        "rows": case.rows,
        "context": case.context,
        "pool_bytes": engine.cache.nbytes,
        "microseconds": phases,
        "share": float(np.median(shares)),
        "share_p90": float(np.percentile(shares, 90)),
    }


def functions(
    models: Models, context: Context, case: Case, count: int, lines: int, **options: Any
) -> list[dict[str, Any]]:
    """Our functions by their own time, as cProfile sees them, which makes Python look slower."""
    engine = decoding(models, context, case, WARM_UP + count, **options)
    for _ in range(WARM_UP):
        engine.step()
    tracer = cProfile.Profile()
    tracer.enable()
    for _ in range(count):
        engine.step()
    tracer.disable()
    stats: dict[Any, Any] = pstats.Stats(tracer).stats  # type: ignore[attr-defined]
    order = sorted(stats.items(), key=lambda item: -item[1][2])
    return [
        {
            "function": f"{where[0].rsplit('/', 1)[-1]}:{where[1]} {where[2]}"
            if where[1]
            else where[2],
            "calls": figures[1] / count,
            "microseconds": 1e6 * figures[2] / count,
        }
        for where, figures in order[:lines]
    ]


def decoding(models: Models, context: Context, case: Case, new: int, **options: Any) -> Engine:
    """An engine whose requests have all been prefilled."""
    import random

    rng = random.Random(0)
    size = options.get("block_size", 16)
    blocks = case.rows * (-(-(case.context + new + 1) // size) + 1) + 2
    if case.pool is not None:
        per_block = models.bytes_per_token * size
        if case.pool < blocks * per_block:
            raise ValueError(f"pool of {case.pool} bytes is too small for {case}")
        blocks = case.pool // per_block
    engine = Engine(models.ours, **{**options, "num_blocks": blocks + blocks // 64})
    for _ in range(case.rows):
        add(engine, context.prompts.make(rng, case.context), new + 1)
    while engine.scheduler.waiting or any(s.num_uncomputed > 1 for s in engine.scheduler.running):
        engine.step()
    return engine


@contextmanager
def _wrapped(engine: Engine, clock: Clock) -> Iterator[None]:
    private: Any = engine
    module: Any = engine_module
    places: list[tuple[Any, str, str]] = [
        (engine.scheduler, "schedule", "schedule"),
        (private._builder, "build", "build"),
        (private, "_runner", "graph"),
        (module, "prepare", "sample"),
        (private, "_update", "update"),
        (mx, "eval", "mlx"),
        (mx, "synchronize", "mlx"),
    ]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, phase in places:
            setattr(owner, name, clock.timed(phase, getattr(owner, name)))
        yield
    finally:
        for owner, name, function in kept:
            if name in ("schedule", "build", "_update"):
                delattr(owner, name)  # the class has it
            else:
                setattr(owner, name, function)
