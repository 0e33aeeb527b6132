"""How many requests run at once in a number of bytes, found by running them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_paged.engine import Engine
from mlx_paged.scheduler import Schedule
from scripts.benchmark.contender import Settings
from scripts.benchmark.contiguous import Batch, Stream, nbytes, stream
from scripts.benchmark.models import Models
from scripts.benchmark.ours import Ours, add, serve, tell
from scripts.benchmark.recording import OverBudgetError, Recorder
from scripts.benchmark.workloads import Workload

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of the memory, tried for the pool
CLOSE = 0.03  # how near the largest number that fits is found


class Crowd(Ours):
    """All requests together; over when one would have to wait for memory, or to give way."""

    def __init__(self, models: Models, options: Settings) -> None:
        super().__init__(models, options)
        self._share = 0  # in SHARES, of the last pool that did

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve, or stop where the pool runs out.

        If all memory is limited, the pool gets the largest share of it that leaves enough for the
        rest.
        """
        if not workload.whole:
            # All prompts in the first step, so that nobody is gone before the last one comes.
            self._serve(workload, recorder, max(512, sum(workload.lengths)), 1.0)
            return
        while True:
            try:
                self._serve(workload, recorder, None, SHARES[self._share])
                return
            except OverBudgetError:
                if self._share + 1 == len(SHARES):
                    self._share = 0
                    raise
                self._share += 1
            recorder.clear()
            mx.clear_cache()
            mx.reset_peak_memory()

    def _serve(
        self, workload: Workload, recorder: Recorder, step: int | None, share: float
    ) -> None:
        assert workload.memory is not None
        rows = len(workload.requests)
        options: dict[str, Any] = {} if step is None else {"max_batched_tokens": max(rows, step)}

        def observe(engine: Engine, schedule: Schedule, _: Any) -> None:
            budget = engine.scheduler.max_batched_tokens
            waits = engine.scheduler.waiting and schedule.num_tokens < budget
            if waits or schedule.preempted:
                raise OverBudgetError

        engine = self.engine(
            replace(workload, memory=int(workload.memory * share)),
            max_num_seqs=rows,
            prefix_caching=False,  # else a prompt may wait for another that begins like it
            observer=observe,
            **options,
        )
        recorder.begin()
        streams = {add(engine, r.prompt, r.new): i for i, r in enumerate(workload.requests)}
        serve(engine, streams, recorder)
        tell(engine, recorder)


class CrowdedBatch(Batch):
    """All requests in one batch, from the first step on if only keys and values are limited.

    If all memory is, prompts are computed a few at a time and in small steps, as that takes least.
    """

    name = "mlx-lm, one batch"
    about = "BatchGenerator, all in one batch"

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve; the recorder stops it when it is over the budget."""
        rows = len(workload.requests)
        settings = {
            "completion_batch_size": rows,
            "prefill_batch_size": min(4, rows) if workload.whole else rows,
            "prefill_step_size": 64 if workload.whole else 512,
        }
        super().run(workload, settings, recorder)


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
        mx.synchronize()
        gc.collect()
        mx.clear_cache()
        mx.reset_peak_memory()
        recorder = Recorder(count, budget=workload.memory, whole=workload.whole)
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
