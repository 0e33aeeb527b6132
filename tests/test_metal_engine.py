"""The engine on the emulated kernels, or the real ones on a Mac: the reference's tokens."""

from __future__ import annotations

import pytest

from mlx_paged.engine import Engine, EngineStats
from mlx_paged.kernels.paged_attention import AttentionBackend, MetalAttention
from mlx_paged.loader import load
from mlx_paged.sampling import SamplingParams
from tests.metal_cases import kernel_factory, require_emulator

require_emulator()

MODEL, TOKENIZER = load("tiny")
SYSTEM = "You answer questions about small things, and you answer them in one short sentence. "


def generate(
    backend: str | AttentionBackend,
    num_blocks: int,
    block_size: int,
    max_batched_tokens: int,
    waves: tuple[str, ...] = ("cat", "dog"),
) -> tuple[dict[tuple[int, int], list[int]], EngineStats]:
    """Two waves of requests that share a prefix; the second finds the first one's blocks."""
    engine = Engine(
        MODEL,
        TOKENIZER,
        block_size=block_size,
        num_blocks=num_blocks,
        max_batched_tokens=max_batched_tokens,
        max_num_seqs=8,
        backend=backend,
    )
    tokens: dict[tuple[int, int], list[int]] = {}
    for wave in waves:
        prompt = SYSTEM * 2 + f"What does a {wave} eat?"
        engine.add(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        engine.add(
            prompt + " And where?",
            SamplingParams(max_tokens=10, n=3, temperature=0.9, seed=7, ignore_eos=True),
        )
        engine.add(SYSTEM + wave, SamplingParams(max_tokens=14, ignore_eos=True))
        engine.add(wave, SamplingParams(max_tokens=20, ignore_eos=True))
        while engine.has_work:
            for output in engine.step():
                assert output.token is not None
                tokens.setdefault((output.request_id, output.index), []).append(output.token)
    engine.pool.check([])
    return tokens, engine.stats


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 12), (4, 36)])
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
    expected, _ = generate("reference", 200, 16, 512, ("cat",))
    factory = kernel_factory()
    backend = MetalAttention(kernel_factory=factory, gpu_cores=16)
    tokens, stats = generate(backend, 200, 16, 512, ("cat",))
    assert tokens == expected
    assert stats.preemptions == 0
    if factory is not None:
        names = {kernel.name for kernel in getattr(factory, "kernels", [])}
        assert len(names) == 3  # own and shared segments, and the merge
