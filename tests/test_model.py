"""Logits against mlx-lm's Qwen2 on its contiguous cache, in float32."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.qwen2 import Model as TheirQwen2
from numpy.typing import NDArray

from mlx_paged import Engine, SamplingParams
from mlx_paged.batch import Batch
from mlx_paged.kernels import reference
from mlx_paged.kv_cache import KVCache
from mlx_paged.models.config import Qwen2Config
from mlx_paged.models.qwen2 import Qwen2
from tests.models import config, contiguous_logits, new_caches, random_model

TOLERANCE = 1e-4  # of the largest logit

Logits = dict[int, list[NDArray[np.float32]]]


def record(
    model: Qwen2, prompts: list[list[int]], count: int, **options: Any
) -> tuple[Logits, dict[int, list[int]]]:
    """All logits that an engine samples from, and the tokens, by prompt."""
    defaults: dict[str, Any] = {"num_blocks": 200, "max_num_seqs": 8}
    engine = Engine(model, **(defaults | options))
    logits: Logits = {}
    tokens: dict[int, list[int]] = {}

    def watch(number: int) -> Any:
        def processor(_: mx.array, row: mx.array) -> mx.array:
            logits.setdefault(number, []).append(np.array(row[0]))
            return row

        return processor

    for number, prompt in enumerate(prompts):
        engine.add(prompt, SamplingParams(max_tokens=count), logits_processors=[watch(number)])
    while engine.has_work:
        for output in engine.step():
            assert output.token is not None, output.error
            tokens.setdefault(output.request_id, []).append(output.token)
        engine.check()
    return logits, tokens


def compare(
    ours: tuple[Logits, dict[int, list[int]]], theirs: TheirQwen2, prompts: list[list[int]]
) -> None:
    """Feed mlx-lm the same tokens, and compare every row of logits."""
    logits, tokens = ours
    for number, prompt in enumerate(prompts):
        caches = new_caches(theirs)
        expected = [np.array(contiguous_logits(theirs, prompt, caches)[-1])]
        for token in tokens[number][:-1]:
            expected.append(np.array(contiguous_logits(theirs, [token], caches)[-1]))
        for row, want, token in zip(logits[number], expected, tokens[number], strict=True):
            assert np.abs(row - want).max() <= TOLERANCE * np.abs(want).max()
            assert int(want.argmax()) == token


def prompts_of(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


GEOMETRIES = [
    # heads, kv heads, head dim, tied, bits
    (2, 2, 64, True, None),
    (5, 1, 64, False, None),
    (12, 2, 64, True, None),
    (7, 1, 64, True, 4),
    (14, 2, 64, True, None),
    (8, 1, 64, False, 8),
    (2, 2, 128, False, 4),
    (5, 1, 128, True, 8),
    (6, 1, 128, True, None),
    (7, 1, 128, False, None),
    (8, 1, 128, True, None),
]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "tied", "bits"), GEOMETRIES)
def test_logits_equal_those_of_a_contiguous_cache(
    heads: int, kv_heads: int, head_dim: int, tied: bool, bits: int | None
) -> None:
    cfg = config(heads=heads, kv_heads=kv_heads, head_dim=head_dim, tied=tied, vocab=256)
    ours, theirs = random_model(cfg, seed=heads + head_dim, bits=bits)
    prompts = prompts_of([1, 16, 37], cfg.vocab_size)
    compare(record(ours, prompts, 6, max_batched_tokens=23), theirs, prompts)


@pytest.fixture(scope="module")
def pair() -> tuple[Qwen2, TheirQwen2]:
    return random_model(small(), seed=3)


def small() -> Qwen2Config:
    return config(heads=4, kv_heads=2, head_dim=64, vocab=256)


@pytest.mark.parametrize("block_size", [1, 7, 16, 256])
@pytest.mark.parametrize("compile_steps", [True, False])
def test_logits_for_every_block_size(
    pair: tuple[Qwen2, TheirQwen2], block_size: int, compile_steps: bool
) -> None:
    ours, theirs = pair
    prompts = prompts_of([5, 40, 64], 256, seed=block_size)
    logits = record(ours, prompts, 12, block_size=block_size, compile_steps=compile_steps)
    compare(logits, theirs, prompts)


def test_logits_over_a_shared_prefix(pair: tuple[Qwen2, TheirQwen2]) -> None:
    """So long that it is read once for all rows."""
    ours, theirs = pair
    (prefix,) = prompts_of([400], 256)
    prompts = [prefix + tail for tail in prompts_of([3, 9, 1, 20], 256, seed=1)]
    compare(record(ours, prompts, 8), theirs, prompts)


def test_prompt_chunks_that_end_in_one_block(
    pair: tuple[Qwen2, TheirQwen2], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of equal length, in tiles whose ends cross blocks where those of the chunks do not."""
    monkeypatch.setattr(reference, "MAX_SCORES", 64)
    monkeypatch.setattr(reference, "MIN_TILE", 4)
    monkeypatch.setattr(reference, "ROUND_TOKENS", 1)
    ours, theirs = pair
    prompts = prompts_of([97], 256)
    logits = record(ours, prompts, 2, block_size=32, max_batched_tokens=10)
    compare(logits, theirs, prompts)


def test_large_positions_are_rotated_exactly(pair: tuple[Qwen2, TheirQwen2]) -> None:
    ours, theirs = pair
    prompts = prompts_of([1500], 256)
    compare(record(ours, prompts, 2, max_batched_tokens=512), theirs, prompts)


def test_steps_without_wanted_logits_compute_no_head(pair: tuple[Qwen2, TheirQwen2]) -> None:
    """A prompt chunk that ends before the prompt does has no logits at all."""
    ours, _ = pair
    seen: list[tuple[int, ...]] = []

    engine = Engine(ours, num_blocks=20, max_batched_tokens=8, max_num_seqs=8, compile_steps=False)

    def spy(batch: Batch, cache: KVCache) -> mx.array:
        logits = ours(batch, cache)
        seen.append(logits.shape)
        return logits

    engine._runner.model = spy  # type: ignore[assignment]
    engine.add(prompts_of([20], 256)[0], SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    assert [shape[0] for shape in seen] == [0, 0, 1, 1]
