"""What the functions of the API return, under mlx-lm's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_paged.engine import EngineStats
from mlx_paged.request import FinishReason, Output


@dataclass
class GenerationResponse:
    """One new token of one sample.

    Attributes:
        text: the next piece of text, perhaps empty.
        token: the next token.
        logprobs: [vocab], float32, of what the token was chosen from.
        from_draft: always False; mlx-lm has it for speculative decoding.
        prompt_tokens: tokens of the prompt, found in the cache or not.
        prompt_tps: these per second until the first token.
        generation_tokens: tokens of this sample so far.
        generation_tps: these per second since the first token.
        peak_memory: of MLX in this process, in 10**9 bytes.
        finish_reason: "length" or "stop" with a sample's last token, else None.
        index: the sample's number, 0 to n - 1.
        logprob: of the token, if `logprobs` was asked for.
        top_logprobs: the most likely tokens and their log-probabilities, if asked for.
    """

    text: str
    token: int
    logprobs: mx.array | None
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: FinishReason | None = None
    index: int = 0
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None


@dataclass
class Answer:
    """One sample, whole or in the making.

    Attributes:
        index: its number, 0 to n - 1.
        text: up to a stop string or the end.
        token_ids: without the token that ended it.
        logprobs: of these tokens, if asked for.
        top_logprobs: for each token the most likely ones, if asked for.
        finish_reason: None if it is not finished.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_tokens: int = 0  # the one that ended it included, as in all that follows
    sum_logprobs: float = 0.0

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens, which `best_of` ranks by."""
        return self.sum_logprobs / max(self.num_tokens, 1)

    def add(self, output: Output, ends: frozenset[int]) -> None:
        """Append a token.

        Args:
            output: of this sample, without an error.
            ends: tokens that end it; such a token is no part of the answer.
        """
        assert output.token is not None
        self.num_tokens += 1
        self.sum_logprobs += output.logprob or 0.0
        self.text += output.text
        self.finish_reason = output.finish_reason
        if output.finish_reason == "stop" and output.token in ends:
            return
        self.token_ids.append(output.token)
        if output.logprob is not None:
            self.logprobs.append(output.logprob)
        if output.top_logprobs is not None:
            self.top_logprobs.append(output.top_logprobs)


def best(answers: Sequence[Answer], n: int) -> list[Answer]:
    """The `n` answers of the highest mean log-probability, best first."""
    return sorted(answers, key=lambda answer: -answer.mean_logprob)[:n]


@dataclass(frozen=True, kw_only=True)
class PoolUse:
    """What happened in the block pool during a call.

    Attributes:
        num_blocks, block_size, block_bytes: of the pool; a block has keys and values of
            `block_size` tokens in all layers.
        peak_blocks: most blocks that sequences held after any step.
        tokens_computed: tokens that went through the model.
        tokens_reused, tokens_copied: not computed, as they were found in whole blocks, or in a
            part of a block.
        block_copies, preemptions, evictions: see `EngineStats`.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    peak_blocks: int
    tokens_computed: int
    tokens_reused: int
    tokens_copied: int
    block_copies: int
    preemptions: int
    evictions: int

    @classmethod
    def between(cls, start: EngineStats, end: EngineStats, peak_blocks: int) -> PoolUse:
        """The difference of an engine's figures."""
        return cls(
            num_blocks=end.num_blocks,
            block_size=end.block_bytes // end.bytes_per_token,
            block_bytes=end.block_bytes,
            peak_blocks=peak_blocks,
            tokens_computed=end.tokens_computed - start.tokens_computed,
            tokens_reused=end.tokens_reused - start.tokens_reused,
            tokens_copied=end.tokens_copied - start.tokens_copied,
            block_copies=end.block_copies - start.block_copies,
            preemptions=end.preemptions - start.preemptions,
            evictions=end.evictions - start.evictions,
        )

    def __str__(self) -> str:
        found = self.tokens_reused + self.tokens_copied
        return (
            f"{self.peak_blocks} of {self.num_blocks} blocks of {self.block_size} tokens "
            f"({self.block_bytes / 1024:.4g} KiB each) in use at most; "
            f"{self.tokens_computed} tokens computed, {found} found in the cache; "
            f"{self.block_copies} block copies, {self.preemptions} preemptions"
        )


@dataclass(kw_only=True)
class BatchStats:
    """Figures of a `batch_generate`.

    A step that computes prompts and new tokens together counts towards both times, by the number
    of tokens. `prompt_time`, `decode_time` and `overhead_time` add up to `wall_time`.

    Attributes:
        prompt_tokens: of all prompts, found in the cache or not.
        prompt_time: seconds in which prompts were computed, after preemptions again.
        generation_tokens: tokens generated.
        generation_steps: steps that gave a sample its second or a later token.
        decode_time: seconds in which these tokens were computed.
        wall_time: seconds in all.
        peak_memory: of MLX in this process, in 10**9 bytes.
        pool: what happened in the block pool.
    """

    prompt_tokens: int = 0
    prompt_time: float = 0.0
    generation_tokens: int = 0
    generation_steps: int = 0
    decode_time: float = 0.0
    wall_time: float = 0.0
    peak_memory: float = 0.0
    pool: PoolUse

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens per second of `prompt_time`."""
        return self.prompt_tokens / self.prompt_time if self.prompt_time > 0 else 0.0

    @property
    def generation_time(self) -> float:
        """Seconds not spent on prompts."""
        return max(0.0, self.wall_time - self.prompt_time)

    @property
    def generation_tps(self) -> float:
        """Generated tokens per second of `generation_time`."""
        return self.generation_tokens / self.generation_time if self.generation_time > 0 else 0.0

    @property
    def decode_tps(self) -> float:
        """Generated tokens per second of `decode_time`."""
        return self.generation_tokens / self.decode_time if self.decode_time > 0 else 0.0

    @property
    def overhead_time(self) -> float:
        """Seconds outside of steps."""
        return max(0.0, self.wall_time - self.prompt_time - self.decode_time)


Texts = list[str] | list[list[str]]
TokenIds = list[list[int]] | list[list[list[int]]]
Logprobs = list[list[float]] | list[list[list[float]]]


@dataclass
class BatchResponse:
    """The answers to a batch of prompts, in their order.

    Where n is more than 1, each entry of a list is itself a list of n.

    Attributes:
        texts: the answers.
        stats: see `BatchStats`.
        caches: always None; the block pool keeps what later calls can reuse.
        token_ids: the tokens, without the one that ended the answer.
        logprobs: of these tokens, if asked for.
        finish_reasons: "stop" or "length".
    """

    texts: Texts
    stats: BatchStats
    caches: None = None
    token_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    finish_reasons: list[FinishReason | None] | list[list[FinishReason | None]] | None = None
