"""What was asked for, the answers in the making, and what a step says about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from mlx_paged.sampling import SampleRow, SamplingParams
from mlx_paged.sequence import Sequence
from mlx_paged.text_stream import TextStream

FinishReason = Literal["stop", "length", "error"]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of one sample, or its end.

    Attributes:
        request_id: what `Engine.add` returned.
        index: the sample's number, 0 to n - 1.
        token: the token, or None if the sample ended with an error.
        text: what is now decided of the text; empty without a tokenizer.
        logprob: of the token, if asked for.
        top_logprobs: the most likely tokens and their log-probabilities, if asked for.
        full_logprobs: [vocab], if asked for.
        finish_reason: None while the sample goes on.
        error: what went wrong, if finish_reason is "error".
    """

    request_id: int
    index: int
    token: int | None
    text: str = ""
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    full_logprobs: mx.array | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None


@dataclass(slots=True)
class Sample:
    """One answer in the making."""

    request_id: int
    index: int
    sequence: Sequence
    row: SampleRow
    ends: frozenset[int]
    stream: TextStream | None

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.row.params

    def take(self, token: int) -> tuple[str, FinishReason | None]:
        """Add a sampled token; return the text it decides, and why the sample ends if it does."""
        tokens = self.sequence.tokens
        tokens.append(token)
        if token in self.ends:
            return (self.stream.finish() if self.stream else ""), "stop"
        text = self.stream.add(token) if self.stream else ""
        if self.stream and self.stream.finished_by_stop:
            return text, "stop"
        if self.sequence.num_generated == self.params.max_tokens:
            return (text + self.stream.finish() if self.stream else ""), "length"
        return text, None
