"""A prefix that several rows share is read once a step, whoever the rows belong to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import SamplingParams
from mlx_paged.beam import BeamParams
from mlx_paged.engine import Engine
from mlx_paged.kernels.paged_attention import ReferenceAttention
from mlx_paged.kernels.reference import Group, ReferencePlan, SharedRun, plan_reference
from mlx_paged.models.qwen2 import Qwen2
from tests.models import config, random_model

VOCAB = 256


class Watched(ReferenceAttention):
    """Remembers the last step's plan; reads shared prefixes once, or not."""

    compiles = False

    def __init__(self, share: bool = True) -> None:
        self.share = share
        self.last: ReferencePlan | None = None
        self.needed = 0  # blocks of all rows, one by one

    def plan(self, block_tables: Any, context_lens: Any, query_lens: Any, **how: Any) -> Any:
        self.needed = int(-(-context_lens // how["block_size"]).sum())
        self.last = plan_reference(
            block_tables, context_lens, query_lens, finite_tails=True, share=self.share, **how
        )
        return self.last

    def reads(self, num_kv_heads: int) -> int:
        """Blocks that the last step read, padding included."""
        assert self.last is not None
        runs: list[Group | SharedRun] = [*self.last.shared, *self.last.plain, *self.last.partial]
        return sum(run.blocks.size for run in runs) // num_kv_heads


@pytest.fixture(scope="module")
def model() -> Qwen2:
    return random_model(config(layers=2, vocab=VOCAB), seed=2)[0]


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def add_samples(engine: Engine) -> None:
    engine.add(ids(0, 1000), SamplingParams(n=8, temperature=1.0, seed=1, max_tokens=12))


def add_beams(engine: Engine) -> None:
    engine.add_beam_search(ids(0, 1000), BeamParams(width=8, max_tokens=12))


def add_requests(engine: Engine) -> None:
    system = ids(0, 990)
    for i in range(8):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=12)
        engine.add([*system, *ids(i + 1, 5 + i)], params)


@pytest.mark.parametrize("add", [add_samples, add_beams, add_requests])
def test_samples_beams_and_requests_read_their_prefix_once(model: Qwen2, add: Any) -> None:
    """And what comes of it is what comes of reading it for each row."""
    found, watched = [], {share: Watched(share) for share in (True, False)}
    for share, backend in watched.items():
        engine = Engine(model, num_blocks=600, backend=backend)
        add(engine)
        tokens: dict[tuple[int, int], list[Any]] = {}
        steps = 0
        while engine.has_work:
            for output in engine.step():
                texts = output.hypotheses and [one.tokens for one in output.hypotheses]
                tokens.setdefault((output.request_id, output.index), []).append(
                    texts or output.token
                )
            if len(engine.scheduler.running) == 8 and not engine.scheduler.waiting:
                steps += 1
                if steps > 2:  # all of them decode
                    assert backend.needed >= 8 * 62
                    if share:
                        # 61 or 62 blocks for all, and at most 4 of 64 tokens for each.
                        assert backend.reads(2) <= 62 + 8 * 5
                    else:
                        assert backend.reads(2) >= 8 * 62
        assert steps > 8
        found.append(tokens)
    assert found[0] == found[1]


def test_rows_that_share_nothing_are_left_alone(model: Qwen2) -> None:
    backend = Watched()
    engine = Engine(model, num_blocks=600, backend=backend, max_batched_tokens=4096)
    for i in range(6):
        engine.add(ids(i, 600), SamplingParams(max_tokens=4))
    while engine.has_work:
        engine.step()
        assert backend.last is not None
        assert not backend.last.shared


def test_two_groups_are_each_read_once(model: Qwen2) -> None:
    backend = Watched()
    engine = Engine(model, num_blocks=600, backend=backend, max_batched_tokens=4096)
    for seed in (0, 1):
        params = SamplingParams(n=4, temperature=1.0, seed=seed, max_tokens=6)
        engine.add(ids(seed, 800), params)
    engine.add(ids(9, 30), SamplingParams(max_tokens=6))
    for _ in range(3):
        engine.step()
    assert backend.last is not None
    assert [run.query_index.tolist() for run in backend.last.shared] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert backend.reads(2) <= 50 + 50 + 9 * 5


def times_in_turn(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median seconds of each call, the calls in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        for call, mine in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            if i > 4:
                mine.append(time.perf_counter() - begin)
    return [median(mine) for mine in times]


def test_sixteen_samples_of_4096_tokens_cost_little_more_than_one() -> None:
    """A step of 16 samples of a 4,096-token prompt, and one of such a row and 15 of 64 tokens.

    They are nearly equal but for the products of 16 samples with what they share, which no BLAS
    does for nothing, and the slow one of MLX's wheel on Linux least of all. Read for each sample,
    the prompt would make the first many times as long.
    """
    model, _ = random_model(config(heads=2, kv_heads=1, layers=1, vocab=VOCAB, window=8192), seed=0)
    engines = [Engine(model, num_blocks=600, max_batched_tokens=2048) for _ in range(2)]

    def params(seed: int, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=1.0, max_tokens=100, seed=seed, n=n)

    engines[0].add(ids(0, 4096), params(0, n=16))
    engines[1].add(ids(0, 4096), params(0))
    for i in range(15):
        engines[1].add(ids(i + 1, 64), params(i))
    for engine in engines:
        while engine.stats.tokens_generated < 16 or engine.scheduler.waiting:
            engine.step()
        engine.step()
    dim = model.config.head_dim
    queries, keys = mx.random.normal((16 * 2, dim)), mx.random.normal((4096, dim))
    mx.eval(queries, keys)

    def products() -> None:
        mx.eval((queries @ keys.T) @ keys)

    shared, mixed, needed = times_in_turn([*(e.step for e in engines), products], 40)
    said = (1e3 * seconds for seconds in (shared, mixed, needed))
    print("16 samples {:.2f} ms, 1 + 15 rows {:.2f} ms, products {:.2f} ms".format(*said))
    assert shared < 2 * mixed + needed
