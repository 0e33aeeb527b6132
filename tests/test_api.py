"""The API against mlx-lm's on the same weights, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
import weakref
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm import batch_generate as mlx_lm_batch_generate
from mlx_lm import generate as mlx_lm_generate
from mlx_lm import stream_generate as mlx_lm_stream_generate
from mlx_lm.generate import GenerationResponse as MlxLmResponse
from mlx_lm.generate_utils import BatchStats as MlxLmBatchStats
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_paged import SamplingParams, batch_generate, generate, stream_generate
from mlx_paged.chat import DECIDED, encode_chat
from mlx_paged.engine import Engine
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.shared_engine import _ENGINES
from tests.chat_model import ours, theirs

SMALL: dict[str, Any] = {"num_blocks": 64, "block_size": 16}
TEXT = "The KV cache stores"


@pytest.fixture(autouse=True)
def engine_is_whole() -> Iterator[None]:
    """After each test the model's engine has nothing to do and all invariants hold."""
    yield
    gc.collect()
    shared = _ENGINES.get(id(ours()[0]))
    if shared is not None:
        shared.engine.check()
        assert not shared.engine.has_work
        assert shared.engine.stats.blocks_used == 0
        assert not shared._router.calls


def engine() -> Engine:
    return _ENGINES[id(ours()[0])].engine


# Like mlx-lm


def test_generate_gives_what_mlx_lm_gives() -> None:
    mine = generate(*ours(), TEXT, max_tokens=40, **SMALL)
    assert mine == mlx_lm_generate(*theirs(), TEXT, max_tokens=40)


def test_positional_arguments_are_mlx_lms() -> None:
    for mine, other in (
        (stream_generate, mlx_lm_stream_generate),
        (batch_generate, mlx_lm_batch_generate),
        (generate, mlx_lm_generate),
    ):
        names = list(inspect.signature(mine).parameters)
        positional = [
            name
            for name in inspect.signature(other).parameters
            if name not in ("draft_model", "stream", "kwargs")
        ]
        assert names[: len(positional)] == positional


@pytest.mark.parametrize("kind", [list, tuple, np.array, mx.array])
def test_a_prompt_may_be_token_ids(kind: Any) -> None:
    ids = ours()[1].encode(TEXT)
    assert generate(*ours(), kind(ids), max_tokens=8, **SMALL) == generate(
        *ours(), TEXT, max_tokens=8, **SMALL
    )


