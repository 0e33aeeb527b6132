"""Where the time of a decode step goes: our own Python, or MLX.

Every phase of `Engine.step` is timed by a wrapper around the method that does it. MLX's are
`mx.eval`, `mx.async_eval`, and the replay of a graph that `mx.compile` has made, which is all C++.
What is left of the step is counted as ours: building graphs that are not compiled, although that is
C++ in part, and the wrappers, some tenths of a microsecond each.

What runs after `mx.async_eval` and before the wait in `mx.eval` runs while MLX computes: it is
"hidden", if that wait then took long enough to show that MLX was still at it. It is not free where
MLX could have used the core.
"""

from __future__ import annotations

import cProfile
import pstats
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_paged.engine as engine_module
from mlx_paged.engine import Engine
from mlx_paged.model_runner import ModelRunner
from scripts.benchmark.models import Models
from scripts.benchmark.ours import add
from scripts.benchmark.workloads import Context

WARM_UP = 12  # steps before those that count
NO_WAIT = 50e-6  # seconds; MLX had been done before a wait so short
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
    """Seconds spent in each phase of a step, without what MLX took inside of it."""

    def __init__(self) -> None:
        self._spent = self._nothing()
        self._inner = [0.0]  # seconds of nested phases, per level
        self._launched: float | None = None

    @staticmethod
    def _nothing() -> dict[str, float]:
        return dict.fromkeys((*PHASES, "replay", "hidden", "mlx"), 0.0)

    def take(self) -> dict[str, float]:
        """What was spent since the last call."""
        spent, self._spent = self._spent, self._nothing()
        return spent

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
                self._spent[phase] += own

        return call

    def launch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`mx.async_eval`: from its end on, MLX computes."""
        timed = self.timed("mlx", function)

        def call(*args: Any, **kwargs: Any) -> Any:
            timed(*args, **kwargs)
            self._launched = perf_counter()

        return call

    def wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`mx.eval`: what ran since the launch was hidden if MLX is not done yet."""
        timed = self.timed("mlx", function)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter()
            timed(*args, **kwargs)
            launched, self._launched = self._launched, None
            if launched is not None and perf_counter() - begin > NO_WAIT:
                self._spent["hidden"] += begin - launched

        return call


def steps(engine: Engine, count: int) -> list[dict[str, float]]:
    """Seconds per phase of each of `count` steps after `WARM_UP`; "total" is the whole."""
    found = []
    clock = Clock()
    with _wrapped(engine, clock):
        step = clock.timed("other", engine.step)
        for _ in range(WARM_UP):
            step()
        clock.take()
        for _ in range(count):
            begin = perf_counter()
            step()
            total = perf_counter() - begin
            found.append({**clock.take(), "total": total})
    return found


def profile(models: Models, context: Context, case: Case, count: int, **options: Any) -> Any:
    """Medians of decode steps.

    Returns:
        Microseconds of our phases, of MLX's replays and computing, and of the whole step, and
        what of the phases and replays was hidden; the share of the step that is ours, and the
        share in which MLX did not compute.
    """
    engine = decoding(models, context, case, WARM_UP + count, **options)
    measured = steps(engine, count)
    phases = {
        phase: float(np.median([1e6 * one[phase] for one in measured]))
        for phase in (*PHASES, "replay", "hidden", "mlx", "total")
    }
    shares = [1 - (one["mlx"] + one["replay"]) / one["total"] for one in measured]
    bare = [1 - (one["mlx"] + one["hidden"]) / one["total"] for one in measured]
    return {
        "rows": case.rows,
        "context": case.context,
        "pool_bytes": engine.cache.nbytes,
        "microseconds": phases,
        "share": float(np.median(shares)),
        "share_not_hidden": float(np.median(bare)),
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
    builder, runner, module = private._builder, private._runner, engine_module

    def compile_step(*args: Any) -> Any:
        return clock.timed("replay", ModelRunner.compile(runner, *args))

    wrappers: list[tuple[Any, str, Callable[..., Any]]] = [
        (engine.scheduler, "schedule", clock.timed("schedule", engine.scheduler.schedule)),
        (builder, "build", clock.timed("build", builder.build)),
        (builder, "build_next", clock.timed("build", builder.build_next)),
        (private, "_runner", clock.timed("graph", private._runner)),
        (runner, "compile", compile_step),
        (private, "_update", clock.timed("update", private._update)),
        (module, "prepare", clock.timed("sample", module.prepare)),
        (mx, "eval", clock.wait(mx.eval)),
        (mx, "async_eval", clock.launch(mx.async_eval)),
    ]
    kept = [(owner, name, vars(owner).get(name)) for owner, name, _ in wrappers]
    try:
        runner.reset()  # what is compiled from here on is timed
        for owner, name, wrapper in wrappers:
            setattr(owner, name, wrapper)
        yield
    finally:
        runner.reset()
        for owner, name, own in kept:
            if own is None:
                delattr(owner, name)  # the class has it
            else:
                setattr(owner, name, own)
