"""Beam search on shared blocks against a plain one with a contiguous cache for each beam."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen2 as theirs_qwen2
from mlx_lm.models.cache import KVCache as ContiguousCache

from mlx_paged.beam import BeamParams, beam_search
from mlx_paged.engine import Engine
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.request import Hypothesis, Output
from mlx_paged.sampling import SamplingParams
from tests import chat_model
from tests.models import config, contiguous_logits, new_caches, random_model

VOCAB = 48
MANY_STEPS = 20_000


# The reference


@dataclass
class Found:
    """What the reference returns.

    `margin` is the smallest gap between two numbers whose order decided something: below the
    rounding of float32 another order would be as right.
    """

    tokens: list[tuple[int, ...]]
    scores: list[float]
    margin: float


class Gap:
    """The smallest difference seen."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def between(self, a: float, b: float) -> None:
        if math.isfinite(a) and math.isfinite(b):
            self.smallest = min(self.smallest, abs(a - b))

    def order(self, values: np.ndarray, count: int) -> None:
        """Of the `count` largest, and the one after them."""
        ranked = np.sort(values, axis=None)[::-1][: count + 1]
        for a, b in pairwise(ranked):
            self.between(a, b)


def copy_caches(caches: list[ContiguousCache]) -> list[ContiguousCache]:
    """A deep copy."""
    copies = []
    for cache in caches:
        copy = ContiguousCache()
        copy.keys, copy.values, copy.offset = mx.array(cache.keys), mx.array(cache.values), 0
        copy.offset = cache.offset
        copies.append(copy)
    return copies


def log_softmax(logits: mx.array) -> np.ndarray:
    x = np.array(logits.astype(mx.float32)).astype(np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


def reference(model: theirs_qwen2.Model, prompt: list[int], params: BeamParams) -> Found:
    """Beam search with a whole cache per beam, on arrays of scores, in float64."""
    ends, width, gap = sorted(params.stop_token_ids), params.width, Gap()
    caches = [new_caches(model)]
    logprobs = [log_softmax(contiguous_logits(model, prompt, caches[0])[-1])]
    texts: list[tuple[int, ...]] = [()]
    running = np.zeros(1)
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, params.max_tokens + 1):
        table = np.stack(logprobs)
        if length <= params.min_tokens and ends:
            table[:, ends] = -np.inf
            table -= np.log(np.exp(table).sum(axis=1, keepdims=True))
        scores = running[:, None] + table
        is_over = np.zeros(scores.shape, bool)
        is_over[:, ends] = True
        if length == params.max_tokens:
            is_over[:] = True
        gap.order(scores, width)
        gap.order(np.where(is_over, -np.inf, scores), width)
        top = np.argsort(-scores, axis=None)[:width]
        for beam, token in zip(*np.unravel_index(top, scores.shape), strict=True):
            if is_over[beam, token]:
                score = scores[beam, token] / length**params.length_penalty
                finished.append((float(score), (*texts[beam], int(token))))
        finished.sort(key=lambda one: -one[0])
        gap.order(np.array([score for score, _ in finished]), width)
        del finished[width:]
        open_scores = np.where(is_over, -np.inf, scores)
        best = np.argsort(-open_scores, axis=None)[:width]
        rows, tokens = np.unravel_index(best, scores.shape)
        running = open_scores[rows, tokens]
        if length == params.max_tokens:
            break
        if len(finished) == width:
            if params.early_stopping is True:
                break
            grown = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                grown = params.max_tokens
            possible = running[0] / grown**params.length_penalty
            gap.between(possible, finished[-1][0])
            if possible <= finished[-1][0]:
                break
        caches = [copy_caches(caches[row]) for row in rows]
        texts = [(*texts[row], int(token)) for row, token in zip(rows, tokens, strict=True)]
        logprobs = [
            log_softmax(contiguous_logits(model, [text[-1]], cache)[-1])
            for text, cache in zip(texts, caches, strict=True)
        ]
    return Found([text for _, text in finished], [score for score, _ in finished], gap.smallest)


# A hundred prompts


@dataclass
class Case:
    prompt: list[int]
    params: BeamParams
    expected: Found


def make_models() -> tuple[Qwen2, theirs_qwen2.Model]:
    return random_model(config(heads=2, kv_heads=1, layers=2, vocab=VOCAB), seed=1)


@pytest.fixture(scope="module")
def models() -> tuple[Qwen2, theirs_qwen2.Model]:
    return make_models()


