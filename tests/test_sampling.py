"""Sampling: options, distributions, independence of the batch, and errors row by row."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_logits_processors,
    make_sampler,
)

from mlx_paged import sampling
from mlx_paged.sampling import SampleRow, SamplingParams, draw_key, fresh_seed, prepare, sample

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def make_row(
    seed: int = 0, tokens: list[int] | None = None, prompt_len: int = 5, **options: Any
) -> SampleRow:
    extras = {
        name: options.pop(name)
        for name in ("sampler", "logits_processors", "want_full_logprobs", "eos_token_ids")
        if name in options
    }
    return SampleRow(
        params=SamplingParams(**options),
        seed=seed,
        tokens=PROMPT if tokens is None else tokens,
        prompt_len=prompt_len,
        **extras,
    )


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> mx.array:
    values = np.random.default_rng(seed).normal(0, scale, (rows, vocab))
    return mx.array(values.astype(np.float32))


def log_softmax(logits: mx.array) -> np.ndarray:
    x = np.array(logits.astype(mx.float32)).astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# Options


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_tokens", 0, ValueError),
        ("max_tokens", True, TypeError),
        ("max_tokens", 1.0, TypeError),
        ("max_tokens", None, TypeError),
        ("min_tokens", -1, ValueError),
        ("min_tokens", 257, ValueError),
        ("min_tokens", "1", TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", math.nan, ValueError),
        ("temperature", math.inf, ValueError),
        ("temperature", "hot", TypeError),
        ("temperature", True, TypeError),
        ("top_p", -0.1, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_p", math.nan, ValueError),
        ("top_p", None, TypeError),
        ("top_k", -1, ValueError),
        ("top_k", 2.5, TypeError),
        ("min_p", 1.5, ValueError),
        ("min_p", -1e-9, ValueError),
        ("repetition_penalty", -1.0, ValueError),
        ("repetition_penalty", math.inf, ValueError),
        ("repetition_context_size", 0, ValueError),
        ("repetition_context_size", None, TypeError),
        ("presence_penalty", math.nan, ValueError),
        ("presence_penalty", "a", TypeError),
        ("presence_context_size", -5, ValueError),
        ("frequency_penalty", math.inf, ValueError),
        ("frequency_context_size", 1.5, TypeError),
        ("logit_bias", [1, 2], TypeError),
        ("logit_bias", {"1": 2.0}, TypeError),
        ("logit_bias", {-1: 2.0}, ValueError),
        ("logit_bias", {1: math.nan}, ValueError),
        ("logit_bias", {1: math.inf}, ValueError),
        ("logit_bias", {1: "much"}, TypeError),
        ("stop_token_ids", 5, TypeError),
        ("stop_token_ids", "5", TypeError),
        ("stop_token_ids", (-1,), ValueError),
        ("stop_token_ids", (True,), TypeError),
        ("stop", 5, TypeError),
        ("stop", "", ValueError),
        ("stop", ("a", ""), ValueError),
        ("stop", ("a", 1), TypeError),
        ("ignore_eos", 1, TypeError),
        ("logprobs", -1, ValueError),
        ("logprobs", True, TypeError),
        ("seed", -1, ValueError),
        ("seed", 2**63, ValueError),
        ("seed", 0.5, TypeError),
        ("n", 0, ValueError),
        ("n", 1.0, TypeError),
        ("best_of", 0, ValueError),
        ("best_of", False, TypeError),
    ],
)
def test_each_bad_option_is_refused_by_name(name: str, value: Any, error: type) -> None:
    with pytest.raises(error) as refused:
        SamplingParams(**{name: value})
    message = str(refused.value)
    assert name in message
    assert "must" in message


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(ValueError, match=r"best_of must be at least n \(3\), got 2"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=3).num_samples == 3
    assert SamplingParams(n=2).num_samples == 2


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_options_are_normalised() -> None:
    params = SamplingParams(
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        temperature=1,
        stop="end",  # type: ignore[arg-type]
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
        logit_bias={np.int32(3): 1, 4: -math.inf},  # type: ignore[dict-item]
    )
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {3: 1.0, 4: -math.inf}
    assert isinstance(hash(params), int)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias must name token ids from 0 to 9, got 10"),
        ({"stop_token_ids": (3, 12)}, "stop_token_ids must name token ids from 0 to 9, got 12"),
        ({"logprobs": 11}, "logprobs must be at most the vocabulary's 10, got 11"),
    ],
)
def test_options_are_checked_against_the_vocabulary(options: dict, message: str) -> None:
    params = SamplingParams(**options)
    params.check(13)
    with pytest.raises(ValueError, match=message):
        params.check(10)


# Randomness


def test_keys_are_distinct_and_fixed() -> None:
    keys = {draw_key(seed, index) for seed in range(200) for index in range(200)}
    assert len(keys) == 200 * 200
    words = np.array(sorted(keys), dtype=np.uint64)
    bits = (words[:, :, None] >> np.arange(32, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / math.sqrt(len(keys))
    # SplitMix64's published first output for the state 0 is 0xE220A8397B1DCDAF.
    assert sampling._mix64(0) == 0xE220A8397B1DCDAF
    assert draw_key(2**64, 3) == draw_key(0, 3)


def test_fresh_seeds_are_valid_seeds() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)


def test_noise_of_a_row_is_its_own_whatever_the_batch() -> None:
    rows = [make_row(seed=seed) for seed in range(9)]
    together = np.array(sampling._uniform(rows, 1003))
    assert together.min() > 0
    assert together.max() < 1
    for i, row in enumerate(rows):
        key = mx.array(np.array(draw_key(row.seed, row.num_generated), dtype=np.uint32))
        alone = np.array(mx.random.uniform(shape=(1003,), key=key))
        assert np.array_equal(together[i], alone)
        assert np.array_equal(together[i : i + 1], np.array(sampling._uniform([row], 1003)))


def chi_square(tokens: list[int], probabilities: np.ndarray) -> float:
    """The statistic less its mean, in its standard deviations, over the possible tokens."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * len(tokens)
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    return float((statistic - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 6, "top_p": 0.9, "min_p": 0.02}],
)
@pytest.mark.parametrize("along", ["seeds", "indices"])
def test_draws_follow_the_distribution(options: dict, along: str) -> None:
    draws, temperature = 4000, 1.5
    logits = random_logits(1, 12, seed=5, scale=1.5)
    if along == "seeds":
        rows = [make_row(seed, temperature=temperature, **options) for seed in range(draws)]
    else:
        tokens = [0] * draws
        rows = [
            make_row(11, tokens[: 5 + i % 40], temperature=temperature, **options)
            for i in range(40)
        ]
        rows = [
            make_row(11 + j, row.tokens, temperature=temperature, **options)  # type: ignore[arg-type]
            for j in range(draws // 40)
            for row in rows
        ]
    tokens = sample(mx.broadcast_to(logits, (draws, 12)), rows).tokens

    logprobs = mx.array(log_softmax(logits).astype(np.float32))
    if "top_p" in options:
        logprobs = apply_top_p(logprobs, options["top_p"])
    if "min_p" in options:
        logprobs = apply_min_p(logprobs, options["min_p"])
    if "top_k" in options:
        logprobs = apply_top_k(logprobs, options["top_k"])
    right = np.exp(log_softmax(logprobs / temperature))[0]
    assert abs(chi_square(tokens, right)) < 4
    wrong = np.exp(log_softmax(logprobs / 1.1))[0]
    assert chi_square(tokens, wrong) > 6


def test_tiny_temperature_is_greedy() -> None:
    logits = random_logits(6, 50)
    rows = [
        make_row(i, temperature=t) for i, t in enumerate([1e-3, 1e-10, 1e-38, 1e-45, 1e-300, 0])
    ]
    assert sample(logits, rows).tokens == mx.argmax(logits, axis=-1).tolist()


def test_large_temperature_keeps_to_the_filter() -> None:
    logits = random_logits(200, 64, seed=8)
    rows = [make_row(i, temperature=1e6, top_k=3) for i in range(200)]
    best = np.argsort(-np.array(logits), axis=-1)[:, :3]
    tokens = sample(logits, rows).tokens
    assert all(token in best[i] for i, token in enumerate(tokens))
    assert len({int(np.where(best[i] == token)[0][0]) for i, token in enumerate(tokens)}) == 3


# The batch changes nothing

MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.5, "logprobs": 3},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {1: 5.0, 2: -math.inf}, "frequency_penalty": 0.2},
    {"temperature": 2.0, "min_tokens": 100, "stop_token_ids": range(60), "eos_token_ids": (66,)},
    {"logits_processors": [lambda tokens, logits: logits + (mx.arange(67) == len(tokens)) * 9.0]},
    {"temperature": 1.0, "logits_processors": make_logits_processors({5: 2.0}, 1.2)},
    {"sampler": lambda logprobs: mx.argmin(logprobs, axis=-1)},
    {"temperature": 1.0, "want_full_logprobs": True},
]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_company(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(range(len(MIXED))), min_size=1, max_size=12))
    order = data.draw(st.permutations(range(len(kinds))))
    base = data.draw(st.integers(0, 2**62))
    logits = random_logits(len(kinds), 67, seed=base % 1000)
    rows = [make_row(base + i, PROMPT[: 6 + i % 4], **MIXED[kind]) for i, kind in enumerate(kinds)]
    together = sample(logits, rows)
    assert not together.errors
    permuted = sample(logits[mx.array(order)], [rows[i] for i in order])
    for place, i in enumerate(order):
        alone = sample(logits[i : i + 1], [rows[i]])
        for other, at in ((alone, 0), (permuted, place)):
            assert other.tokens[at] == together.tokens[i]
            assert other.logprobs[at] == together.logprobs[i]
            assert other.top[at] == together.top[i]


