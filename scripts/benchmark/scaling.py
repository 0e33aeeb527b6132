"""How the time of a decode step grows with the context, the rows, and the pool."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator

from scripts.benchmark import machine
from scripts.benchmark.models import Models
from scripts.benchmark.profiling import WARM_UP, Case, decoding
from scripts.benchmark.workloads import Context

MIB = 2**20
CONTEXTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
ROWS = (1, 2, 4, 8, 16, 32, 64)
POOLS = tuple(size * MIB for size in (64, 128, 256, 512, 1024, 2048, 4096))
ROW_CONTEXT = 256
POOL_CASE = Case(8, 256)
SPARE = 0.7  # of the memory that is to be had, for a pool


def panels(
    models: Models, *, contexts: tuple[int, ...], rows: tuple[int, ...], pools: tuple[int, ...]
) -> dict[str, dict[str, Any]]:
    """What is to be measured: for each panel its cases, by size.

    Sizes that the model's window or this machine's memory does not allow are left out.
    """
    window = models.ours.config.max_position_embeddings
    memory = machine.available_memory()
    return {
        "context": {
            "about": "1 row",
            "unit": "context (tokens)",
            "cases": [(c, Case(1, c)) for c in contexts if c + 200 <= window],
        },
        "rows": {
            "about": f"context {ROW_CONTEXT:,}",
            "unit": "rows",
            "cases": [(r, Case(r, ROW_CONTEXT)) for r in rows],
        },
        "pool": {
            "about": f"{POOL_CASE.rows} rows of {POOL_CASE.context:,}",
            "unit": "pool (MiB)",
            "cases": [
                (p // MIB, Case(POOL_CASE.rows, POOL_CASE.context, p))
                for p in pools
                if memory is None or p < SPARE * memory
            ],
        },
    }


def measure(
    models: Models,
    context: Context,
    found: dict[str, dict[str, Any]],
    *,
    steps: int,
    rounds: int,
    told: Callable[[str], None],
    **options: Any,
) -> None:
    """Time all cases, in several rounds through all sizes, so that a busy moment hits them all.

    Args:
        found: from `panels`; each gets its "points", which are whole after every round.
    """
    for panel in found.values():
        panel["points"] = [{"size": size} for size, _ in panel["cases"]]
    times: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(rounds):
        for name, panel in found.items():
            for point, (size, case) in zip(panel["points"], panel["cases"], strict=True):
                told(f"{name} {size}")
                sides = {"ours": _ours(models, context, case, steps, options)}
                if name != "pool":  # it has none
                    sides["mlx-lm"] = _theirs(models, context, case, steps)
                for side, taken in sides.items():
                    kept = times.setdefault((name, size, side), [])
                    kept += taken
                    low, median, high = np.percentile(kept, [10, 50, 90]).tolist()
                    point[side] = {"median": median, "low": low, "high": high}


def pool_ratio(panel: dict[str, Any]) -> float | None:
    """The step in the largest pool over that in the smallest."""
    points = [point["ours"]["median"] for point in panel["points"] if "ours" in point]
    return points[-1] / points[0] if len(points) > 1 else None


def _ours(
    models: Models, context: Context, case: Case, steps: int, options: dict[str, Any]
) -> list[float]:
    engine = decoding(models, context, case, WARM_UP + steps, **options)

    def run() -> Iterator[None]:
        while True:
            engine.step()
            yield

    return _timed(run(), steps)


def _theirs(models: Models, context: Context, case: Case, steps: int) -> list[float]:
    rng = random.Random(0)
    generator = BatchGenerator(
        models.theirs,
        completion_batch_size=case.rows,
        prefill_batch_size=case.rows,
        max_tokens=WARM_UP + steps + 8,
    )
    generator.insert([context.prompts.make(rng, case.context) for _ in range(case.rows)])

    def run() -> Iterator[None]:
        while True:
            generator.next_generated()
            yield

    try:
        return _timed(run(), steps)
    finally:
        generator.close()


def _timed(run: Iterator[None], steps: int) -> list[float]:
    for _ in range(WARM_UP):
        next(run)
    found = []
    for _ in range(steps):
        begin = perf_counter()
        next(run)
        found.append(perf_counter() - begin)
    del run
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
    return found