@pytest.fixture(scope="module")
def cases(models: tuple[Qwen2, theirs_qwen2.Model]) -> list[Case]:
    rng = np.random.default_rng(5)
    found = []
    system = rng.integers(0, VOCAB, 9).tolist()
    for i in range(100):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 24)).tolist()
        if i % 3 == 0:
            prompt = system + prompt
        max_tokens = int(rng.integers(1, 11))
        params = BeamParams(
            width=1 + i % 8,
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens)) if i % 4 == 0 else 0,
            length_penalty=float(rng.choice([-0.5, 0.0, 0.7, 1.0, 2.0])),
            early_stopping=[True, False, "never"][int(rng.integers(3))],  # type: ignore[arg-type]
            stop_token_ids=tuple(rng.choice(VOCAB, rng.integers(0, 17), replace=False).tolist()),
        )
        found.append(Case(prompt, params, reference(models[1], prompt, params)))
    return found


def run(engine: Engine) -> Iterator[Output]:
    for _ in range(MANY_STEPS):
        if not engine.has_work:
            return
        yield from engine.step()
        engine.check()
    raise AssertionError(f"not done after {MANY_STEPS} steps")


def by_sample(outputs: Iterable[Output]) -> dict[tuple[int, int], list[int | None]]:
    """Tokens of each sample."""
    tokens: dict[tuple[int, int], list[int | None]] = {}
    for output in outputs:
        tokens.setdefault((output.request_id, output.index), []).append(output.token)
    return tokens


def assert_equal(found: tuple[Hypothesis, ...], expected: Found) -> None:
    if expected.margin < 2e-5:  # a tie, up to rounding
        best = max(found, key=lambda one: one.score)
        assert best.score == pytest.approx(expected.scores[0], rel=1e-4)
        return
    assert [one.tokens for one in found] == expected.tokens
    assert [one.score for one in found] == pytest.approx(expected.scores, rel=1e-4)