def test_noise_belongs_to_token_ids() -> None:
    rows = 200
    logits = random_logits(rows, 50, scale=1.0)
    least = np.argmin(np.array(logits), axis=-1)
    free = sample(logits, [make_row(i, temperature=1.0) for i in range(rows)]).tokens
    cut = sample(logits, [make_row(i, temperature=1.0, top_k=49) for i in range(rows)]).tokens
    same = [a == b for a, b, dropped in zip(free, cut, least, strict=True) if a != dropped]
    assert all(same)
    assert len(same) > rows * 0.9


def test_samples_are_runs_with_the_seeds_in_turn() -> None:
    logits = random_logits(1, 300, scale=1.0)
    four = sample(
        mx.broadcast_to(logits, (4, 300)), [make_row(40 + i, temperature=1.0) for i in range(4)]
    )
    apart = [sample(logits, [make_row(40 + i, temperature=1.0)]).tokens[0] for i in range(4)]
    assert four.tokens == apart
    assert len(set(apart)) > 1


def test_global_random_state_is_neither_read_nor_changed() -> None:
    logits, row = random_logits(1, 300, scale=1.0), make_row(7, temperature=1.0)
    mx.random.seed(1)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(1)
    first = sample(logits, [row]).tokens
    assert mx.random.uniform(shape=(3,)).tolist() == expected
    assert sample(logits, [row]).tokens == first


