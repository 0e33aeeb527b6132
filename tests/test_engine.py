"""The engine gives mlx-lm's greedy tokens, whatever happens to its blocks on the way."""

from __future__ import annotations

import gc
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged import Engine, SamplingParams
from mlx_paged import engine as engine_module
from mlx_paged.beam import BeamParams
from mlx_paged.kv_cache import KVCache
from tests.models import config, greedy, random_model

VOCAB = 128
Tokens = dict[tuple[int, int], list[int]]


class World:
    """Our model, and what mlx-lm's copy of it answers."""

    def __init__(self) -> None:
        self.model, self._theirs = random_model(
            config(heads=4, kv_heads=2, head_dim=16, vocab=VOCAB), seed=1
        )
        self._known: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """mlx-lm's greedy tokens."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < count:
            known = self._known[tuple(prompt)] = greedy(self._theirs, prompt, count)
        return known[:count]

    def engine(self, **options: Any) -> Engine:
        defaults: dict[str, Any] = {"num_blocks": 100, "block_size": 4, "max_num_seqs": 16}
        return Engine(self.model, **(defaults | options))


@pytest.fixture(scope="module")
def world() -> World:
    return World()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def collect(engine: Engine, tokens: Tokens) -> None:
    """One step; add its tokens to `tokens`."""
    for output in engine.step():
        assert output.token is not None, output.error
        tokens.setdefault((output.request_id, output.index), []).append(output.token)
    check(engine)


def check(engine: Engine) -> None:
    """All invariants, and that requests and scheduler know the same sequences."""
    engine.check()
    scheduler = engine.scheduler
    held = {id(seq) for request in engine._requests.values() for seq in request.sequences}
    assert held == {id(seq) for seq in (*scheduler.running, *scheduler.waiting)}
    assert all(seq.num_uncomputed >= 1 for seq in scheduler.running)


def run(engine: Engine, between: Callable[[], None] = lambda: None) -> Tokens:
    """Step until all is done, with `between` after each step."""
    tokens: Tokens = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        collect(engine, tokens)
        between()
        engine.check()
    assert not engine.has_work, "no end in sight"
    check_empty(engine)
    return tokens


def check_empty(engine: Engine) -> None:
    """Every block is free or cached."""
    engine.check()
    stats = engine.stats
    assert stats.blocks_used == stats.live_tokens == 0
    assert stats.blocks_free + stats.blocks_cached == stats.num_blocks
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


def ask(engine: Engine, prompts: Iterable[list[int]], count: int, **options: Any) -> list[int]:
    return [engine.add(p, SamplingParams(max_tokens=count, **options)) for p in prompts]


# The same tokens as a contiguous cache


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
@pytest.mark.parametrize("seed", range(3))
def test_any_block_size_chunking_and_company(world: World, block_size: int, seed: int) -> None:
    rng = random.Random(100 * block_size + seed)
    prompts = [prompt_of(rng.choice([1, 2, 7, 8, 15, 16, 17, 30, 50]), i) for i in range(8)]
    prompts += [prompts[i][: rng.randint(1, len(prompts[i]))] + prompt_of(3, i) for i in range(4)]
    rng.shuffle(prompts)
    most = rng.randint(1, 9)
    engine = world.engine(
        block_size=block_size,
        num_blocks=1 + rng.randint(64, 200) // block_size,
        max_num_seqs=most,
        max_batched_tokens=most + rng.choice([0, 1, 5, 13, 64]),
        prefix_caching=rng.random() < 0.7,
        token_reuse=rng.random() < 0.7,
        compile_steps=rng.random() < 0.7,
    )
    counts = [rng.randint(1, 9) for _ in prompts]
    waiting = list(zip(prompts, counts, strict=True))
    ids: list[int] = []

    def join() -> None:
        while waiting and rng.random() < 0.4:
            prompt, count = waiting.pop()
            ids.append(engine.add(prompt, SamplingParams(max_tokens=count)))

    tokens: Tokens = {}
    while waiting or engine.has_work:
        join()
        collect(engine, tokens)
    check_empty(engine)
    for number, prompt, count in zip(ids, reversed(prompts), reversed(counts), strict=True):
        assert tokens[number, 0] == world.answer(prompt, count)


@pytest.mark.parametrize("block_size", [1, 4, 7, 256])
@pytest.mark.parametrize("caching", ["off", "blocks", "tokens"])
@pytest.mark.parametrize("who", ["youngest", "oldest", "all"])
def test_preemption_after_every_step(world: World, block_size: int, caching: str, who: str) -> None:
    engine = world.engine(
        block_size=block_size,
        num_blocks=max(2, 60 // block_size),
        prefix_caching=caching != "off",
        token_reuse=caching == "tokens",
        max_batched_tokens=64,
    )
    prompts = [prompt_of(5), prompt_of(8, 1), [*prompt_of(8, 1)[:6], 3]]
    ids = ask(engine, prompts, 7)

    def preempt() -> None:
        running = list(engine.scheduler.running)
        chosen = {"youngest": running[-1:], "oldest": running[:1], "all": running}[who]
        for seq in chosen:
            engine.scheduler.preempt(seq)

    tokens = run(engine, preempt)
    for number, prompt in zip(ids, prompts, strict=True):
        assert tokens[number, 0] == world.answer(prompt, 7)
    assert engine.stats.preemptions >= 6
    if caching == "off":
        assert engine.stats.tokens_reused == engine.stats.tokens_copied == 0


def test_a_pool_for_one_request_serves_many(world: World) -> None:
    for block_size in (1, 5):
        engine = world.engine(block_size=block_size, num_blocks=30 // block_size)
        prompts = [prompt_of(11, i) for i in range(6)]
        ids = ask(engine, prompts, 20)  # all 30 slots, for one of them
        tokens = run(engine)
        for number, prompt in zip(ids, prompts, strict=True):
            assert tokens[number, 0] == world.answer(prompt, 20)
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("token_reuse", [True, False])
def test_prefix_hits_of_every_length_around_a_block(
    world: World, size: int, token_reuse: bool
) -> None:
    base = prompt_of(2 * size + 3, 7)
    for shared in sorted({1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1} - {0}):
        for tail in ([], [(base[shared] + 1) % VOCAB], [(base[shared] + 1) % VOCAB, 5, 6]):
            engine = world.engine(block_size=size, token_reuse=token_reuse)
            ask(engine, [base], 1)
            run(engine)
            prompt = base[:shared] + tail
            (number,) = ask(engine, [prompt], 4)
            assert run(engine)[number, 0] == world.answer(prompt, 4)
            usable = min(shared, len(prompt) - 1)  # the last token is always computed
            full = usable // size * size
            stats = engine.stats
            assert (stats.tokens_reused, stats.blocks_reused) == (full, full // size)
            assert stats.tokens_copied == (usable - full if token_reuse else 0)
            assert stats.tokens_computed == len(base) + len(prompt) + 3 - full - stats.tokens_copied


def test_a_conversation_reuses_what_was_generated(world: World) -> None:
    engine = world.engine()
    conversation = prompt_of(9)
    for turn in range(4):
        (number,) = ask(engine, [conversation], 6)
        answer = run(engine)[number, 0]
        assert answer == world.answer(conversation, 6)
        conversation = [*conversation, *answer, *prompt_of(3, turn)]
    stats = engine.stats
    # All but each turn's last token and what follows it were there already.
    assert stats.tokens_reused + stats.tokens_copied == (9 + 5) + (18 + 5) + (27 + 5)


def test_equal_prompts_that_arrive_together_share(world: World) -> None:
    for length in (8, 9, 11):
        engine = world.engine()
        ids = ask(engine, [prompt_of(length)] * 5, 6)
        tokens = run(engine)
        assert [tokens[number, 0] for number in ids] == [world.answer(prompt_of(length), 6)] * 5
        assert engine.stats.tokens_computed == length + 4 + 5 * 5


def test_prefix_caching_off_means_off(world: World) -> None:
    engine = world.engine(prefix_caching=False)
    ids = ask(engine, [prompt_of(12)] * 2, 3)
    tokens = run(engine)
    ids += ask(engine, [prompt_of(12)], 3)
    tokens |= run(engine)
    assert [tokens[number, 0] for number in ids] == [world.answer(prompt_of(12), 3)] * 3
    stats = engine.stats
    assert stats.tokens_computed == 3 * (12 + 2)
    assert (stats.tokens_reused, stats.tokens_copied, stats.blocks_cached) == (0, 0, 0)
    assert (stats.blocks_missed, stats.tokens_missed, stats.evictions) == (0, 0, 0)


def test_a_salt_keeps_requests_apart(world: World) -> None:
    engine = world.engine()
    params = SamplingParams(max_tokens=2)
    for salt, reused in (("a", 0), ("b", 0), ("a", 8)):
        before = engine.stats.tokens_reused
        number = engine.add(prompt_of(9), params, cache_salt=salt)
        assert run(engine)[number, 0] == world.answer(prompt_of(9), 2)
        assert engine.stats.tokens_reused - before == reused


def test_clear_cache(world: World) -> None:
    engine = world.engine()
    for _ in range(2):
        ask(engine, [prompt_of(9)], 2)
        run(engine)
        engine.clear_cache()
        assert engine.stats.blocks_cached == 0
    assert engine.stats.tokens_reused == engine.stats.tokens_copied == 0


def test_what_is_left_in_blocks_does_not_matter(world: World) -> None:
    engine = world.engine(num_blocks=12, max_batched_tokens=16)
    for arrays in (engine.cache.keys, engine.cache.values):
        for layer in range(len(arrays)):
            arrays[layer] = mx.full(engine.cache.shape, mx.nan)
    prompts = [prompt_of(length, length) for length in (1, 3, 4, 5, 13, 8)]
    ids = ask(engine, prompts, 9)
    tokens = run(engine)
    for number, prompt in zip(ids, prompts, strict=True):
        assert tokens[number, 0] == world.answer(prompt, 9)
    assert engine.stats.preemptions > 0


# Exact figures


def last_tables(engine: Engine, count: int) -> list[list[int]]:
    """The block tables of `count` samples before their last tokens."""
    tables: dict[tuple[int, int], list[int]] = {}
    while engine.has_work:
        if len(engine.block_tables()) == count:
            tables = engine.block_tables()
            used = engine.stats.blocks_used
            assert used == len({block for table in tables.values() for block in table})
        engine.step()
        engine.check()
    return [tables[key] for key in sorted(tables)]


def test_tables_of_two_prompts_decoded_in_turn(world: World) -> None:
    engine = world.engine(block_size=16)
    ask(engine, [prompt_of(4), prompt_of(11)], 100)
    assert last_tables(engine, 2) == [[0, 3, 5, 7, 9, 11, 13], [1, 2, 4, 6, 8, 10, 12]]


def test_tables_of_four_samples_of_one_prompt(world: World) -> None:
    engine = world.engine(block_size=16)
    ask(engine, [prompt_of(44)], 64, n=4, temperature=1.0, seed=5)
    tables = last_tables(engine, 4)
    assert tables == [
        [0, 1, 3, 6, 10, 14, 18],
        [0, 1, 4, 7, 11, 15, 19],
        [0, 1, 5, 8, 12, 16, 20],
        [0, 1, 2, 9, 13, 17, 21],
    ]
    assert len({block for table in tables for block in table}) == 22  # and not 28
    assert engine.stats.block_copies == 3
    assert engine.stats.tokens_computed == 44 + 4 * 63


@pytest.mark.parametrize(("token_reuse", "copied"), [(False, 0), (True, 5)])
def test_80_of_85_shared_tokens_are_reused_as_blocks(
    world: World, token_reuse: bool, copied: int
) -> None:
    engine = world.engine(block_size=16, token_reuse=token_reuse)
    system = prompt_of(85)
    prompts = [[*system, 1, 2, 3], [*system, 4, 5, 6, 7]]
    for prompt in prompts:
        (number,) = ask(engine, [prompt], 3)
        assert run(engine)[number, 0] == world.answer(prompt, 3)
    stats = engine.stats
    assert (stats.tokens_reused, stats.blocks_reused) == (80, 5)
    assert stats.tokens_copied == stats.block_copies * 5 == copied
    assert stats.tokens_missed == 88 + 89 - 80 - copied
    assert stats.blocks_missed == 6 + 1


def test_figures_of_a_running_engine(world: World) -> None:
    engine = world.engine(num_blocks=10)
    ask(engine, [prompt_of(6)], 5, n=2, temperature=1.0)
    engine.step()
    stats = engine.stats
    assert (stats.num_blocks, stats.blocks_used, stats.live_tokens) == (10, 2, 6)
    engine.step()
    stats = engine.stats
    assert (stats.blocks_used, stats.live_tokens, stats.block_copies) == (3, 10, 1)
    assert (stats.steps, stats.tokens_computed, stats.tokens_generated) == (2, 8, 4)
    assert stats.bytes_per_token * 4 == stats.block_bytes


@pytest.mark.parametrize("slack", [0, 1, -1])
def test_the_memory_limit_is_kept_exactly(world: World, slack: int) -> None:
    block = 2 * 2 * 2 * 16 * 4 * 4  # K and V, layers, kv heads, head dim, block size, float32
    engine = world.engine(num_blocks=None, memory_limit=20 * block + slack)
    assert engine.stats.block_bytes == block
    assert engine.stats.num_blocks == (19 if slack < 0 else 20)
    assert engine.cache.nbytes == engine.stats.num_blocks * block <= 20 * block + slack
    ask(engine, [prompt_of(9, i) for i in range(9)], 12)
    run(engine)
    assert engine.cache.nbytes == engine.stats.num_blocks * block


# Samples


def sampled(world: World, prompt: list[int], count: int, seed: int) -> list[int]:
    engine = world.engine(prefix_caching=False)
    (number,) = ask(engine, [prompt], count, temperature=0.8, top_p=0.95, seed=seed)
    return run(engine)[number, 0]


@pytest.mark.parametrize("length", [4, 9, 12])
@pytest.mark.parametrize("crowded", [False, True])
def test_n_seeded_samples_are_n_separate_runs(world: World, length: int, crowded: bool) -> None:
    prompt = prompt_of(length)
    separate = [sampled(world, prompt, 12, 40 + i) for i in range(4)]
    assert len({tuple(tokens) for tokens in separate}) == 4
    engine = world.engine(num_blocks=14 if crowded else 100)
    others = [prompt_of(3 + i, 50 + i) for i in range(12 if crowded else 0)]
    ids = ask(engine, others[:6], 10)
    (number,) = ask(engine, [prompt], 12, temperature=0.8, top_p=0.95, seed=40, n=4)
    ids += ask(engine, others[6:], 10)
    tokens = run(engine)
    assert [tokens[number, i] for i in range(4)] == separate
    for other, text in zip(ids, others, strict=True):
        assert tokens[other, 0] == world.answer(text, 10)
    assert (engine.stats.preemptions > 5) == crowded


def test_samples_that_are_preempted_after_every_step(world: World) -> None:
    prompt = prompt_of(6)
    engine = world.engine(max_batched_tokens=16)
    (number,) = ask(engine, [prompt], 8, temperature=0.8, top_p=0.95, seed=40, n=3)

    def preempt() -> None:
        for seq in list(engine.scheduler.running):
            engine.scheduler.preempt(seq)

    tokens = run(engine, preempt)
    assert [tokens[number, i] for i in range(3)] == [
        sampled(world, prompt, 8, 40 + i) for i in range(3)
    ]


@pytest.mark.parametrize("width", range(1, 7))
def test_samples_of_prompts_as_long_as_they_are_many(world: World, width: int) -> None:
    for length in (1, width):
        engine = world.engine()
        other = ask(engine, [prompt_of(2, 9)], 3)[0]
        (number,) = ask(engine, [prompt_of(length)], 3, n=width)
        tokens = run(engine)
        assert tokens[other, 0] == world.answer(prompt_of(2, 9), 3)
        for i in range(width):
            assert tokens[number, i] == world.answer(prompt_of(length), 3)


# Faults


def argmax(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


class Fault:
    """Does what `work` does, but raises in some of its calls."""

    def __init__(
        self, work: Callable[..., Any], error: BaseException, calls: Iterable[int], after: bool
    ) -> None:
        self.work = work
        self.error = error
        self.calls = set(calls)
        self.after = after
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count in self.calls and not self.after:
            raise self.error
        result = self.work(*args, **kwargs)
        if self.count in self.calls:
            raise self.error
        return result


def survive(engine: Engine, error: type[BaseException]) -> tuple[Tokens, int]:
    """Step until all is done, through exceptions of that kind; also how many there were."""
    tokens: Tokens = {}
    faults = 0
    for _ in range(1000):
        if not engine.has_work:
            break
        try:
            collect(engine, tokens)
        except error:
            faults += 1
            engine.check()
    assert not engine.has_work
    check_empty(engine)
    return tokens, faults


@pytest.mark.parametrize("when", [1, 2, 5])
@pytest.mark.parametrize("kind", ["sampler", "processor", "lazy", "shape", "nan", "id"])
def test_a_users_callable_fails_alone(world: World, when: int, kind: str) -> None:
    calls = 0

    def fails(*args: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        good = argmax(args[0]) if kind in ("sampler", "id") else args[-1]
        if calls != when:
            return good
        if kind == "shape":
            return good[:, :-1]
        if kind == "nan":
            return good * mx.nan
        if kind == "id":
            return good + VOCAB
        if kind == "lazy":
            return good + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)[0, 0]  # fails later
        raise RuntimeError("a mistake of the user")

    engine = world.engine(num_blocks=30)
    before = ask(engine, [prompt_of(9)], 8)
    params = SamplingParams(max_tokens=8)
    if kind in ("sampler", "id"):
        bad = engine.add(prompt_of(9), params, sampler=fails)
    else:
        bad = engine.add(prompt_of(9), params, logits_processors=[fails])
    after = ask(engine, [prompt_of(9), prompt_of(10, 3)], 8)
    tokens: Tokens = {}
    errors = []
    while engine.has_work:
        for output in engine.step():
            if output.token is None:
                errors.append(output)
            else:
                tokens.setdefault((output.request_id, output.index), []).append(output.token)
        engine.check()
    check_empty(engine)
    (error,) = errors
    assert (error.request_id, error.finish_reason) == (bad, "error")
    assert isinstance(error.error, Exception)
    assert tokens.get((bad, 0), []) == world.answer(prompt_of(9), 8)[: when - 1]
    for number in (before[0], after[0]):
        assert tokens[number, 0] == world.answer(prompt_of(9), 8)
    assert tokens[after[1], 0] == world.answer(prompt_of(10, 3), 8)


def test_one_sample_of_several_fails_alone(world: World) -> None:
    calls = 0

    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 5:  # the second sample's second token
            raise ValueError("a mistake of the user")
        return argmax(logprobs)

    engine = world.engine()
    number = engine.add(prompt_of(6), SamplingParams(max_tokens=4, n=3), sampler=sampler)
    lengths = dict.fromkeys(range(3), 0)
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == number
            lengths[output.index] += output.token is not None
        engine.check()
    check_empty(engine)
    assert lengths == {0: 4, 1: 1, 2: 4}


def test_ctrl_c_in_a_sampler_at_any_step(world: World) -> None:
    for when in range(1, 7):
        engine = world.engine(num_blocks=16)
        sampler = Fault(argmax, KeyboardInterrupt(), [when, when + 2], after=False)
        prompt = prompt_of(7)
        others = ask(engine, [prompt, prompt_of(5, 1)], 6)
        number = engine.add(prompt, SamplingParams(max_tokens=6), sampler=sampler)
        (many,) = ask(engine, [prompt], 6, n=3)
        tokens, faults = survive(engine, KeyboardInterrupt)
        assert faults == (1 if when == 6 else 2)
        for key in ((others[0], 0), (number, 0), (many, 0), (many, 1), (many, 2)):
            assert tokens[key] == world.answer(prompt, 6)
        assert tokens[others[1], 0] == world.answer(prompt_of(5, 1), 6)


@pytest.mark.parametrize("place", ["build", "copy_blocks", "open_blocks", "model", "prepare"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError()], ids=["runtime", "memory"])
def test_a_failure_anywhere_in_a_step(
    world: World, place: str, after: bool, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    for compile_steps in (False, True):
        engine = world.engine(num_blocks=22, max_batched_tokens=24, compile_steps=compile_steps)
        owner, name = {
            "build": (engine._builder, "build"),
            "copy_blocks": (engine.cache, "copy_blocks"),
            "open_blocks": (engine.cache, "open_blocks"),
            "model": (engine, "_runner"),
            "prepare": (engine_module, "prepare"),
        }[place]
        fault = Fault(getattr(owner, name), error, [1, 2, 4, 7, 8, 13], after)
        prompts = [prompt_of(9), prompt_of(9), [*prompt_of(9)[:7], 1], prompt_of(6, 2)]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            ids = ask(engine, prompts, 9)
            (many,) = ask(engine, [prompt_of(10, 3)], 9, n=3)
            tokens, faults = survive(engine, type(error))
        assert faults >= 3
        for number, prompt in zip(ids, prompts, strict=True):
            assert tokens[number, 0] == world.answer(prompt, 9)
        for i in range(3):
            assert tokens[many, i] == world.answer(prompt_of(10, 3), 9)


def test_a_failure_after_which_the_arrays_are_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine()
    prompts = [prompt_of(9), prompt_of(9), prompt_of(6, 2)]
    ids = ask(engine, prompts, 9)
    tokens: Tokens = {}
    for _ in range(3):
        collect(engine, tokens)
    evaluate = mx.eval
    with monkeypatch.context() as patch:
        # The step's own evaluation fails, and so does that of the arrays it has left behind.
        patch.setattr(mx, "eval", Fault(evaluate, RuntimeError("lost"), [1, 2, 3], after=False))
        with pytest.raises(RuntimeError, match="lost"):
            engine.step()
    engine.check()
    assert engine.stats.blocks_used == engine.stats.blocks_cached == 0
    assert not any(np.array(a).any() for a in engine.cache.keys)
    later, _ = survive(engine, ())  # type: ignore[arg-type]
    for number, prompt in zip(ids, prompts, strict=True):
        assert tokens[number, 0] + later[number, 0] == world.answer(prompt, 9)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("place", ["schedule", "commit", "copy_blocks", "take"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_signal_anywhere_in_a_step(
    world: World, place: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real Ctrl-C: it is held back where it would cut bookkeeping in half."""
    for when in (1, 2, 3, 5):
        engine = world.engine(num_blocks=22)
        prompts = [prompt_of(9), [*prompt_of(9)[:7], 1]]
        ask(engine, prompts[:1], 1)
        run(engine)
        ids = ask(engine, prompts, 6)
        (many,) = ask(engine, [prompt_of(10, 3)], 6, n=3)
        owner, name = {
            "schedule": (engine.scheduler, "schedule"),
            "commit": (engine.scheduler, "commit"),
            "copy_blocks": (engine.cache, "copy_blocks"),
            "take": (engine._requests[ids[0]], "take"),
        }[place]
        work, calls = getattr(owner, name), 0

        def interrupted(
            *args: Any, work: Any = work, when: int = when, engine: Engine = engine
        ) -> Any:
            nonlocal calls
            calls += 1
            result = work(*args)
            for _ in range(times if calls == when else 0):
                signal.raise_signal(signal.SIGINT)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            tokens, faults = survive(engine, KeyboardInterrupt)
        assert faults == 1
        for number, prompt in zip(ids, prompts, strict=True):
            assert tokens[number, 0] == world.answer(prompt, 6)
        for i in range(3):
            assert tokens[many, i] == world.answer(prompt_of(10, 3), 6)