def test_the_cases_try_what_they_should(cases: list[Case]) -> None:
    assert {case.params.width for case in cases} == set(range(1, 9))
    assert sum(case.expected.margin < 2e-5 for case in cases) <= 2
    short = [c for c in cases if any(len(t) < c.params.max_tokens for t in c.expected.tokens)]
    assert len(short) > 30  # ended by an end token
    early = [c for c in cases if all(len(t) < c.params.max_tokens for t in c.expected.tokens)]
    assert len(early) > 10  # the search was over before its limit


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_alone_it_equals_the_reference(
    models: tuple[Qwen2, Any], cases: list[Case], block_size: int
) -> None:
    engine = Engine(models[0], block_size=block_size, num_blocks=8 * 48 // block_size)
    for case in cases[:: 1 if block_size == 4 else 8]:
        request_id = engine.add_beam_search(case.prompt, case.params)
        (output,) = run(engine)
        assert (output.request_id, output.index, output.token) == (request_id, 0, None)
        assert output.hypotheses is not None
        assert output.finish_reason == output.hypotheses[0].finish_reason
        assert_equal(output.hypotheses, case.expected)
        assert engine.stats.blocks_used == 0
    assert (engine.stats.block_copies > 0) == (block_size > 1)
    assert engine.stats.preemptions == 0


@pytest.mark.parametrize(("prefix_caching", "token_reuse"), [(True, True), (False, False)])
def test_in_company_and_preempted_it_equals_the_reference(
    models: tuple[Qwen2, Any], cases: list[Case], prefix_caching: bool, token_reuse: bool
) -> None:
    """All at once in a pool that barely holds the largest of them, with samples in between."""
    engine = Engine(
        models[0],
        block_size=3,
        num_blocks=8 * 14,
        max_batched_tokens=80,
        max_num_seqs=80,
        prefix_caching=prefix_caching,
        token_reuse=token_reuse,
    )
    other = SamplingParams(n=3, temperature=1.0, max_tokens=30, seed=3)
    alone = Engine(models[0], num_blocks=64)
    alone.add([1, 2, 3], other)
    expected = by_sample(run(alone))
    wanted: dict[int, Case] = {}
    others = []
    for i, case in enumerate(cases):
        wanted[engine.add_beam_search(case.prompt, case.params)] = case
        if i % 10 == 0:
            others.append(engine.add([1, 2, 3], other))
    outputs = list(run(engine))
    for output in outputs:
        if output.request_id in wanted:
            assert output.hypotheses is not None
            assert_equal(output.hypotheses, wanted.pop(output.request_id).expected)
    assert not wanted
    samples = by_sample(output for output in outputs if output.request_id in others)
    assert samples == {(i, index): expected[0, index] for i in others for index in range(3)}
    assert engine.stats.preemptions > 20
    assert engine.stats.blocks_used == 0


# What beams share, and what becomes of their blocks


def test_beams_store_what_they_have_in_common_once(models: tuple[Qwen2, Any]) -> None:
    prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    engine = Engine(models[0], block_size=4, num_blocks=200, prefix_caching=False)
    engine.add_beam_search(prompt, BeamParams(width=6, max_tokens=12))
    while engine.has_work:
        engine.step()
        tables = engine.block_tables().values()
        assert all(table[:10] == next(iter(tables))[:10] for table in tables)
        used = {block for table in tables for block in table}
        # The prompt's ten once; a beam differs from others in its last blocks at most.
        assert engine.stats.blocks_used == len(used) <= 10 + 6 * 3
    assert engine.stats.tokens_computed == 40 + 11 * 6
    assert engine.stats.blocks_used == 0


def test_enough_beams_find_the_most_likely_of_all(models: tuple[Qwen2, Any]) -> None:
    prompt, width = [5, 6, 7], VOCAB
    first = log_softmax(contiguous_logits(models[1], prompt, new_caches(models[1]))[-1])
    second = [
        log_softmax(contiguous_logits(models[1], [*prompt, token], new_caches(models[1]))[-1])
        for token in range(VOCAB)
    ]
    scores = {(a, b): (first[a] + second[a][b]) / 2 for a, b in product(range(VOCAB), repeat=2)}
    best = sorted(scores, key=lambda pair: -scores[pair])[:width]
    found = search(small(models[0]), prompt, width, max_tokens=2)
    assert [one.tokens for one in found[:8]] == best[:8]
    assert [one.score for one in found] == pytest.approx([scores[t] for t in best], rel=1e-5)


def search(engine: Engine, prompt: list[int], width: int, **params: Any) -> tuple[Hypothesis, ...]:
    """One beam search, alone."""
    engine.add_beam_search(prompt, BeamParams(width=width, **params))
    (output,) = run(engine)
    if output.error is not None:
        raise output.error
    assert output.hypotheses is not None
    return output.hypotheses


def small(model: Qwen2, **options: Any) -> Engine:
    return Engine(model, **({"block_size": 4, "num_blocks": 400} | options))


def test_one_beam_that_cannot_end_is_greedy(models: tuple[Qwen2, Any]) -> None:
    engine = small(models[0])
    (found,) = search(engine, [9, 8, 7], 1, max_tokens=12)
    engine.add([9, 8, 7], SamplingParams(max_tokens=12))
    assert list(found.tokens) == [output.token for output in run(engine)]


def test_a_length_penalty_prefers_long_or_short(models: tuple[Qwen2, Any]) -> None:
    def lengths(penalty: float) -> list[int]:
        found = search(
            small(models[0]),
            [3, 1, 4],
            4,
            max_tokens=12,
            length_penalty=penalty,
            early_stopping="never",
            stop_token_ids=tuple(range(0, VOCAB, 6)),
        )
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
        for one in found:
            assert one.score == pytest.approx(one.logprob / len(one.tokens) ** penalty)
            assert (one.finish_reason == "stop") == (one.tokens[-1] % 6 == 0)
        return [len(one.tokens) for one in found]

    assert sum(lengths(3.0)) > sum(lengths(0.0))


# Ends of other kinds


def test_cancelled_in_any_step_it_leaves_nothing(models: tuple[Qwen2, Any]) -> None:
    for steps in range(8):
        engine = small(models[0], max_batched_tokens=8, max_num_seqs=8)
        request_id = engine.add_beam_search([1] * 20, BeamParams(width=5, max_tokens=8))
        for _ in range(steps):
            engine.step()
        assert engine.cancel(request_id)
        engine.check()
        assert engine.stats.blocks_used == 0
        assert not engine.has_work


class Faulty(Qwen2):
    """A model that fails, or gives no numbers, in chosen steps."""

    calls = 0
    fail: Set[int] = frozenset()
    nan: Set[int] = frozenset()

    def __call__(self, batch: Any, cache: Any) -> mx.array:
        self.calls += 1
        if self.calls in self.fail:
            raise OSError("a broken step")
        logits = super().__call__(batch, cache)
        return logits * mx.nan if self.calls in self.nan else logits


def faulty_model() -> Faulty:
    """With the weights of `models`."""
    model: Any = make_models()[0]
    model.__class__ = Faulty
    return model  # type: ignore[no-any-return]


def test_failed_steps_are_done_again(cases: list[Case]) -> None:
    model = faulty_model()
    model.fail = {1, 3, 4, 7, 11}
    engine = small(model, compile_steps=False)
    wanted = {engine.add_beam_search(c.prompt, c.params): c for c in cases[:12]}
    failures = 0
    while engine.has_work:
        try:
            outputs = engine.step()
        except OSError:
            failures += 1
            outputs = []
        engine.check()
        for output in outputs:
            assert output.hypotheses is not None
            assert_equal(output.hypotheses, wanted.pop(output.request_id).expected)
    assert failures == 5
    assert not wanted


def test_logits_that_are_no_numbers_end_the_search() -> None:
    model = faulty_model()
    model.nan = {4}
    engine = small(model, compile_steps=False)
    with pytest.raises(RuntimeError, match="not finite"):
        search(engine, [1, 2, 3], 3)
    engine.check()
    assert engine.stats.blocks_used == 0
    assert len(search(engine, [1, 2, 3], 3, max_tokens=3)) == 3


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"width": 0}, ValueError, "width must be at least 1, got 0"),
        ({"width": 2.0}, TypeError, "width must be an integer, got 2.0"),
        ({"width": True}, TypeError, "width"),
        ({"length_penalty": "1"}, TypeError, "length_penalty must be a number"),
        ({"length_penalty": 17}, ValueError, "length_penalty must be from -16 to 16"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty must be finite, got nan"),
        ({"length_penalty": 10**400}, ValueError, "length_penalty must be finite"),
        ({"early_stopping": "always"}, ValueError, "early_stopping must be True, False or 'never'"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1"),
        ({"min_tokens": 9, "max_tokens": 8}, ValueError, "min_tokens must be at most"),
        ({"stop_token_ids": (-1,)}, ValueError, "stop_token_ids"),
    ],
)
def test_bad_params_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        BeamParams(**options)


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {
        "width": np.int64(3),
        "length_penalty": np.float32(0.5),
        "max_tokens": np.uint8(9),
    }
    assert BeamParams(**given) == BeamParams(width=3, length_penalty=0.5, max_tokens=9)