def test_the_next_token_has_another_draw() -> None:
    logits, tokens = random_logits(1, 300, scale=0.1), list(PROMPT)
    row = make_row(7, tokens, temperature=1.0)
    drawn = []
    for _ in range(20):
        drawn.append(sample(logits, [row]).tokens[0])
        tokens.append(drawn[-1])  # the row reads the same list
    assert len(set(drawn)) > 15
    assert row.num_generated == len(PROMPT) - 5 + 20


# The same as mlx-lm


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 9, 499, 500, 1000])
def test_filters_keep_what_mlx_lm_keeps(top_p: float, min_p: float, top_k: int) -> None:
    logprobs = mx.array(log_softmax(random_logits(4, 500, seed=2)).astype(np.float32))
    rows = [make_row(temperature=1.0, top_p=top_p, min_p=min_p, top_k=top_k) for _ in range(4)]
    kept, ids = sampling._filter(logprobs, rows)
    ours = np.full((4, 500), -np.inf, dtype=np.float32)
    where = np.broadcast_to(np.arange(500), (4, 500)) if ids is None else np.array(ids)
    np.put_along_axis(ours, where, np.array(kept), axis=-1)

    theirs = logprobs
    if 0 < top_p < 1:
        theirs = apply_top_p(theirs, top_p)
    if min_p:
        theirs = apply_min_p(theirs, min_p)
    if 0 < top_k < 500:  # mlx-lm refuses the vocabulary's size and more
        theirs = apply_top_k(theirs, top_k)
    assert np.array_equal(ours, np.array(theirs))


