"""What was asked for, the answers in the making, and what a step says about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from mlx_paged.sampling import Sampled, SampleRow, SamplingParams
from mlx_paged.sequence import Sequence
from mlx_paged.text_stream import TextStream

if TYPE_CHECKING:
    from mlx_paged.scheduler import Scheduler

FinishReason = Literal["stop", "length", "error"]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished answer of a beam search.

    Attributes:
        tokens: the generated ones, an end token included.
        logprob: the sum of their log-probabilities.
        score: what hypotheses are ranked by.
        finish_reason: "stop" if the last token is an end token, else "length".
        text: without end tokens; empty without a tokenizer.
    """

    tokens: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason
    text: str = ""


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of one sample, or its end; or the end of a beam search.

    Attributes:
        request_id: what `Engine.add` returned.
        index: the sample's number, 0 to n - 1.
        token: the token, or None if the sample ended with an error, or of a beam search.
        text: what is now decided of the text; empty without a tokenizer.
        logprob: of the token, if asked for.
        top_logprobs: the most likely tokens and their log-probabilities, if asked for.
        full_logprobs: [vocab], if asked for.
        finish_reason: None while the sample goes on.
        error: what went wrong, if finish_reason is "error".
        hypotheses: what a beam search found, the best first.
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
    hypotheses: tuple[Hypothesis, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that this output gives out."""
        return sum(len(one.tokens) for one in self.hypotheses or ()) + (self.token is not None)


class Request(ABC):
    """The sequences of one prompt, and what follows from the logits of each.

    When a step brings a sequence up to date, the engine asks `rows` how its logits are to be
    sampled, and gives the outcome to `take`. If the step fails in between, it is done again from
    `rows` on.
    """

    request_id: int
    steady: bool = False  # whether a sampled token just continues its sequence

    @property
    @abstractmethod
    def sequences(self) -> list[Sequence]:
        """Those that the scheduler holds; none once the request is done."""

    @abstractmethod
    def rows(self, seq: Sequence) -> list[SampleRow]:
        """How to sample the logits of the last token of `seq`; each row sees the same logits."""

    @abstractmethod
    def take(
        self, seq: Sequence, sampled: Sampled, first: int, scheduler: Scheduler
    ) -> list[Output]:
        """Go on after a step: new tokens, forks, finished sequences.

        Args:
            seq: one whose tokens are all computed now.
            sampled: the outcome of the step, in which its rows begin at `first`.
            scheduler: where sequences are forked and removed.
        """

    def cancel(self, scheduler: Scheduler) -> None:
        """End the request without further outputs."""
        for seq in self.sequences:
            scheduler.remove(seq)


@dataclass(slots=True)
class Sample:
    """One answer in the making."""

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


class SampleRequest(Request):
    """Independent samples of one prompt, forked once it is computed.

    Args:
        request_id: the engine's.
        samples: all on the same sequence.
    """

    steady = True

    def __init__(self, request_id: int, samples: list[Sample]) -> None:
        self.request_id = request_id
        self._samples = {sample.index: sample for sample in samples}  # unfinished

    @property
    def sequences(self) -> list[Sequence]:
        """One for all samples, later one for each."""
        return list(dict.fromkeys(sample.sequence for sample in self._samples.values()))

    def rows(self, seq: Sequence) -> list[SampleRow]:
        """A row for each sample."""
        return [sample.row for sample in self._on(seq)]

    def take(
        self, seq: Sequence, sampled: Sampled, first: int, scheduler: Scheduler
    ) -> list[Output]:
        """Give each sample its token, and a sequence of its own on the same blocks."""
        samples = self._on(seq)
        for sample in samples[1:]:
            sample.sequence = scheduler.fork(seq, (self.request_id, sample.index))
            sample.row.tokens = sample.sequence.tokens
        seq.width = 1
        return [
            self._give(sample, sampled, row, scheduler) for row, sample in enumerate(samples, first)
        ]

    def _on(self, seq: Sequence) -> list[Sample]:
        first = seq.age[1]
        return [self._samples[index] for index in range(first, first + seq.width)]

    def _give(self, sample: Sample, sampled: Sampled, i: int, scheduler: Scheduler) -> Output:
        error = sampled.errors.get(i)
        if error is None:
            try:
                text, reason = sample.take(sampled.tokens[i])
            except Exception as exception:  # of the tokenizer
                error = exception
        if error is not None:
            self._end(sample, scheduler, keep=False)
            return Output(self.request_id, sample.index, None, finish_reason="error", error=error)
        if reason is not None:
            self._end(sample, scheduler)
        return Output(
            self.request_id,
            sample.index,
            sampled.tokens[i],
            text,
            sampled.logprobs[i],
            sampled.top[i],
            sampled.full[i],
            reason,
        )

    def _end(self, sample: Sample, scheduler: Scheduler, *, keep: bool = True) -> None:
        scheduler.remove(sample.sequence, keep=keep)
        del self._samples[sample.index]