def test_stream_gives_mlx_lms_responses() -> None:
    mine = list(stream_generate(*ours(), TEXT, 12, **SMALL))
    other = list(mlx_lm_stream_generate(*theirs(), TEXT, 12))
    assert {f.name for f in fields(MlxLmResponse)} <= set(vars(mine[0]))
    assert len(mine) == len(other)
    for a, b in zip(mine, other, strict=True):
        for name in ("token", "from_draft", "prompt_tokens", "generation_tokens", "finish_reason"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.logprobs is not None
        assert a.logprobs.shape == b.logprobs.shape
        assert mx.allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert a.prompt_tps > 0
        assert a.generation_tps > 0
        assert a.peak_memory > 0
    assert "".join(a.text for a in mine) == "".join(b.text for b in other)


def test_an_end_token_ends_as_in_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    third = list(stream_generate(*ours(), TEXT, 3, **SMALL))[-1].token
    for _, tokenizer in (ours(), theirs()):
        monkeypatch.setattr(tokenizer, "_eos_token_ids", {third})
    mine = list(stream_generate(*ours(), TEXT, 20, **SMALL))
    other = list(mlx_lm_stream_generate(*theirs(), TEXT, 20))
    assert [(r.token, r.finish_reason, r.generation_tokens) for r in mine] == [
        (r.token, r.finish_reason, r.generation_tokens) for r in other
    ]
    assert mine[-1].finish_reason == "stop"
    batch = batch_generate(*ours(), [TEXT], max_tokens=20, return_logprobs=True, **SMALL)
    assert batch.token_ids == [[r.token for r in mine[:-1]]]
    assert batch.logprobs is not None
    assert len(batch.logprobs[0]) == len(mine) - 1
    assert batch.finish_reasons == ["stop"]


def test_mlx_lms_sampler_and_logits_processors_work() -> None:
    def callables() -> dict[str, Any]:
        return {
            "sampler": make_sampler(temp=0.0),
            "logits_processors": make_logits_processors({65: 3.0}, repetition_penalty=1.4),
        }

    plain = generate(*ours(), TEXT, max_tokens=20, **SMALL)
    mine = generate(*ours(), TEXT, max_tokens=20, **(callables() | SMALL))
    assert mine == mlx_lm_generate(*theirs(), TEXT, max_tokens=20, **callables())
    assert mine != plain


def test_a_random_sampler_obeys_mlxs_seed() -> None:
    texts = []
    for _ in range(2):
        mx.random.seed(7)
        texts.append(
            generate(*ours(), TEXT, max_tokens=16, sampler=make_sampler(temp=1.0), **SMALL)
        )
    assert texts[0] == texts[1]


def test_batch_generate_gives_what_mlx_lm_gives() -> None:
    prompts = [ours()[1].encode(text) for text in (TEXT, "ab", "Blocks of sixteen tokens each")]
    asked: dict[str, Any] = {"return_token_ids": True, "return_logprobs": True}
    mine = batch_generate(*ours(), prompts, max_tokens=[9, 5, 12], **(asked | SMALL))
    other = mlx_lm_batch_generate(*theirs(), prompts, max_tokens=[9, 5, 12], **asked)
    assert mine.texts == other.texts
    assert mine.token_ids == other.token_ids
    assert mine.finish_reasons == ["length"] * 3
    assert mine.logprobs is not None
    assert other.logprobs is not None
    for a, b in zip(mine.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(np.array(a), b, atol=1e-4)


def test_batch_stats_are_right() -> None:
    prompts = [TEXT, TEXT + "!", "ab"]
    sizes = [len(ours()[1].encode(prompt)) for prompt in prompts]
    stats = batch_generate(*ours(), prompts, max_tokens=10, prefix_caching=False, **SMALL).stats
    for name in (*(f.name for f in fields(MlxLmBatchStats)), "prompt_tps", "generation_tps"):
        assert getattr(stats, name) > 0, name
    assert stats.prompt_tokens == sum(sizes)
    assert stats.generation_tokens == 30
    assert stats.generation_steps == 9
    parts = stats.prompt_time + stats.decode_time + stats.overhead_time
    assert parts == pytest.approx(stats.wall_time)
    assert stats.pool.tokens_computed == sum(sizes) + 27
    assert stats.pool.peak_blocks == sum(-(-(size + 9) // 16) for size in sizes)


def test_batch_of_nothing() -> None:
    assert batch_generate(*ours(), [], **SMALL).texts == []


# Ours


def test_n_samples_are_n_requests_with_their_seeds() -> None:
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, **SMALL}
    texts = generate(*ours(), TEXT, n=3, seed=5, **how)
    assert texts == [generate(*ours(), TEXT, seed=5 + i, **how) for i in range(3)]
    assert len(set(texts)) == 3
    batch = batch_generate(*ours(), ["ab", TEXT], n=3, seed=5, **how)
    assert batch.texts[1] == texts
    streamed = ["", "", ""]
    for response in stream_generate(*ours(), TEXT, n=3, seed=5, **how):
        streamed[response.index] += response.text
    assert streamed == texts


def test_best_of_ranks_by_mean_logprob() -> None:
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "seed": 1, **SMALL}
    all_of_them = batch_generate(*ours(), [TEXT], n=6, return_logprobs=True, **how)
    texts, logprobs = all_of_them.texts[0], all_of_them.logprobs
    assert logprobs is not None
    means = [float(np.mean(one)) for one in logprobs[0]]
    ranked = [texts[i] for i in np.argsort(means)[::-1]]
    assert generate(*ours(), TEXT, best_of=6, n=2, **how) == ranked[:2]
    assert generate(*ours(), TEXT, best_of=6, **how) == ranked[0]
    assert batch_generate(*ours(), [TEXT], best_of=6, n=3, **how).texts == [ranked[:3]]


def test_params_are_its_fields() -> None:
    params = SamplingParams(temperature=0.7, top_k=9, seed=3, max_tokens=9)
    fields_given: dict[str, Any] = {"temperature": 0.7, "top_k": 9, "seed": 3, "max_tokens": 9}
    text = generate(*ours(), TEXT, params=params, **SMALL)
    assert text == generate(*ours(), TEXT, **(fields_given | SMALL))
    assert [text] == batch_generate(*ours(), [TEXT], params=params, **SMALL).texts
    longer = generate(*ours(), TEXT, params=params, max_tokens=12, **SMALL)
    assert longer != text


def test_logprobs_of_stream() -> None:
    for response in stream_generate(*ours(), TEXT, 4, logprobs=3, **SMALL):
        assert response.logprobs is not None
        expected = np.sort(np.array(response.logprobs))[::-1][:3]
        assert response.top_logprobs is not None
        assert [score for _, score in response.top_logprobs] == pytest.approx(expected)
        assert response.logprob == pytest.approx(expected[0])


def test_no_limit_is_the_window_or_the_pool() -> None:
    size = len(ours()[1].encode(TEXT))
    in_pool = list(stream_generate(*ours(), TEXT, -1, num_blocks=4, block_size=16))
    assert in_pool[-1].generation_tokens == 4 * 16 + 1 - size
    in_window = list(stream_generate(*ours(), "x" * 500, -1, num_blocks=64))
    assert in_window[-1].generation_tokens == 12


def test_stop_strings() -> None:
    text = generate(*ours(), TEXT, max_tokens=40, **SMALL)
    assert isinstance(text, str)
    stop = text[6:8]
    assert generate(*ours(), TEXT, max_tokens=40, stop=stop, **SMALL) == text[: text.index(stop)]


def test_chat_messages() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
    ]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n"
    plain = generate(*ours(), text + "<|im_start|>assistant\n", max_tokens=8, **SMALL)
    assert generate(*ours(), messages, max_tokens=8, **SMALL) == plain
    assert batch_generate(*ours(), [messages], max_tokens=8, **SMALL).texts == [plain]
    begun = [*messages, {"role": "assistant", "content": "Well"}]
    plain = generate(*ours(), text + "<|im_start|>assistant\nWell", max_tokens=8, **SMALL)
    assert generate(*ours(), begun, max_tokens=8, **SMALL) == plain


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"role": "user"}], r"messages\[0\] must have a text as 'content', got None"),
        ([{"role": 1, "content": "a"}], r"messages\[0\] must have a text as 'role', got 1"),
        ([{"role": "user", "content": "a"}, "b"], r"messages\[1\] must be a dict"),
    ],
)
def test_bad_chat_messages(messages: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        generate(*ours(), messages, **SMALL)


def test_verbose_prints_text_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    text = generate(*ours(), TEXT, verbose=True, max_tokens=8, **SMALL)
    lines = capsys.readouterr().out.splitlines()
    mlx_lm_generate(*theirs(), TEXT, verbose=True, max_tokens=8)
    other = capsys.readouterr().out.splitlines()
    assert "\n".join(lines[1:-5]) == text
    assert [line.split(":")[0] for line in lines[:-1]] == [line.split(":")[0] for line in other]
    assert lines[-1].startswith("Pool: 2 of 64 blocks of 16 tokens")
    texts = generate(*ours(), TEXT, verbose=True, max_tokens=4, n=2, seed=0, **SMALL)
    out = capsys.readouterr().out
    assert f"[1/2]\n{texts[0]}\n[2/2]\n{texts[1]}\n" in out
    batch_generate(*ours(), [TEXT, "ab"], verbose=True, max_tokens=3, **SMALL)
    assert "Finished 2/2" in capsys.readouterr().out


# One engine for all calls


def test_a_second_call_computes_its_own_tokens_only() -> None:
    system = {"role": "system", "content": "You answer in one word. " * 5}
    first = [system, {"role": "user", "content": "What is red?"}]
    second = [system, {"role": "user", "content": "Who is Anna?"}]
    how: dict[str, Any] = {"max_tokens": 4, "num_blocks": 40}
    ids = [
        ours()[1].apply_chat_template(messages, add_generation_prompt=True)
        for messages in (first, second)
    ]
    shared = next(i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    generate(*ours(), first, **how)
    pool = batch_generate(*ours(), [second], **how).stats.pool
    assert pool.tokens_reused + pool.tokens_copied == shared
    assert pool.tokens_computed == len(ids[1]) - shared + 3
    cold = generate(*ours(), second, prefix_caching=False, **how)
    assert generate(*ours(), second, **how) == cold


def test_the_engine_is_kept_until_options_differ() -> None:
    generate(*ours(), TEXT, max_tokens=1, num_blocks=32)
    kept = engine()
    generate(*ours(), "other", max_tokens=1, num_blocks=32, block_size=16, memory_limit=None)
    assert engine() is kept
    generate(*ours(), TEXT, max_tokens=1, num_blocks=32, block_size=8)
    assert engine() is not kept
    assert engine().pool.block_size == 8


def test_the_engine_is_freed_with_the_model() -> None:
    model = Qwen2(ours()[0].config)
    model.update(tree_map(lambda x: x, ours()[0].parameters()))
    for _ in stream_generate(model, ours()[1], TEXT, 2, **SMALL):
        pass
    engine_of_it = weakref.ref(_ENGINES[id(model)].engine)
    gc.disable()
    try:
        del model
        assert engine_of_it() is None
    finally:
        gc.enable()


def test_prefill_step_size_bounds_a_step() -> None:
    steps: list[int] = []

    def observer(_: Any, schedule: Any, __: Any) -> None:
        steps.append(schedule.num_tokens)

    how: dict[str, Any] = {"max_tokens": 2, "num_blocks": 40, "observer": observer}
    generate(*ours(), "x" * 100, prefill_step_size=32, **how)
    assert steps == [32, 32, 32, 4, 1]


def test_a_stream_closed_half_way_leaves_nothing() -> None:
    stream = stream_generate(*ours(), TEXT, 50, n=3, temperature=1.0, **SMALL)
    next(stream)
    assert engine().has_work
    stream.close()  # type: ignore[attr-defined]
    assert not engine().has_work
    for _ in stream_generate(*ours(), TEXT, 50, **SMALL):
        break
    gc.collect()
    assert not engine().has_work
    never_begun = stream_generate(*ours(), TEXT, 50, **SMALL)
    del never_begun


def test_streams_share_steps_and_give_what_each_gives_alone() -> None:
    prompts = [TEXT, "ab", "Blocks of sixteen"]
    alone = [generate(*ours(), prompt, max_tokens=12, **SMALL) for prompt in prompts]
    streams = [stream_generate(*ours(), prompt, 12, **SMALL) for prompt in prompts]
    texts = ["", "", ""]
    for responses in zip(*streams, strict=True):
        for i, response in enumerate(responses):
            texts[i] += response.text
    assert texts == alone


def test_calls_from_threads_share_the_engine() -> None:
    prompts = [f"{TEXT} {i}" for i in range(4)]
    alone = [generate(*ours(), prompt, max_tokens=10, **SMALL) for prompt in prompts]
    texts: dict[int, Any] = {}

    def work(i: int) -> None:
        texts[i] = generate(*ours(), prompts[i], max_tokens=10, **SMALL)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [texts[i] for i in range(4)] == alone


def test_memory_is_wired_while_any_call_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [0]

    def set_wired_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr("mlx_paged.shared_engine._recommended_memory", lambda: 1000)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    first, second = (stream_generate(*ours(), TEXT, 9, **SMALL) for _ in range(2))
    next(first)
    next(second)
    first.close()  # type: ignore[attr-defined]
    assert limits == [0, 1000]
    second.close()  # type: ignore[attr-defined]
    assert limits == [0, 1000, 0]


# Errors of the caller's own callables


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_failing_callable_ends_its_own_call_only(error: type[BaseException]) -> None:
    calls = 0

    def failing(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise error
        return logits

    expected = generate(*ours(), "ab", max_tokens=10, **SMALL)
    other = stream_generate(*ours(), "ab", 10, **SMALL)
    text = next(other).text
    with pytest.raises(error):
        generate(*ours(), TEXT, max_tokens=10, logits_processors=[failing], **SMALL)
    assert text + "".join(response.text for response in other) == expected


def test_a_callable_must_not_generate_on_its_own_model() -> None:
    def nested(tokens: mx.array, logits: mx.array) -> mx.array:
        generate(*ours(), "ab", max_tokens=1, **SMALL)
        return logits

    with pytest.raises(RuntimeError, match="must not generate on its own model"):
        generate(*ours(), TEXT, max_tokens=2, logits_processors=[nested], **SMALL)


def test_a_stream_dropped_within_a_step_is_cancelled_before_the_next() -> None:
    streams = [stream_generate(*ours(), "ab", 50, **SMALL)]
    next(streams[0])

    def dropping(tokens: mx.array, logits: mx.array) -> mx.array:
        streams.clear()
        return logits

    text = generate(*ours(), TEXT, max_tokens=6, logits_processors=[dropping], **SMALL)
    assert text == generate(*ours(), TEXT, max_tokens=6, **SMALL)


# Mistakes


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"temprature": 1}, TypeError, r"'temprature'; did you mean 'temperature'\?"),
        ({"temp": 1}, TypeError, r"unexpected argument 'temp'; did you mean 'temperature'\?"),
        ({"block_sise": 1}, TypeError, r"did you mean 'block_size'\?"),
        ({"maxtokens": 1}, TypeError, r"did you mean 'max_tokens'\?"),
        ({"zzz": 1}, TypeError, r"unexpected argument 'zzz'$"),
        ({"kv_bits": 4}, ValueError, "does not take kv_bits: keys and values are stored"),
        ({"kv_group_size": 64}, ValueError, "does not take kv_group_size"),
        ({"max_kv_size": 64}, ValueError, "use memory_limit or num_blocks"),
        ({"draft_model": object()}, ValueError, "no speculative decoding"),
        ({"prompt_cache": []}, ValueError, "the block pool finds computed prefixes"),
        ({"prefill_step_size": 8, "max_batched_tokens": 8}, ValueError, "not both"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -2}, ValueError, "max_tokens must be at least 1, got -2"),
        ({"max_tokens": 10**6}, ValueError, "max_tokens must be at most 493"),
        ({"n": 0}, ValueError, "n must be at least 1, got 0"),
        ({"n": 3, "best_of": 2}, ValueError, r"best_of must be at least n \(3\), got 2"),
        ({"temperature": float("nan")}, ValueError, "temperature must be finite, got nan"),
        ({"temperature": 1e39}, ValueError, r"temperature must be at most 3.4e\+38 either way"),
        ({"presence_penalty": -1e39}, ValueError, "presence_penalty must be at most 3.4e"),
        ({"logit_bias": {1: 1e39}}, ValueError, r"logit_bias\[1\] must be at most 3.4e"),
        ({"temperature": 10**400}, ValueError, "temperature must be finite, got 1000"),
        ({"presence_penalty": 3.5e38}, ValueError, "presence_penalty must be at most 3.4e"),
        ({"logit_bias": {1: 10**400}}, ValueError, r"logit_bias\[1\] must be finite"),
        ({"max_tokens": True}, TypeError, "max_tokens must be an integer, got True"),
        ({"max_tokens": -1.0}, TypeError, "max_tokens must be "),
        # Equal to a default, but not of its kind.
        ({"block_size": 16.0}, TypeError, "block_size must be an integer, got 16.0"),
        ({"block_size": np.array([16, 8])}, TypeError, "block_size must be an integer"),
        ({"prefix_caching": 1}, TypeError, "prefix_caching must be True or False, got 1"),
        ({"observer": 0}, TypeError, "observer must be a function or None, got 0"),
        ({"backend": 1}, TypeError, "backend must be a name, or an object"),
        ({"max_num_seqs": 2.5}, TypeError, "max_num_seqs must be an integer, got 2.5"),
        ({"look_ahead": 2}, TypeError, "look_ahead must be True or False, got 2"),
        ({"top_p": 1.5}, ValueError, "top_p must be from 0 to 1, got 1.5"),
        ({"block_size": 0}, ValueError, "block_size must be at least 1, got 0"),
        ({"block_size": 257}, ValueError, "block_size must be from 1 to 256, got 257"),
        ({"num_blocks": 1}, ValueError, "need 18 blocks of 16, but the pool has 1"),
        ({"memory_limit": 10}, ValueError, "memory_limit must be at least one block"),
        ({"memory_limit": 10**6, "num_blocks": 3}, ValueError, "not both"),
        ({"params": {"n": 2}}, TypeError, "params must be SamplingParams"),
        ({"params": SamplingParams(), "top_k": 2}, ValueError, "not both: got params and top_k"),
        ({"sampler": 3}, TypeError, "sampler must be callable, got 3"),
        ({"sampler": mx.argmax, "temperature": 1.0}, ValueError, "a sampler or temperature"),
        ({"sampler": mx.argmax, "params": SamplingParams(seed=1)}, ValueError, "a sampler or seed"),
        ({"logits_processors": mx.argmax}, TypeError, "must be a list of callables"),
        ({"logits_processors": [3]}, TypeError, r"logits_processors\[0\] must be callable, got 3"),
    ],
)
def test_refused_before_any_work(given: dict[str, Any], error: type[Exception], match: str) -> None:
    pool = {} if "memory_limit" in given else {"num_blocks": 64}
    calls: tuple[Any, ...] = (
        (generate, TEXT),
        (batch_generate, [TEXT]),
        (lambda *a, **k: list(stream_generate(*a, **k)), TEXT),
    )
    for function, prompt in calls:
        with pytest.raises(error, match=match):
            function(*ours(), prompt, **(pool | {"max_tokens": 256} | given))


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", ValueError, "at least one token, got none"),
        ([], ValueError, "at least one token, got none"),
        ([5, 259], ValueError, "token ids from 0 to 258, got 259"),
        ([5, -1], ValueError, "token ids from 0 to 258, got -1"),
        ([1.5], TypeError, "got 1.5 in it"),
        (b"bytes", TypeError, "must be text, token ids or chat messages"),
        (5, TypeError, "must be text, token ids or chat messages, got 5"),
        (None, TypeError, "must be text, token ids or chat messages, got None"),
    ],
)
def test_bad_prompts(prompt: Any, error: type[Exception], match: str) -> None:
    for call in (generate, stream_generate):
        with pytest.raises(error, match=match):
            call(*ours(), prompt, **SMALL)
    with pytest.raises(error, match=r"prompts\[1\]: .*" + match):
        batch_generate(*ours(), ["fine", prompt], **SMALL)


