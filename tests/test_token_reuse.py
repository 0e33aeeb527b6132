"""Prefixes are reused to the token: what is computed again, and what comes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_paged import SamplingParams, generate
from mlx_paged.engine import Engine
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.shared_engine import engine_of
from tests import chat_model
from tests.models import config, greedy, random_model

VOCAB = 128
SHARED = 85
BLOCK_SIZES = [1, 4, 8, 16, 32, 64, 128, 256]


@pytest.fixture(scope="module")
def models() -> tuple[Qwen2, Any]:
    return random_model(config(heads=2, kv_heads=1, layers=2, vocab=VOCAB), seed=3)


def ids(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def finish(engine: Engine) -> dict[int, list[int | None]]:
    """The tokens of each request."""
    tokens: dict[int, list[int | None]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
        engine.check()
    return tokens


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("meanwhile", [False, True])
def test_85_of_85_tokens_are_reused(
    models: tuple[Qwen2, Any], block_size: int, meanwhile: bool
) -> None:
    """Whether the first request is finished or still going on when the second comes."""
    common, first, second = ids(0, SHARED), ids(1, 40), ids(2, 23)
    second[0] = (first[0] + 1) % VOCAB
    engine = Engine(models[0], block_size=block_size, num_blocks=max(8, 400 // block_size))
    engine.add(common + first, SamplingParams(max_tokens=12))
    tokens: dict[int, list[int | None]] = {}
    if meanwhile:
        for _ in range(3):
            for output in engine.step():
                tokens.setdefault(output.request_id, []).append(output.token)
    else:
        tokens = finish(engine)
    before = engine.stats
    request = engine.add(common + second, SamplingParams(max_tokens=12))
    if meanwhile:
        engine.step()
        after = engine.stats
        assert after.tokens_computed - before.tokens_computed == len(second) + 1
    else:
        tokens |= finish(engine)
        after = engine.stats
        assert after.tokens_computed - before.tokens_computed == len(second) + 11
        assert tokens[request] == greedy(models[1], common + second, 12)
    blocks = after.tokens_reused - before.tokens_reused
    copied = after.tokens_copied - before.tokens_copied
    assert blocks == SHARED // block_size * block_size
    assert copied == SHARED % block_size
    assert blocks + copied == SHARED


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_without_token_reuse_whole_blocks_are_found(
    models: tuple[Qwen2, Any], block_size: int
) -> None:
    common = ids(0, SHARED)
    expectations: list[tuple[dict[str, Any], int]] = [
        ({"token_reuse": False}, SHARED // block_size * block_size),
        ({"prefix_caching": False}, 0),
    ]
    for options, found in expectations:
        engine = Engine(
            models[0], block_size=block_size, num_blocks=max(8, 400 // block_size), **options
        )
        engine.add([*common, 5, 6, 7], SamplingParams(max_tokens=2))
        finish(engine)
        before = engine.stats.tokens_computed
        request = engine.add([*common, 8, 9], SamplingParams(max_tokens=4))
        assert finish(engine)[request] == greedy(models[1], [*common, 8, 9], 4)
        assert engine.stats.tokens_reused == found
        assert engine.stats.tokens_copied == 0
        assert engine.stats.tokens_computed - before == SHARED + 2 - found + 3


@pytest.mark.parametrize("block_size", [1, 8, 16, 256])
def test_an_answer_is_reused_with_its_prompt(models: tuple[Qwen2, Any], block_size: int) -> None:
    """A conversation's next turn computes its own tokens, and the one token nobody computed."""
    engine = Engine(models[0], block_size=block_size, num_blocks=max(8, 400 // block_size))
    prompt = ids(4, 33)
    engine.add(prompt, SamplingParams(max_tokens=10))
    (answer,) = finish(engine).values()
    turn = [*prompt, *(token for token in answer if token is not None), *ids(5, 7)]
    before = engine.stats.tokens_computed
    request = engine.add(turn, SamplingParams(max_tokens=5))
    assert finish(engine)[request] == greedy(models[1], turn, 5)
    assert engine.stats.tokens_computed - before == 1 + 7 + 4


# A thousand prompts


def nodes(prompts: list[list[int]]) -> int:
    """Nodes of the prefix tree: distinct non-empty prefixes."""
    return len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})


@pytest.mark.parametrize(("block_size", "at_once"), [(16, True), (64, False)])
def test_of_a_thousand_prompts_the_distinct_tokens_are_computed(
    block_size: int, at_once: bool
) -> None:
    """One system prompt of 200 tokens, and under it a tree of what some prompts share besides.

    Computed are the tokens at distinct prefixes, each once; and the last token of each prompt that
    is, as a whole, the beginning of one computed before, as its logits are needed again. Here
    those are the repeated ones: no prompt ends within another.
    """
    model, _ = random_model(config(heads=1, kv_heads=1, layers=1, vocab=64), seed=0)
    rng = np.random.default_rng(7)
    system = rng.integers(4, 63, 200).tolist()
    prompts = [
        # Few different tokens, so that beginnings coincide; the end is found nowhere else.
        [*system, *rng.integers(0, 4, rng.integers(1, 25)).tolist(), 63]
        for _ in range(1000)
    ]
    repeated = len(prompts) - len({tuple(prompt) for prompt in prompts})
    assert repeated > 20
    engine = Engine(model, block_size=block_size, num_blocks=64_000 // block_size)
    params = SamplingParams(max_tokens=1)
    step = 1000 if at_once else 50
    for start in range(0, 1000, step):
        for prompt in prompts[start : start + step]:
            engine.add(prompt, params)
        while engine.has_work:
            engine.step()
    engine.check()
    stats = engine.stats
    assert stats.evictions == 0
    assert stats.tokens_computed == nodes(prompts) + repeated
    total = sum(map(len, prompts))
    assert stats.tokens_reused + stats.tokens_copied == total - stats.tokens_computed
    assert stats.tokens_copied > 1000


def test_a_chat_computes_its_own_tokens() -> None:
    model, tokenizer = chat_model.ours()
    system = {"role": "system", "content": "You answer shortly. " * 10}
    options: dict[str, Any] = {"num_blocks": 200, "max_tokens": 4}
    engine = engine_of(model, tokenizer, {"num_blocks": 200}).engine
    engine.clear_cache()
    prompts, answers = [], []
    for question in ("Where does Anna live?", "And where does Tom?"):
        messages = [system, {"role": "user", "content": question}]
        before = engine.stats.tokens_computed
        answers.append(generate(model, tokenizer, messages, **options))
        computed = engine.stats.tokens_computed - before
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append(tokenizer.encode(text))
        assert computed == nodes(prompts) - nodes(prompts[:-1]) + 3
    assert nodes(prompts[:1]) > 200
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == generate(model, tokenizer, prompt, prefix_caching=False, **options)
