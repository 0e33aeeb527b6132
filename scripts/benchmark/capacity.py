"""How many requests run at once in a number of bytes, found by running them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.engine import Engine
from mlx_paged.scheduler import Schedule
from scripts.benchmark.contender import Settings
from scripts.benchmark.contiguous import Batch, Stream, nbytes, stream
from scripts.benchmark.ours import Ours, add, serve, tell
from scripts.benchmark.recording import OverBudgetError, Recorder
from scripts.benchmark.workloads import Workload

CLOSE = 0.03  # how near the largest number that fits is found


class Crowd(Ours):
    """All requests from the first step on; over when one would have to wait or to give way."""

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve, or stop where the pool runs out."""
        prompts = sum(workload.lengths)
        rows = len(workload.requests)

        def observe(engine: Engine, schedule: Schedule, _: Any) -> None:
            if engine.scheduler.waiting or schedule.preempted:
                raise OverBudgetError

        engine = self.engine(
            workload,
            max_num_seqs=rows,
            max_batched_tokens=max(512, rows, prompts),
            prefix_caching=False,  # else a prompt may wait for another that begins like it
            observer=observe,
        )
        recorder.begin()
        streams = {add(engine, r.prompt, r.new): i for i, r in enumerate(workload.requests)}
        serve(engine, streams, recorder)
        tell(engine, recorder)


class CrowdedBatch(Batch):
    """All requests in one batch from the first step on."""

    name = "mlx-lm, one batch"
    about = "BatchGenerator, all in one batch"

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve; the recorder stops it when its caches are over the budget."""
        rows = len(workload.requests)
        super().run(
            workload,
            {"completion_batch_size": rows, "prefill_batch_size": rows, "prefill_step_size": 512},
            recorder,
        )


class InTurns(Stream):
    """No batch: a cache for each request, one token of each in turn. The frugal way."""

    name = "mlx-lm, unbatched"
    about = "a cache for each request, a token of each in turn"

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve; the recorder stops it when its caches are over the budget."""
        caches = [make_prompt_cache(self.models.theirs) for _ in workload.requests]
        recorder.begin()
        running = {
            index: stream(self.models.theirs, request.prompt, request.new, cache)
            for index, (request, cache) in enumerate(zip(workload.requests, caches, strict=True))
        }
        while running:
            for index, tokens in list(running.items()):
                found = next(tokens, None)
                if found is None:
                    del running[index]
                    caches[index] = []
                else:
                    recorder.add([(index, found)])
                held = [cache for cache in caches if cache and not cache[0].empty()]
                live = sum(cache[0].offset for cache in held)
                recorder.hold(nbytes(*held), live * self.models.bytes_per_token)


def search(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest number up to `most` that fits, to within 3 %; 0 if not even one does.

    Args:
        fits: whether so many run; true up to some number, false from there on.
        guess: where to begin.
    """
    low, high = 0, most + 1
    step = min(max(1, guess), most)
    while high - low > max(1, int(CLOSE * low)):
        if fits(step):
            low = step
            step = min(max(step + 1, int(step * 1.3)), high - 1)
        else:
            high = step
            step = max(low + 1, int(step / 1.3))
        if low and high <= most:
            step = (low + high) // 2
    return low


def measure(
    side: Crowd | CrowdedBatch | InTurns,
    workload: Workload,
    told: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The largest number of a workload's first requests that run at once in its memory.

    Returns:
        The number, and held, live and peak bytes and tokens per second of its run.
    """
    assert workload.memory is not None
    runs: dict[int, dict[str, Any]] = {}

    def fits(count: int) -> bool:
        told(f"capacity {side.name}: {count}")
        part = replace(workload, requests=workload.requests[:count])
        recorder = Recorder(count, budget=workload.memory)
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        try:
            side.run(part, {}, recorder)
        except OverBudgetError:
            return False
        runs[count] = {
            "requests": count,
            "kv_held_bytes": recorder.held,
            "kv_live_bytes": recorder.live,
            "peak_bytes": mx.get_peak_memory(),
            "generation_tps": part_tokens(part) / recorder.seconds,
            "tokens": recorder.tokens,
        }
        return True

    bytes_per_token = side.models.bytes_per_token
    lengths = [
        length + request.new
        for length, request in zip(workload.lengths, workload.requests, strict=True)
    ]
    typical = max(lengths) if isinstance(side, CrowdedBatch) else sum(lengths) / len(lengths)
    guess = int(workload.memory / (typical * bytes_per_token))
    best = search(fits, guess, len(workload.requests))
    nothing = dict.fromkeys(
        ("kv_held_bytes", "kv_live_bytes", "peak_bytes", "generation_tps"), 0
    ) | {"requests": 0, "tokens": []}
    return runs.get(best, nothing)


def part_tokens(workload: Workload) -> int:
    """Tokens that a workload generates."""
    return sum(request.new for request in workload.requests) * workload.samples