def test_equal_logits_at_the_line() -> None:
    logprobs = mx.array(log_softmax(mx.zeros((1, 8))).astype(np.float32))
    for options, count in (({"top_k": 3}, 3), ({"top_p": 0.4}, 8), ({"min_p": 1.0}, 8)):
        kept, _ = sampling._filter(logprobs, [make_row(temperature=1.0, **options)])  # type: ignore[arg-type]
        assert np.isfinite(np.array(kept)).sum() == count


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "repetition_context_size": 3},
    {"repetition_penalty": 1.0},
    {"repetition_penalty": 0.0},
    {"presence_penalty": 0.8},
    {"presence_penalty": -0.8, "presence_context_size": 4},
    {"frequency_penalty": 0.6, "frequency_context_size": 7},
    {"frequency_penalty": -0.6},
    {"logit_bias": {0: 4.0, 3: -2.5, 39: 1.0}},
    {"logit_bias": {3: -math.inf, 5: 0.0}},
    {
        "repetition_penalty": 1.5,
        "repetition_context_size": 2,
        "presence_penalty": 0.3,
        "presence_context_size": 6,
        "frequency_penalty": 0.9,
        "frequency_context_size": 100,
        "logit_bias": {5: 3.0, 3: -1.0, 1: 0.5},
    },
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_and_bias_change_logits_as_mlx_lm_does(temperature: float) -> None:
    logits = random_logits(len(PENALTIES), 40, seed=3)
    before = np.array(logits)
    rows = [
        make_row(i, PROMPT * (1 + i % 3), temperature=temperature, want_full_logprobs=True, **opts)
        for i, opts in enumerate(PENALTIES)
    ]
    sampled = sample(logits, rows)
    assert np.array_equal(np.array(logits), before)
    for i, (row, options) in enumerate(zip(rows, PENALTIES, strict=True)):
        expected = logits[i : i + 1] * 1.0
        for processor in make_logits_processors(**options):
            expected = processor(mx.array(list(row.tokens)), expected)
        full = sampled.full[i]
        assert full is not None
        np.testing.assert_allclose(np.array(full), log_softmax(expected)[0], rtol=1e-5, atol=2e-6)
        if temperature == 0:
            assert sampled.tokens[i] == mx.argmax(expected).item()


def test_plain_penalised_rows_share_the_operations() -> None:
    logits = random_logits(3, 40, seed=4)
    rows = [make_row(tokens=PROMPT[:n], repetition_penalty=p) for n, p in ((5, 9), (7, 2), (10, 5))]
    expected = []
    for i, row in enumerate(rows):
        x = logits[i : i + 1] * 1.0
        penalty = row.params.repetition_penalty
        for processor in make_logits_processors(repetition_penalty=penalty):
            x = processor(mx.array(list(row.tokens)), x)
        expected.append(mx.argmax(x).item())
    assert sample(logits, rows).tokens == expected
    assert len(prepare(logits, rows)._groups) == 1