def test_a_failing_tokenizer_ends_its_sample(world: World) -> None:
    class Broken:
        finished_by_stop = False

        def add(self, token: int) -> str:
            raise UnicodeError("not a token of mine")

    engine = world.engine()
    first, second = ask(engine, [prompt_of(9), prompt_of(9)], 5)
    engine._requests[first]._samples[0].stream = Broken()  # type: ignore[attr-defined]
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    check_empty(engine)
    errors = [o for o in outputs if o.error is not None]
    assert [(o.request_id, o.finish_reason) for o in errors] == [(first, "error")]
    assert [o.token for o in outputs if o.request_id == second] == world.answer(prompt_of(9), 5)


def test_a_failing_tokenizer_ends_its_beam_search(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine()

    def decode(tokens: list[int]) -> str:
        raise UnicodeError("not tokens of mine")

    monkeypatch.setattr(engine, "_decode", decode)
    bad = engine.add_beam_search(prompt_of(6), BeamParams(width=2, max_tokens=3))
    (good,) = ask(engine, [prompt_of(9)], 5)
    outputs = []
    for _ in range(100):
        if not engine.has_work:
            break
        outputs += engine.step()
        engine.check()
    check_empty(engine)
    assert not engine.has_work
    (error,) = (o for o in outputs if o.request_id == bad)
    assert error.finish_reason == "error"
    assert isinstance(error.error, UnicodeError)
    assert [o.token for o in outputs if o.request_id == good] == world.answer(prompt_of(9), 5)


def test_step_and_cancel_inside_a_step_are_refused(world: World) -> None:
    engine = world.engine()
    seen: list[str] = []

    def sampler(logprobs: mx.array) -> mx.array:
        for act in (engine.step, lambda: engine.cancel(0)):
            with pytest.raises(RuntimeError, match="while a step runs") as error:
                act()
            seen.append(str(error.value).split()[0])
        return argmax(logprobs)

    number = engine.add(prompt_of(5), SamplingParams(max_tokens=1), sampler=sampler)
    assert run(engine)[number, 0] == world.answer(prompt_of(5), 1)
    assert seen == ["step", "cancel"]


# Cancelling


def test_cancel_at_any_moment(world: World) -> None:
    prompt = prompt_of(9)
    for moment in range(9):
        for victim in range(4):
            engine = world.engine(num_blocks=18, max_batched_tokens=20)
            ids = ask(engine, [prompt, prompt], 5)
            ids += ask(engine, [prompt], 5, n=3)
            ids += ask(engine, [prompt_of(6, 1)], 5)
            tokens: Tokens = {}
            for _ in range(moment):
                collect(engine, tokens)
            done = len(tokens.get((ids[victim], 0), [])) == 5
            assert engine.cancel(ids[victim]) == (not done)
            assert not engine.cancel(ids[victim])
            engine.check()
            before = {key: len(value) for key, value in tokens.items()}
            while engine.has_work:
                collect(engine, tokens)
            check_empty(engine)
            for (number, index), got in tokens.items():
                want = world.answer(prompt_of(6, 1) if number == ids[3] else prompt, 5)
                cut = before.get((number, index)) if number == ids[victim] else 5
                assert got == want[:cut]


def test_cancel_of_everything_and_of_nothing(world: World) -> None:
    engine = world.engine()
    assert not engine.cancel(0)
    ids = ask(engine, [prompt_of(9)] * 3, 5, n=2)
    engine.step()
    assert all(engine.cancel(number) for number in ids)
    assert not engine.has_work
    check_empty(engine)


# Refusals


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ([], "prompt must have at least one token"),
        (np.array([], np.int32), "prompt must have at least one token"),
        ([0, VOCAB], f"prompt must have token ids from 0 to {VOCAB - 1}, got {VOCAB}"),
        ([-1], "prompt must have token ids"),
        ([1.0], "prompt must be text or integer token ids"),
        ([True], "prompt must be text or integer token ids"),
        ([[1, 2]], "prompt must be text or integer token ids"),
        (np.array([[1, 2]]), "prompt must be text or integer token ids"),
        (mx.array([1.5]), "prompt must be text or integer token ids"),
        (np.array(3), "prompt must be"),
        (7, "prompt must be"),
        (None, "prompt must be"),
        (b"abc", "prompt must be"),
        ("text", "prompt must be token ids, as the engine has no tokenizer"),
    ],
)
def test_prompts_that_are_refused(world: World, prompt: Any, match: str) -> None:
    engine = world.engine()
    with pytest.raises((ValueError, TypeError), match=match):
        engine.add(prompt, SamplingParams(max_tokens=1))
    check_untouched(engine)


