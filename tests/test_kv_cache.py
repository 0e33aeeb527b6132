"""The pool's arrays: what is written where, and that no step copies one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, SamplingParams
from mlx_paged.kv_cache import KVCache, Slots
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.request import Output
from tests.models import config, random_model


def small_cache(layers: int = 2) -> KVCache:
    return KVCache(
        num_layers=layers,
        num_blocks=6,
        num_kv_heads=2,
        block_size=4,
        head_dim=3,
        dtype=mx.float32,
    )


def fill(cache: KVCache, value: Callable[[int], float]) -> None:
    """Give every block of every layer a value of its own."""
    for layer in range(cache.num_layers):
        for array, sign in ((cache.keys, 1), (cache.values, -1)):
            for block in range(cache.shape[0]):
                array[layer][block] = sign * (value(block) + 100 * layer)
    mx.eval(cache.keys, cache.values)


def slots(pairs: list[tuple[int, int]]) -> Slots:
    blocks, offsets = (np.array(side, np.int32)[:, None] for side in zip(*pairs, strict=True))
    return Slots(mx.array(blocks), mx.arange(2)[None], mx.array(offsets))


def test_tokens_go_to_their_slots_and_nothing_else_changes() -> None:
    cache = small_cache()
    keys = mx.arange(18, dtype=mx.float32).reshape(3, 2, 3) + 1
    cache.write(1, keys, -keys, slots([(4, 0), (4, 1), (2, 3)]))
    expected = np.zeros(cache.shape, np.float32)
    for token, (block, offset) in enumerate([(4, 0), (4, 1), (2, 3)]):
        expected[block, :, offset] = np.array(keys)[token]
    np.testing.assert_array_equal(np.array(cache.keys[1]), expected)
    np.testing.assert_array_equal(np.array(cache.values[1]), -expected)
    assert not np.array(cache.keys[0]).any()


def test_all_sources_are_read_before_any_target_is_written() -> None:
    cache = small_cache()
    fill(cache, float)
    cache.copy_blocks([(0, 1), (1, 2), (2, 0), (3, 5)])
    for layer in range(2):
        firsts = np.array(cache.keys[layer])[:, 1, 3, 2] - 100 * layer
        assert firsts.tolist() == [2, 0, 1, 3, 4, 3]
        np.testing.assert_array_equal(np.array(cache.values[layer]), -np.array(cache.keys[layer]))


def test_no_copies_change_nothing() -> None:
    cache = small_cache()
    before = list(cache.keys)
    cache.copy_blocks([])
    assert all(a is b for a, b in zip(before, cache.keys, strict=True))


def test_opened_blocks_have_finite_values() -> None:
    cache = small_cache()
    fill(cache, lambda block: np.nan if block in (1, 4) else block)
    cache.open_blocks(mx.array([1, 4]))
    for layer in range(2):
        values = np.array(cache.values[layer])
        assert not values[[1, 4]].any()
        assert values[2, 0, 0, 0] == -2 - 100 * layer


def test_reset_makes_zeros() -> None:
    cache = small_cache()
    fill(cache, float)
    cache.reset()
    assert not any(np.array(a).any() for a in (*cache.keys, *cache.values))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_bytes(dtype: mx.Dtype) -> None:
    geometry = {"num_layers": 3, "num_kv_heads": 2, "block_size": 5, "head_dim": 8}
    cache = KVCache(num_blocks=7, dtype=dtype, **geometry)
    assert KVCache.block_bytes(dtype=dtype, **geometry) == 2 * 3 * 2 * 5 * 8 * dtype.size
    assert cache.nbytes == 7 * KVCache.block_bytes(dtype=dtype, **geometry)


def test_a_layers_array_stays_under_2_to_the_31_elements() -> None:
    with pytest.raises(ValueError, match=r"num_blocks 16384 .* at most 16383 blocks fit"):
        KVCache(
            num_layers=1,
            num_blocks=2**14,
            num_kv_heads=8,
            block_size=128,
            head_dim=128,
            dtype=mx.float32,
        )


# No step copies a pool


@pytest.fixture(scope="module")
def model() -> Qwen2:
    return random_model(config(heads=2, kv_heads=1, vocab=64))[0]


class Watched:
    """An engine whose arrays are far larger than anything else a step makes."""

    def __init__(self, model: Qwen2, **options: int) -> None:
        chosen: dict[str, Any] = {"num_blocks": 4000, "max_num_seqs": 16, "max_batched_tokens": 40}
        self.engine = Engine(model, **(chosen | options))
        self.array_bytes = self.engine.cache.keys[0].nbytes
        self.steps = 0

    def addresses(self) -> list[int]:
        arrays = (*self.engine.cache.keys, *self.engine.cache.values)
        return [np.array(a, copy=False).__array_interface__["data"][0] for a in arrays]

    def step(self) -> list[Output]:
        """A step in which every array stays where it is, and no copy of one ever exists."""
        before = self.addresses()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        outputs = self.engine.step()
        assert mx.get_peak_memory() - held < self.array_bytes / 2, "a pool was copied"
        assert self.addresses() == before, "a pool was moved"
        self.engine.check()
        self.steps += 1
        return outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, length).tolist()


@pytest.mark.parametrize("look", [mx.stop_gradient, lambda a: a.reshape(-1)])
def test_a_copy_would_be_noticed(model: Qwen2, look: Callable[[mx.array], mx.array]) -> None:
    watched = Watched(model)
    watched.engine.add(prompt(5), SamplingParams(max_tokens=3))
    kept = look(watched.engine.cache.values[1])
    mx.eval(kept)
    with pytest.raises(AssertionError, match="a pool was"):
        watched.step()


def test_decode_copies_no_pool(model: Qwen2) -> None:
    watched = Watched(model)
    for i in range(5):
        watched.engine.add(prompt(3 + 5 * i, i), SamplingParams(max_tokens=20))
    watched.run()
    assert watched.steps >= 20


def test_prompt_chunks_copy_no_pool(model: Qwen2) -> None:
    watched = Watched(model, max_batched_tokens=17)
    watched.engine.add(prompt(30), SamplingParams(max_tokens=12))
    watched.step()
    watched.engine.add(prompt(100, 1), SamplingParams(max_tokens=2))
    watched.run()
    assert watched.steps > 9


def test_forks_and_copies_on_write_copy_no_pool(model: Qwen2) -> None:
    watched = Watched(model)
    watched.engine.add(prompt(20), SamplingParams(max_tokens=5, n=4, temperature=1.0, seed=1))
    watched.run()
    assert watched.engine.stats.block_copies == 3


def test_reused_parts_of_blocks_copy_no_pool(model: Qwen2) -> None:
    watched = Watched(model)
    for _ in range(2):
        watched.engine.add(prompt(30), SamplingParams(max_tokens=3))
        watched.run()
    assert watched.engine.stats.tokens_copied == 13
    assert watched.engine.stats.block_copies == 1


@pytest.mark.parametrize("event", ["join", "cancel", "preempt", "clear"])
def test_what_happens_between_decode_steps_copies_no_pool(model: Qwen2, event: str) -> None:
    """Whatever is prepared for the next step, it is not what comes."""
    watched = Watched(model)
    engine = watched.engine
    first = [engine.add(prompt(30, i), SamplingParams(max_tokens=30)) for i in range(2)]
    for _ in range(8):
        watched.step()
    if event == "join":
        engine.add([*prompt(30)[:21], 1, 2], SamplingParams(max_tokens=5))
        watched.step()
        assert engine.stats.block_copies == 1
    elif event == "cancel":
        engine.cancel(first[0])
    elif event == "preempt":
        engine.scheduler.preempt(engine.scheduler.running[0])
        watched.step()
        assert engine.stats.block_copies == 1
    else:
        engine.clear_cache()
    watched.run()


def test_preemption_copies_no_pool(model: Qwen2) -> None:
    watched = Watched(model, num_blocks=260, block_size=256, max_batched_tokens=16)
    for i in range(3):
        watched.engine.add(prompt(10, i), SamplingParams(max_tokens=8))
    while watched.engine.has_work:
        watched.step()
        running = watched.engine.scheduler.running
        if watched.steps % 2 == 0 and running:
            watched.engine.scheduler.preempt(running[-1])
    assert watched.engine.stats.preemptions >= 3


def test_penalties_and_log_probabilities_copy_no_pool(model: Qwen2) -> None:
    watched = Watched(model)
    watched.engine.add(
        prompt(9), SamplingParams(max_tokens=4, logprobs=3, repetition_penalty=1.2, top_p=0.9)
    )
    watched.engine.add(prompt(9, 1), SamplingParams(max_tokens=4), full_logprobs=True)
    kept = []
    while watched.engine.has_work:
        kept += watched.step()  # a user keeps what he is given
    assert len(kept) == 8


def test_after_a_failed_step_no_pool_is_copied(model: Qwen2) -> None:
    watched = Watched(model)
    broken = [True]

    def sampler(logprobs: mx.array) -> mx.array:
        if broken:
            raise KeyboardInterrupt
        return mx.argmax(logprobs, axis=-1)

    watched.engine.add(prompt(9), SamplingParams(max_tokens=4), sampler=sampler)
    with pytest.raises(KeyboardInterrupt):
        watched.step()
    broken.clear()
    watched.run()
    assert watched.engine.stats.tokens_generated == 4