def test_mlx_lm_callables_are_called_as_mlx_lm_calls_them() -> None:
    logits = random_logits(2, 40, seed=6)
    seen: list[Any] = []

    def processor(tokens: mx.array, row_logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), row_logits.shape))
        return row_logits

    def sampler(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return make_sampler(temp=0.8, top_k=1)(logprobs)

    rows = [
        make_row(),
        make_row(
            sampler=sampler, logits_processors=[processor, *make_logits_processors({7: 50.0})]
        ),
    ]
    sampled = sample(logits, rows)
    assert sampled.tokens == [mx.argmax(logits[0]).item(), 7]
    assert seen[0] == (PROMPT, (1, 40))
    assert seen[1].shape == (1, 40)
    assert mx.logsumexp(seen[1]).item() == pytest.approx(0, abs=1e-5)


# Log-probabilities


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_equal_numpy_in_float64(dtype: mx.Dtype, temperature: float) -> None:
    logits = random_logits(5, 200, seed=9).astype(dtype)
    wanted = [None, 0, 1, 5, 200]
    rows = [
        make_row(
            i, temperature=temperature, top_k=2, logprobs=k, want_full_logprobs=k == 5, best_of=b
        )
        for i, (k, b) in enumerate(zip(wanted, [None, None, None, None, 2], strict=True))
    ]
    sampled = sample(logits, rows)
    exact = log_softmax(logits)
    assert sampled.logprobs[0] is None
    assert sampled.top[:2] == [None, None]
    for i, k in enumerate(wanted[1:], start=1):
        assert sampled.logprobs[i] == pytest.approx(exact[i, sampled.tokens[i]], abs=1e-5)
        if k:
            top = sampled.top[i]
            assert top is not None
            values = [value for _, value in top]
            assert len({token for token, _ in top}) == k
            assert values == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(exact[i])[::-1][:k], atol=1e-5)
            np.testing.assert_allclose(values, [exact[i, token] for token, _ in top], atol=1e-5)
    assert [full is not None for full in sampled.full] == [False, False, False, True, False]
    assert sampled.full[3] is not None
    assert sampled.full[3].shape == (200,)
    np.testing.assert_allclose(np.array(sampled.full[3]), exact[3], atol=1e-5)


def test_best_of_reports_the_chosen_logprob() -> None:
    sampled = sample(random_logits(1, 20), [make_row(best_of=2)])
    assert sampled.logprobs[0] is not None
    assert sampled.top == [None]


# Where a sequence may not end yet


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_wait_for_min_tokens(temperature: float) -> None:
    logits = mx.array([[0.0, 30.0, 20.0, 10.0]])
    tokens = [0, 0, 0]
    options: dict[str, Any] = {"temperature": temperature, "stop_token_ids": (2,)}
    row = make_row(1, tokens, 3, min_tokens=2, eos_token_ids={1}, **options)
    going_on = make_row(1, tokens, 3, min_tokens=2, eos_token_ids={1}, ignore_eos=True, **options)
    chosen = []
    for _ in range(3):
        chosen.append(sample(mx.concatenate([logits, logits]), [row, going_on]).tokens)
        tokens.append(0)
    assert chosen == [[3, 1], [3, 1], [1, 1]]


def test_processors_cannot_allow_an_early_end() -> None:
    row = make_row(
        prompt_len=len(PROMPT),
        min_tokens=1,
        eos_token_ids=(2,),
        logits_processors=[lambda _, logits: logits + 100.0 * (mx.arange(8) == 2)],
    )
    assert sample(random_logits(1, 8), [row]).tokens != [2]


# Errors stay with their rows


def fail(*_: mx.array) -> mx.array:
    raise LookupError("out of ideas")


def interrupt(*_: mx.array) -> mx.array:
    raise KeyboardInterrupt


def lazily_fail(_: mx.array, logits: mx.array) -> mx.array:
    singular = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    return logits + singular[0, 0]