def test_one_prompt_is_no_batch() -> None:
    one: tuple[Any, ...] = (TEXT, [{"role": "user", "content": TEXT}])
    for prompt in one:
        with pytest.raises(TypeError, match="prompts must be a list of prompts, got one"):
            batch_generate(*ours(), prompt, **SMALL)
    none: tuple[Any, ...] = (None, 5, b"ab", {"a": 1}, {"a"}, np.array(5), mx.array(5))
    for prompts in none:
        with pytest.raises(TypeError, match="prompts must be a list of prompts, got"):
            batch_generate(*ours(), prompts, **SMALL)
    with pytest.raises(ValueError, match="one for each of the 2 prompts, got 3"):
        batch_generate(*ours(), ["a", "b"], max_tokens=[1, 2, 3], **SMALL)
    limits: Any = [3, None]
    with pytest.raises(TypeError, match=r"max_tokens\[1\] must be an integer, got None"):
        batch_generate(*ours(), ["a", "b"], max_tokens=limits, **SMALL)
    with pytest.raises(ValueError, match="does not take return_prompt_caches"):
        batch_generate(*ours(), ["a"], return_prompt_caches=True, **SMALL)


def test_a_wrong_option_does_not_cost_the_cache() -> None:
    generate(*ours(), TEXT, max_tokens=2, **SMALL)
    wrong: Any = "x"
    with pytest.raises(TypeError, match="block_size must be an integer, got 'x'"):
        generate(*ours(), TEXT, **(SMALL | {"block_size": wrong}))
    found = batch_generate(*ours(), [TEXT], max_tokens=2, **SMALL)
    assert found.stats.pool.tokens_computed < len(ours()[1].encode(TEXT))