def test_what_can_never_run_is_refused(models: tuple[Qwen2, Any]) -> None:
    engine = Engine(models[0], block_size=4, num_blocks=204, max_num_seqs=16)
    with pytest.raises(ValueError, match="width must be at most 44, the vocabulary less"):
        engine.add_beam_search([1], BeamParams(width=45, stop_token_ids=(1, 2, 3, 4)))
    with pytest.raises(ValueError, match="at most max_num_seqs"):
        engine.add_beam_search([1], BeamParams(width=17, max_tokens=4))
    with pytest.raises(ValueError, match="stop_token_ids must name token ids from 0 to 47"):
        engine.add_beam_search([1], BeamParams(stop_token_ids=(48,)))
    # 8 beams of 101 tokens are 8 * 26 blocks.
    with pytest.raises(ValueError, match=r"times 8 beams need 208 blocks of 4, but .* 202"):
        engine.add_beam_search([1] * 2, BeamParams(width=8, max_tokens=100))
    with pytest.raises(ValueError, match="window"):
        engine.add_beam_search([1], BeamParams(width=1, max_tokens=4096))
    assert not engine.has_work
    engine.add_beam_search([1], BeamParams(width=8, max_tokens=100))
    assert sum(output.hypotheses is not None for output in run(engine)) == 1


# The function


def test_text_ids_and_chat_find_the_same() -> None:
    model, tokenizer = chat_model.ours()
    ends = tokenizer.encode("eo")
    options: dict[str, Any] = {"max_tokens": 12, "stop_token_ids": ends, "num_blocks": 200}
    messages = [{"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found = beam_search(model, tokenizer, text, 3, **options)
    assert len(found) == 3
    for one in found:
        assert one.text == tokenizer.decode([t for t in one.tokens if t not in ends])
        assert (one.finish_reason == "stop") == (one.tokens[-1] in ends)
    for prompt in (messages, tokenizer.encode(text)):
        again = beam_search(model, tokenizer, prompt, 3, **options)
        assert [one.tokens for one in again] == [one.tokens for one in found]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lenght_penalty": 1.0}, TypeError, "lenght_penalty"),
        ({"temperature": 1.0}, TypeError, "takes no temperature"),
        ({"sampler": max}, TypeError, "takes no sampler"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"num_blocks": 20, "width": 8, "max_tokens": 100}, ValueError, "times 8 beams"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        beam_search(*chat_model.ours(), "Hello!", **options)