def check_untouched(engine: Engine) -> None:
    assert not engine.has_work
    check_empty(engine)
    assert engine.stats.blocks_free == engine.stats.num_blocks
    assert engine.stats.steps == 0


@pytest.mark.parametrize("prompt", [np.arange(5), mx.arange(5), tuple(range(5)), range(5)])
def test_prompts_may_be_any_sequence(world: World, prompt: Any) -> None:
    engine = world.engine()
    number = engine.add(prompt, SamplingParams(max_tokens=2))
    assert run(engine)[number, 0] == world.answer(list(range(5)), 2)


def test_requests_that_can_never_fit_are_refused(world: World) -> None:
    engine = world.engine(num_blocks=5)
    ask(engine, [prompt_of(11)], 10)  # 20 slots
    run(engine)
    engine = world.engine(num_blocks=5)
    with pytest.raises(ValueError, match=r"prompt \(11 tokens\) plus max_tokens \(11\) need 6 "):
        ask(engine, [prompt_of(11)], 11)
    with pytest.raises(ValueError, match="max_tokens must be at most 4085 after a prompt of 11"):
        ask(world.engine(num_blocks=5000), [prompt_of(11)], 4086)
    with pytest.raises(ValueError, match="max_tokens must be at most -4"):
        ask(engine, [[1] * 4100], 1)
    check_untouched(engine)


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"n": 17}, r"n, best_of and width must be at most max_num_seqs \(16\), got 17"),
        ({"stop": ("x",)}, "stop strings need a tokenizer"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids must name token ids from 0 to"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias must name token ids from 0 to"),
        ({"logprobs": VOCAB + 1}, "logprobs must be at most"),
    ],
)
def test_params_that_do_not_fit_are_refused(
    world: World, params: dict[str, Any], match: str
) -> None:
    engine = world.engine()
    with pytest.raises(ValueError, match=match):
        engine.add(prompt_of(5), SamplingParams(max_tokens=2, **params))
    check_untouched(engine)
    # Nothing of it is left: the next request is the first one.
    assert ask(engine, [prompt_of(5)], 2) == [0]


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("block_size", 257, "block_size must be from 1 to 256, got 257"),
        ("block_size", 16.0, "block_size must be an integer"),
        ("block_size", True, "block_size must be an integer"),
        ("num_blocks", 0, "num_blocks must be at least 1"),
        ("num_blocks", -3, "num_blocks must be at least 1"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1"),
        ("max_batched_tokens", 15, r"max_batched_tokens must be at least max_num_seqs \(16\)"),
        ("memory_limit", float("inf"), "memory_limit must be an integer"),
        ("memory_limit", float("nan"), "memory_limit must be an integer"),
        ("memory_limit", -1, "memory_limit must be at least 1"),
        ("memory_limit", 100, r"memory_limit must be at least one block \(2048 bytes\), got 100"),
        ("backend", "cuda", "backend must be"),
    ],
)
def test_engine_options_that_are_refused(world: World, name: str, value: Any, match: str) -> None:
    options = {name: value} | ({"num_blocks": None} if name == "memory_limit" else {})
    with pytest.raises(TypeError if "integer" in match else ValueError, match=match):
        world.engine(**options)


