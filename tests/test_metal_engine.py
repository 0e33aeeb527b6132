"""The engine on the emulated kernels, or the real ones on a Mac: the reference's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_paged.engine import Engine, EngineStats
from mlx_paged.kernels.paged_attention import AttentionBackend, MetalAttention
from mlx_paged.loader import load
from mlx_paged.sampling import SamplingParams
from tests.metal_cases import kernel_factory, require_emulator

require_emulator()

MODEL, _ = load("tiny")
IDS = np.random.default_rng(0).integers(3, MODEL.config.vocab_size, 80).tolist()
PREFIX = IDS[:40]


def generate(
    backend: str | AttentionBackend,
    num_blocks: int,
    block_size: int,
    max_batched_tokens: int,
    waves: tuple[int, ...] = (0, 1),
    max_tokens: int = 20,
) -> tuple[dict[tuple[int, int], list[int]], EngineStats]:
    """Two waves of requests that share a prefix; the second finds the first one's blocks."""
    engine = Engine(
        MODEL,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=8,
        backend=backend,
    )
    tokens: dict[tuple[int, int], list[int]] = {}
    for wave in waves:
        own = IDS[40 + 20 * wave :]
        prompt = PREFIX + own[:10]
        engine.add(prompt, SamplingParams(max_tokens=min(12, max_tokens), ignore_eos=True))
        engine.add(
            prompt + own[10:15],
            SamplingParams(
                max_tokens=min(10, max_tokens), n=3, temperature=0.9, seed=7, ignore_eos=True
            ),
        )
        engine.add(
            PREFIX[:20] + own[:3], SamplingParams(max_tokens=min(14, max_tokens), ignore_eos=True)
        )
        engine.add(own[:2], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert output.token is not None
                tokens.setdefault((output.request_id, output.index), []).append(output.token)
    engine.pool.check([])
    return tokens, engine.stats


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 8), (4, 26)])
def test_the_references_tokens(block_size: int, num_blocks: int) -> None:
    expected, _ = generate("reference", num_blocks, block_size, 48)
    backend = MetalAttention(kernel_factory=kernel_factory(mode="fast"), gpu_cores=16)
    tokens, stats = generate(backend, num_blocks, block_size, 48)
    assert tokens == expected
    assert len(tokens) == 12
    assert stats.preemptions > 0
    assert stats.block_copies > 0
    assert stats.blocks_reused > 0


def test_with_every_load_checked() -> None:
    expected, _ = generate("reference", 200, 16, 512, (0,), 4)
    factory = kernel_factory()
    backend = MetalAttention(kernel_factory=factory, gpu_cores=16)
    tokens, stats = generate(backend, 200, 16, 512, (0,), 4)
    assert tokens == expected
    assert stats.preemptions == 0
    if factory is not None:
        names = {kernel.name for kernel in getattr(factory, "kernels", [])}
        assert len(names) == 3  # own and shared segments, and the merge
