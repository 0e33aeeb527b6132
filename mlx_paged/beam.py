"""Beam search: the most likely continuations of a prompt, on shared blocks.

A beam is a sequence like any other. Where it continues in two ways it is forked, and both go on
the same blocks; where no continuation survives it gives its blocks back. What beams have in common
is stored once, and nothing is moved when they change places (PagedAttention, Kwon et al. 2023,
section 4.4).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mlx_paged.checks import integer, number
from mlx_paged.request import FinishReason, Hypothesis, Output, Request
from mlx_paged.sampling import Sampled, SampleRow, SamplingParams
from mlx_paged.sequence import Sequence

if TYPE_CHECKING:
    from mlx_paged.generation import Prompt
    from mlx_paged.scheduler import Scheduler

EarlyStopping = bool | Literal["never"]
SAMPLING_ONLY = {field.name for field in fields(SamplingParams)} | {
    "params",
    "sampler",
    "logits_processors",
}
MAX_LENGTH_PENALTY = 16.0  # the number of tokens to its power must be a float


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How a beam search goes, as Hugging Face's `generate` understands these words.

    A step looks at all continuations of all live beams by one token, most likely first. Of the
    first `width`, those that end (with an end token, or by reaching `max_tokens`) become
    hypotheses; the first `width` that do not end live on. A hypothesis of n generated tokens, its
    end token counted, scores

        sum of log-probabilities / n ** length_penalty

    and the best `width` hypotheses are kept. The search is over at `max_tokens`, or once there are
    `width` hypotheses and

        early_stopping=True     at once;
        early_stopping=False    when the best live beam, scored as if it ended here, is not above
                                the worst hypothesis;
        early_stopping="never"  the same, but if length_penalty > 0 scored as if it got no less
                                likely up to `max_tokens`: then nothing better can be missed.

    Log-probabilities are the log-softmax, in float32, of the logits; they are summed in float64.

    Args:
        width: beams, at least 1.
        max_tokens: the most tokens to generate, at least 1.
        min_tokens: end tokens have no probability before this many tokens.
        length_penalty: above 0 favours long hypotheses, below 0 short ones.
        early_stopping: True, False or "never".
        stop_token_ids: tokens that end a hypothesis, besides the end-of-sequence tokens.
        ignore_eos: whether end-of-sequence tokens are tokens like any other.

    Raises:
        TypeError, ValueError: naming the argument, its value and what would be right.
    """

    width: int = 4
    max_tokens: int = 256
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        most = MAX_LENGTH_PENALTY
        object.__setattr__(self, "width", integer("width", self.width, 1))
        penalty = number("length_penalty", self.length_penalty, -most, most)
        object.__setattr__(self, "length_penalty", penalty)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {self.early_stopping!r}"
            )
        object.__setattr__(self, "stop_token_ids", self.sampling().stop_token_ids)

    @property
    def num_samples(self) -> int:
        """Streams of outputs: one, whatever the width."""
        return 1

    def check(self, vocab_size: int, num_ends: int) -> None:
        """Validate what depends on the vocabulary.

        Raises:
            ValueError: a stop token does not exist, or the vocabulary has fewer than `width`
                tokens besides `num_ends` end tokens.
        """
        self.sampling().check(vocab_size)
        if self.width > vocab_size - num_ends:
            raise ValueError(
                f"width must be at most {vocab_size - num_ends}, the vocabulary less its end "
                f"tokens, got {self.width}"
            )

    def sampling(self, candidates: int | None = None) -> SamplingParams:
        """The same for one row: report its most likely `candidates` tokens."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=candidates,
        )

    def score(self, logprob: float, length: int) -> float:
        """The score of `length` generated tokens whose log-probabilities sum to `logprob`."""
        return logprob / length**self.length_penalty


@dataclass(slots=True)
class Beam:
    """A live beam besides its sequence."""

    row: SampleRow
    logprob: float  # summed over the generated tokens
    candidates: list[tuple[int, float]] | None = None  # next tokens and their log-probabilities


class Continuation(NamedTuple):
    """A live beam and one more token."""

    sequence: Sequence
    token: int
    logprob: float  # of all generated tokens and this one


class BeamRequest(Request):
    """A beam search in the making.

    Its beams may be computed in different steps, as one may be preempted or kept waiting; the
    others wait for it.

    Args:
        request_id: the engine's.
        seq: the prompt.
        params: how to search.
        ends: the tokens that end a hypothesis.
        decode: tokens to text.
    """

    def __init__(
        self,
        request_id: int,
        seq: Sequence,
        params: BeamParams,
        ends: frozenset[int],
        decode: Callable[[SequenceOf[int]], str],
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.hypotheses: list[Hypothesis] = []  # the best first
        self._ends = ends
        # So many tokens of each row hold its best `width` that do not end it.
        self._sampling = params.sampling(params.width + len(ends))
        self._decode = decode
        self._next_index = seq.age[1] + 1
        self._beams = {seq: Beam(self._row(seq), 0.0)}  # the most likely first

    @property
    def sequences(self) -> list[Sequence]:
        """The live beams' sequences, the most likely first."""
        return list(self._beams)

    def rows(self, seq: Sequence) -> list[SampleRow]:
        """One row, whose log-probabilities decide."""
        beam = self._beams[seq]
        beam.candidates = None  # of a beam that was preempted while it waited
        return [beam.row]

    def take(
        self, seq: Sequence, sampled: Sampled, first: int, scheduler: Scheduler
    ) -> list[Output]:
        """Note a beam's candidates; once all beams have theirs, choose who lives on."""
        beam = self._beams.get(seq)
        if beam is None:
            return []  # another beam's error ended the search in this step
        error = sampled.errors.get(first)
        if error is not None:
            self.end(scheduler, keep=False)
            return [Output(self.request_id, 0, None, finish_reason="error", error=error)]
        seq.width = 1
        beam.candidates = sampled.top[first]
        if any(b.candidates is None or s.num_uncomputed for s, b in self._beams.items()):
            return []
        survivors = self._choose()
        if survivors:
            self._continue(survivors, scheduler)
            return []
        self.end(scheduler)
        return [self._output()]

    def end(self, scheduler: Scheduler, *, keep: bool = True) -> None:
        """Free all beams."""
        for seq in self._beams:
            scheduler.remove(seq, keep=keep)
        self._beams = {}

    def _row(self, seq: Sequence) -> SampleRow:
        return SampleRow(
            params=self._sampling,
            seed=0,
            tokens=seq.tokens,
            prompt_len=seq.prompt_len,
            eos_token_ids=self._ends,
        )

    def _choose(self) -> list[Continuation]:
        """Take in hypotheses; return the continuations that live on, none if the search is over."""
        width = self.params.width
        length = next(iter(self._beams)).num_generated + 1
        at_limit = length == self.params.max_tokens
        ranked = [
            Continuation(seq, token, beam.logprob + logprob)
            for seq, beam in self._beams.items()
            for token, logprob in beam.candidates or ()
        ]
        ranked.sort(key=lambda continuation: -continuation.logprob)
        survivors: list[Continuation] = []
        for rank, continuation in enumerate(ranked):
            is_end = continuation.token in self._ends
            if is_end or at_limit:
                if rank < width:
                    self._add_hypothesis(continuation, "stop" if is_end else "length")
            elif len(survivors) < width:
                survivors.append(continuation)
        return [] if not survivors or self._is_over(survivors[0], length) else survivors

    def _add_hypothesis(self, found: Continuation, reason: FinishReason) -> None:
        seq = found.sequence
        tokens = (*seq.tokens[seq.prompt_len :], found.token)
        score = self.params.score(found.logprob, len(tokens))
        self.hypotheses.append(Hypothesis(tokens, found.logprob, score, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)  # of equals, the first wins
        del self.hypotheses[self.params.width :]

    def _is_over(self, best: Continuation, length: int) -> bool:
        """Whether the hypotheses are final, given the best beam that could live on."""
        params = self.params
        if len(self.hypotheses) < params.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = params.max_tokens
        return params.score(best.logprob, length) <= self.hypotheses[-1].score

    def _continue(self, survivors: list[Continuation], scheduler: Scheduler) -> None:
        """Fork the beams that go on in several ways, free those that do not go on."""
        before, self._beams = self._beams, {}
        for parent, _, logprob in survivors:
            seq, row = parent, before[parent].row
            if seq in self._beams:
                seq = scheduler.fork(parent, (self.request_id, self._next_index))
                row = self._row(seq)
                self._next_index += 1
            self._beams[seq] = Beam(row, logprob)
        for seq in before.keys() - self._beams.keys():
            scheduler.remove(seq, keep=False)
        for seq, survivor in zip(self._beams, survivors, strict=True):
            seq.tokens.append(survivor.token)

    def _output(self) -> Output:
        found = tuple(
            replace(one, text=self._decode([t for t in one.tokens if t not in self._ends]))
            for one in self.hypotheses
        )
        return Output(
            self.request_id, 0, None, finish_reason=found[0].finish_reason, hypotheses=found
        )


def beam_search(
    model: Any, tokenizer: Any, prompt: Prompt, width: int = 4, **kwargs: Any
) -> list[Hypothesis]:
    """The most likely continuations of a prompt, the best first.

        model, tokenizer = load("tiny")
        for found in beam_search(model, tokenizer, "Anna lives in", width=4, max_tokens=8):
            print(found.score, found.text)

    Args:
        model, tokenizer: what `load` returned.
        prompt: text, token ids, or chat messages.
        width: beams, and hypotheses returned.
        kwargs: the other fields of `BeamParams` (max_tokens, length_penalty, early_stopping and so
            on), `cache_salt`, and the options of `Engine`. All calls on a model use one engine.

    Raises:
        TypeError: an argument is unknown or of the wrong type.
        ValueError: an argument is out of its range, or the search cannot fit the model or the pool.
        RuntimeError: the model's logits are not finite numbers.
    """
    from mlx_paged.arguments import check_model, read_arguments, wrap_tokenizer
    from mlx_paged.generation import checked, encode_prompt
    from mlx_paged.shared_engine import engine_of

    model, tokenizer = check_model(model), wrap_tokenizer(tokenizer)
    names = {field.name for field in fields(BeamParams)}
    own = {name: value for name, value in kwargs.items() if name in names}
    others = {name: value for name, value in kwargs.items() if name not in names}
    for name in others:
        if name in SAMPLING_ONLY:
            raise TypeError(
                f"beam_search() takes no {name}: it draws nothing and changes no logits"
            )
    params = BeamParams(width=width, **own)
    arguments = read_arguments(beam_search, model, None, others)
    shared = engine_of(model, tokenizer, arguments.engine)
    with shared.call() as call:
        ids = encode_prompt(shared.engine, tokenizer, prompt)
        call.add(tokenizer, ids, params, **arguments.request)
        hypotheses = None
        while outputs := call.outputs():
            hypotheses = checked(outputs[-1]).hypotheses
    assert hypotheses is not None
    return list(hypotheses)