@pytest.mark.parametrize("bytes_free", [10**9, 10**12])
def test_the_default_on_a_mac_is_a_share_of_what_it_recommends(
    world: World, bytes_free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": bytes_free})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10**8)
    made: dict[str, Any] = {}

    class Small(KVCache):
        def __init__(self, *, num_blocks: int, **geometry: Any) -> None:
            made["blocks"] = num_blocks
            super().__init__(num_blocks=10, **geometry)

    monkeypatch.setattr(engine_module, "KVCache", Small)
    Engine(world.model, block_size=256, max_num_seqs=512, backend="reference")
    window = world.model.config.max_position_embeddings // 256
    assert made["blocks"] == min(int(0.8 * (bytes_free - 10**8)) // (64 * 2048), 512 * window)


def test_a_pool_larger_than_the_machine_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"memory_limit must be at most .* got 10{17}"):
        Engine(world.model, memory_limit=10**17)
    with pytest.raises(ValueError, match=r"num_blocks must be at most .* got 10{9}"):
        Engine(world.model, num_blocks=10**9)


def test_two_limits_and_unknown_arguments_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="memory_limit or num_blocks, not both"):
        world.engine(memory_limit=10**6)
    with pytest.raises(TypeError, match="pages"):
        world.engine(pages=3)
    with pytest.raises(TypeError, match="temperature"):
        world.engine().add([1], temperature=1.0)  # type: ignore[call-arg]