def returning(value: Any) -> Any:
    return lambda *_: value


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(
    ("extras", "error", "message"),
    [
        ({"sampler": fail}, LookupError, "out of ideas"),
        ({"logits_processors": [fail]}, LookupError, "out of ideas"),
        ({"logits_processors": [lazily_fail]}, RuntimeError, "Inverse"),
        ({"logits_processors": [returning(None)]}, ValueError, r"\[1, 30\], got None"),
        ({"logits_processors": [returning(mx.zeros((30,)))]}, ValueError, r"got \[30\]"),
        ({"sampler": returning(mx.array([30]))}, ValueError, "from 0 to 29, got 30"),
        ({"sampler": returning(mx.array([-1]))}, ValueError, "from 0 to 29, got -1"),
        ({"sampler": returning(mx.array([2**32 - 1], dtype=mx.uint32))}, ValueError, "4294967295"),
        ({"sampler": returning(mx.array([1.0]))}, ValueError, "one integer"),
        ({"sampler": returning(mx.array([1, 2]))}, ValueError, "one integer"),
        ({"logit_bias": dict.fromkeys(range(30), -math.inf)}, RuntimeError, "forbid every token"),
        (
            {"logit_bias": dict.fromkeys(range(30), -math.inf), "temperature": 1.0},
            RuntimeError,
            "no token can be chosen",
        ),
    ],
)
def test_an_error_is_its_rows_alone(
    extras: dict, error: type, message: str, launched: bool
) -> None:
    logits = random_logits(3, 30, seed=1)
    rows = [make_row(1, temperature=1.0), make_row(**extras), make_row(2)]
    pending = prepare(logits, rows)
    if launched:
        pending.launch()
    sampled = pending.collect()
    assert list(sampled.errors) == [1]
    with pytest.raises(error, match=message):
        raise sampled.errors[1]
    assert sampled.tokens[1] == -1
    for i in (0, 2):
        assert sampled.tokens[i] == sample(logits[i : i + 1], [rows[i]]).tokens[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4, "top_p": 0.9}, {"logprobs": 2}],
)
def test_a_row_without_a_finite_logit_is_an_error(bad: float, options: dict) -> None:
    good = random_logits(1, 30)
    logits = mx.concatenate([good, mx.full((1, 30), bad), good])
    sampled = sample(logits, [make_row(**options) for _ in range(3)])
    assert list(sampled.errors) == [1]
    assert isinstance(sampled.errors[1], RuntimeError)
    assert sampled.tokens[0] == sampled.tokens[2] >= 0
    assert sampled.tokens[1] == -1


def test_one_nan_spoils_a_drawn_row() -> None:
    logits = random_logits(1, 30) + mx.where(mx.arange(30) == 4, math.nan, 0.0)
    assert list(sample(logits, [make_row(temperature=1.0)]).errors) == [0]


@pytest.mark.parametrize("extras", [{"sampler": interrupt}, {"logits_processors": [interrupt]}])
def test_an_interrupt_is_not_a_rows_error(extras: dict) -> None:
    with pytest.raises(KeyboardInterrupt):
        sample(random_logits(2, 30), [make_row(), make_row(**extras)])


def test_failing_logits_are_the_steps_error() -> None:
    singular = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    with pytest.raises(RuntimeError):
        sample(singular, [make_row() for _ in range(2)])


def test_failing_logits_are_not_blamed_on_a_rows_callable() -> None:
    singular = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    with pytest.raises(RuntimeError):
        sample(singular[:1], [make_row(logits_processors=make_logits_processors({1: 1.0}))])


def test_logits_must_match_the_rows() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[2, vocab\], got \[3, 30\]"):
        prepare(random_logits(3, 30), [make_row(), make_row()])


def test_launch_then_collect() -> None:
    logits = random_logits(4, 30)
    rows = [make_row(i, **MIXED[i]) for i in range(4)]
    pending = prepare(logits, rows)
    pending.launch()
    assert pending.collect().tokens == sample(logits, rows).tokens


def test_no_rows_no_tokens() -> None:
    assert sample(mx.zeros((0, 30)), []).tokens == []