def test_sizes_may_be_numbers_of_numpy() -> None:
    sizes: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 8,
        "max_batched_tokens": 32,
        "max_tokens": 5,
    }
    given: dict[str, Any] = {name: np.int64(value) for name, value in sizes.items()}
    assert generate(*ours(), TEXT, **given) == generate(*ours(), TEXT, **sizes)


@pytest.mark.parametrize("name", DECIDED)
def test_what_the_messages_decide_is_no_argument_of_the_template(name: str) -> None:
    messages = [{"role": "user", "content": TEXT}]
    with pytest.raises(ValueError, match=f"the chat template takes no {name}, got True"):
        encode_chat(ours()[1], messages, **{name: True})
    for other in ("tokenizer", "messages"):  # names of ours, not the template's
        with contextlib.suppress(ValueError):
            encode_chat(ours()[1], messages, **{other: 1})


def test_another_packages_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"mlx_paged.load, got a mlx_lm.models.qwen2.Model"):
        generate(*theirs(), TEXT)
    with pytest.raises(TypeError, match=r"tokenizer must be what mlx_paged.load returned"):
        generate(ours()[0], None, TEXT)


def test_best_of_cannot_be_streamed() -> None:
    with pytest.raises(ValueError, match="best_of must be None in stream_generate, got 4"):
        stream_generate(*ours(), TEXT, best_of=4, **SMALL)


def test_options_turned_off_as_in_mlx_lm_are_accepted() -> None:
    off: dict[str, Any] = {
        "max_kv_size": None,
        "kv_bits": None,
        "draft_model": None,
        "prompt_cache": None,
    }
    assert generate(*ours(), TEXT, max_tokens=2, sampler=None, **(off | SMALL))