# A long life


def test_10000_short_requests_leave_nothing_behind() -> None:
    model = random_model(config(heads=2, kv_heads=1, head_dim=8, layers=1, vocab=32))[0]
    engine = Engine(model, block_size=4, num_blocks=300, max_num_seqs=128, max_batched_tokens=512)
    rng = random.Random(7)
    sizes = []
    for done in range(10_000):
        prompt = [rng.randrange(32) for _ in range(rng.randint(1, 9))]
        engine.add(prompt, SamplingParams(max_tokens=rng.randint(1, 3), n=1 + (done % 50 == 0)))
        if done % 500 == 499:
            while engine.has_work:
                engine.step()
            check_empty(engine)
            gc.collect()
            sizes.append((mx.get_active_memory(), len(gc.get_objects())))
            pool = engine.pool
            assert len(pool._contents) == len(pool._cached) <= 300
            assert sum(map(len, pool._by_parent.values())) <= 300
            assert not engine._requests
    assert engine.stats.tokens_generated > 10_000
    assert engine.stats.evictions > 1_000
    half, end = sizes[9], sizes[-1]
    assert end[0] <= half[0] + 16_384  # less than one number a request
    assert end[1] <= half[1] + 2_000


# Threads


def test_a_model_serves_threads_that_did_not_make_it() -> None:
    """One after the other: streams belong to threads, and so do compiled graphs."""
    model, theirs = random_model(config(layers=1, vocab=64))
    expected = greedy(theirs, [1, 2, 3], 12)
    found: list[list[int]] = []

    def work() -> None:
        engine = Engine(model, num_blocks=20)
        engine.add([1, 2, 3], SamplingParams(max_tokens=12))
        tokens = []
        while engine.has_work:
            tokens += [output.token for output in engine.step()]
        found.append([token for token in tokens if token is not None])

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    work()
    assert found == [expected] * 4


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_size": None}, "block_size must be an integer"),
        ({"prefix_caching": "no"}, "prefix_caching must be True or False, got 'no'"),
        ({"token_reuse": None}, "token_reuse must be True or False"),
        ({"observer": 5}, "observer must be a function or None, got 5"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(
    world: World, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        Engine(world.model, num_blocks=20, **options)


@pytest.mark.parametrize("salt", [5, "\ud800"])
def test_a_salt_is_text(world: World, salt: Any) -> None:
    with pytest.raises(ValueError, match="cache_salt must be"):
        world.engine().add([1], cache_salt=salt)
