"""Our side: one engine over one pool of blocks."""

from __future__ import annotations

from typing import Any

from mlx_paged.engine import Engine
from mlx_paged.sampling import SamplingParams
from scripts.benchmark.contender import Contender, Settings
from scripts.benchmark.recording import Recorder
from scripts.benchmark.workloads import Workload


class Ours(Contender):
    """The engine as it comes, warm, in a pool as large as the workload needs or allows.

    The pool is made before the clock starts, as a server makes it once. The engine stays from one
    repetition to the next; every repetition has prompts of its own, so that nothing of the last
    one is found in the prefix cache.
    """

    name = "ours"
    about = "Engine"

    def __init__(self, models: Any, options: Settings) -> None:
        super().__init__(models, options)
        self._engine: Engine | None = None

    def prepare(self, workload: Workload, settings: Settings) -> None:
        """Make the pool."""
        if self._engine is None:
            self._engine = self.engine(workload)

    def engine(self, workload: Workload, **more: Any) -> Engine:
        """A new engine whose pool is what the workload allows or, without a limit, needs."""
        pool: dict[str, Any] = {"memory_limit": workload.memory}
        if workload.memory is None:
            block_size = self.options.get("block_size", 16)
            pool = {"num_blocks": pool_blocks(workload, block_size)}
        return Engine(self.models.ours, **{**self.options, **pool, **more})

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Add requests, step until they are done."""
        engine = self._engine
        assert engine is not None
        recorder.begin()
        if not workload.sequential:
            streams = {}
            for index, request in enumerate(workload.requests):
                first = index * workload.samples
                streams[add(engine, request.prompt, request.new, workload.samples)] = first
            serve(engine, streams, recorder)
        else:
            for index, request in enumerate(workload.requests):
                prompt = workload.prompt(index, dict(enumerate(recorder.tokens)))
                recorder.start(index)
                streams = {add(engine, prompt, request.new): index}
                serve(engine, streams, recorder, keeps_cached=True)

    def release(self) -> None:
        """Drop the engine with its pool."""
        self._engine = None


def add(engine: Engine, prompt: list[int], new: int, samples: int = 1) -> int:
    """Queue a greedy request that goes on after end tokens."""
    return engine.add(prompt, SamplingParams(max_tokens=new, n=samples, ignore_eos=True))


def serve(
    engine: Engine, streams: dict[int, int], recorder: Recorder, *, keeps_cached: bool = False
) -> None:
    """Step until all requests are done.

    Args:
        streams: by request id the stream of its first sample.
        keeps_cached: whether blocks that only the prefix cache refers to are held, too.
    """
    try:
        while engine.has_work:
            outputs = engine.step()
            pairs = []
            for output in outputs:
                assert output.token is not None, output.error
                pairs.append((streams[output.request_id] + output.index, output.token))
            recorder.add(pairs)
            if recorder.watch:
                tell(engine, recorder, keeps_cached)
    finally:
        for request in streams:
            engine.cancel(request)


def tell(engine: Engine, recorder: Recorder, keeps_cached: bool = False) -> None:
    """Tell what the pool holds."""
    stats = engine.stats
    blocks = stats.blocks_used + (stats.blocks_cached if keeps_cached else 0)
    recorder.hold(
        blocks * stats.block_bytes,
        stats.live_tokens * stats.bytes_per_token,
        stats.num_blocks * stats.block_bytes,
    )


def pool_blocks(workload: Workload, block_size: int) -> int:
    """Blocks that hold the whole workload at once, and what the scheduler keeps spare."""
    blocks = 0
    if workload.sequential:
        # One after the other: every turn may begin and end a block of its own.
        blocks = -(-workload.distinct_tokens // block_size) + 2 * len(workload.requests)
    else:
        for request in workload.requests:
            full, rest = divmod(len(request.prompt), block_size)
            own = -(-(rest + request.new) // block_size)
            blocks += full + own * workload.samples
    return blocks + blocks // 64 + 2
