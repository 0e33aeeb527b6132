"""Sampling: what a request asks for, and the next token of every row of a step.

The options follow mlx-lm's ``make_sampler`` and ``make_logits_processors`` in name, order and
meaning. For each row: logit bias, repetition, presence and frequency penalty, the row's own
logits processors, and end tokens forbidden before ``min_tokens``; then top-p, min-p and top-k
on the log-probabilities; then temperature and the draw.

Reported log-probabilities are, as in mlx-lm, the log-softmax (natural logarithm, computed in
float32) of the logits after bias, penalties and processors, before temperature and filters.

A draw depends on the row's logits, its seed and the number of tokens it has generated, and on
nothing else: not on the batch, not on earlier draws, not on MLX's global random state.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.checks import flag, integer, number

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_MASK64 = (1 << 64) - 1
SEED_LIMIT = 1 << 63


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a sequence of token ids, got {value!r}")
    return tuple(integer(f"{name}[{i}]", token, 0) for i, token in enumerate(value))


def _stop_strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"stop must be a string or a sequence of strings, got {value!r}")
    stops = tuple(value)
    for i, text in enumerate(stops):
        if not isinstance(text, str):
            raise TypeError(f"stop[{i}] must be a string, got {text!r}")
        if not text:
            raise ValueError(f"stop[{i}] must have at least one character, got ''")
    return stops


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    bias = {}
    for token, amount in value.items():
        token = integer("a token id in logit_bias", token, 0)
        forbids = isinstance(amount, Real) and amount == -math.inf
        bias[token] = -math.inf if forbids else number(f"logit_bias[{token}]", amount)
    return bias


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Args:
        max_tokens: the most tokens to generate, at least 1.
        min_tokens: the end-of-sequence and stop tokens are forbidden before this many tokens.
        temperature: 0 is greedy: the most likely token, whatever the filters say.
        top_p: keep the most likely tokens that together reach this probability. 0 and 1: off.
        top_k: keep the ``top_k`` most likely tokens. 0, and any number from the vocabulary's
            size on: off.
        min_p: keep tokens at least ``min_p`` times as likely as the most likely one. 0: off.
        repetition_penalty: for each token among the last ``repetition_context_size`` (prompt
            included), divide a positive logit by it and multiply a negative one with it (Keskar
            et al. 2019, "CTRL", section 4.1). None, 0 and 1: off.
        presence_penalty: subtracted once from the logit of each token among the last
            ``presence_context_size``.
        frequency_penalty: the same, once per occurrence in ``frequency_context_size``.
        logit_bias: added to the logits of these token ids; ``-inf`` forbids a token.
        stop_token_ids: tokens that end the request, besides the end-of-sequence tokens.
        stop: strings that end the request; one string or several. The text ends before them.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: None: report none; 0: the chosen token's; k: also the k most likely tokens'.
        seed: the same seed gives the same tokens. None: a fresh seed for each request.
        n: samples of the prompt. Sample ``i`` uses ``seed + i``, so n samples are n requests
            of one sample with the seeds ``seed``, ``seed + 1``, and so on.
        best_of: make this many samples and keep the ``n`` most likely ones.

    Raises:
        TypeError, ValueError: naming the argument, its value and what would be right.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None

    def __post_init__(self) -> None:
        self._set("max_tokens", integer("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", integer("min_tokens", self.min_tokens, 0))
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        self._set("temperature", number("temperature", self.temperature, 0.0))
        self._set("top_p", number("top_p", self.top_p, 0.0, 1.0))
        self._set("top_k", integer("top_k", self.top_k, 0))
        self._set("min_p", number("min_p", self.min_p, 0.0, 1.0))
        if self.repetition_penalty is not None:
            self._set(
                "repetition_penalty", number("repetition_penalty", self.repetition_penalty, 0.0)
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                self._set(name, number(name, getattr(self, name)))
        for name in (
            "repetition_context_size",
            "presence_context_size",
            "frequency_context_size",
        ):
            self._set(name, integer(name, getattr(self, name), 1))
        if self.logit_bias is not None:
            self._set("logit_bias", _logit_bias(self.logit_bias))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("stop", _stop_strings(self.stop))
        flag("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            self._set("logprobs", integer("logprobs", self.logprobs, 0))
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed, 0, SEED_LIMIT - 1))
        self._set("n", integer("n", self.n, 1))
        if self.best_of is not None:
            self._set("best_of", integer("best_of", self.best_of, 1))
            if self.best_of < self.n:
                raise ValueError(f"best_of must be at least n ({self.n}), got {self.best_of}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_samples(self) -> int:
        """Samples to generate: ``best_of`` where it is given, else ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def has_penalties(self) -> bool:
        """Whether a repetition, presence or frequency penalty changes any logit."""
        return bool(
            self.repetition_penalty not in (None, 0.0, 1.0)
            or self.presence_penalty
            or self.frequency_penalty
        )

    def check(self, vocab_size: int) -> None:
        """Validate what depends on the vocabulary.

        Raises:
            ValueError: a token id of ``logit_bias`` or ``stop_token_ids`` is not in
                ``0 .. vocab_size - 1``, or ``logprobs`` is more than ``vocab_size``.
        """
        for name, ids in (
            ("logit_bias", self.logit_bias or {}),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} must name token ids from 0 to {vocab_size - 1}, got {token}"
                    )
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ValueError(
                f"logprobs must be at most the vocabulary's {vocab_size}, got {self.logprobs}"
            )


def fresh_seed() -> int:
    """A random 63-bit seed, for a request that names none."""
    return secrets.randbits(63)


def _mix64(z: int) -> int:
    """SplitMix64's step (Steele, Lea and Flood 2014): a bijection of 64-bit integers."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def draw_key(seed: int, index: int) -> tuple[int, int]:
    """The random key (two 32-bit words) of the token that is generated as number ``index``.

    Within one seed no two indices share a key. Seeds are taken modulo 2**64.
    """
    z = _mix64((_mix64(seed & _MASK64) + index) & _MASK64)
    return z >> 32, z & 0xFFFFFFFF


class _Plan(NamedTuple):
    """What is done to a row. Rows with equal plans go through the same operations together."""

    greedy: bool
    top_p: bool
    min_p: bool
    top_k: int
    biased: bool
    penalised: bool
    logprobs: int | None
    scored: bool  # log-probabilities are wanted, or needed to draw
    full: bool


@dataclass(slots=True, kw_only=True)
class SampleRow:
    """One sequence's side of sampling. Make it once; use it in every step.

    Args:
        params: the request's options.
        seed: the sample's own seed: the request's seed plus the sample's number.
        tokens: prompt and generated ids. Keep passing the same growing list: it is read
            anew in each step, so that a row needs no update between steps.
        prompt_len: how many of ``tokens`` are the prompt.
        eos_token_ids: forbidden before ``min_tokens``, unless ``ignore_eos``.
        sampler: called instead of temperature and filters, as mlx-lm does: with
            log-probabilities ``[1, vocab]``, float32; returns one token id.
        logits_processors: called in order, after bias and penalties, with the ids
            ``[len(tokens)]`` and the logits ``[1, vocab]``, float32; each returns new logits.
        want_full_logprobs: report the whole vector of log-probabilities.
    """

    params: SamplingParams
    seed: int
    tokens: Sequence[int]
    prompt_len: int
    eos_token_ids: Collection[int] = ()
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    want_full_logprobs: bool = False
    plan: _Plan = field(init=False, repr=False)
    plain: bool = field(init=False, repr=False)
    bias: dict[int, float] = field(init=False, repr=False)
    end_bias: dict[int, float] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        params = self.params
        greedy = params.temperature == 0.0
        wanted = (
            params.logprobs is not None or params.best_of is not None or self.want_full_logprobs
        )
        self.bias = dict(params.logit_bias or {})
        ends = set(params.stop_token_ids)
        if not params.ignore_eos:
            ends.update(self.eos_token_ids)
        self.end_bias = dict.fromkeys(sorted(ends), -math.inf)
        self.plan = _Plan(
            greedy=greedy,
            top_p=not greedy and 0.0 < params.top_p < 1.0,
            min_p=not greedy and params.min_p > 0.0,
            top_k=0 if greedy else params.top_k,
            biased=bool(self.bias),
            penalised=params.has_penalties,
            logprobs=params.logprobs,
            scored=wanted or not greedy or self.sampler is not None,
            full=self.want_full_logprobs,
        )
        self.plain = not (
            self.plan.scored
            or self.plan.biased
            or self.plan.penalised
            or self.is_custom
            or (params.min_tokens and self.end_bias)
        )

    @property
    def is_custom(self) -> bool:
        """Whether the row brings callables of its own."""
        return self.sampler is not None or bool(self.logits_processors)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far: the index of the token to be drawn."""
        return len(self.tokens) - self.prompt_len

    @property
    def forgets(self) -> bool:
        """Whether its next token depends on the logits and the index alone, not on ``tokens``."""
        return not (self.plan.penalised or self.is_custom or self.params.min_tokens)

    @property
    def forbids_ends(self) -> bool:
        """Whether the next token must not end the sequence."""
        return bool(self.end_bias) and self.num_generated < self.params.min_tokens


@dataclass(slots=True)
class Sampled:
    """The outcome of a step, one entry per row.

    Attributes:
        tokens: the chosen ids; -1 for a row in ``errors``.
        logprobs: the chosen token's log-probability, where ``logprobs`` or ``best_of`` or the
            full vector was asked for.
        top: the ``params.logprobs`` most likely (id, log-probability), most likely first (equal
            ones by id), where ``params.logprobs`` is at least 1.
        full: the row's log-probabilities ``[vocab]``, float32, where they were asked for.
        errors: what went wrong, by row: an exception of the row's own sampler or processor, a
            token id out of the vocabulary, or logits from which no token can be chosen.
    """

    tokens: list[int]
    logprobs: list[float | None]
    top: list[list[tuple[int, float]] | None]
    full: list[mx.array | None]
    errors: dict[int, Exception]


@dataclass(slots=True, eq=False)
class _Group:
    """Rows that were sampled together; every array is lazy."""

    indices: list[int]  # rows of the step
    rows: Sequence[SampleRow]
    tokens: mx.array  # [rows]
    chosen: mx.array  # [rows]: the token's log-probability; its logit in an unscored group
    is_custom: bool = False
    top: tuple[mx.array, mx.array] | None = None  # ids and log-probabilities [rows, k]
    full: list[mx.array] | None = None  # [vocab] each

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.chosen, *(self.top or ()), *(self.full or ())]


class Pending:
    """A step's tokens as lazy arrays: ``launch`` starts their computation, ``collect`` waits.

    Rows with callables of their own are evaluated apart from the rest, and after it: a lazy
    operation that fails then is known to be theirs. (MLX reports a failure to one evaluation
    only, and takes the arrays for computed from then on: there is no second try.)
    """

    __slots__ = ("_count", "_errors", "_groups", "_logits")

    def __init__(
        self, logits: mx.array, groups: list[_Group], errors: dict[int, Exception]
    ) -> None:
        self._logits = logits
        self._count = logits.shape[0]
        self._groups = groups
        self._errors = errors

    @property
    def tokens(self) -> mx.array | None:
        """The tokens ``[rows]``, not yet computed, unless rows are sampled in several ways."""
        return self._groups[0].tokens if len(self._groups) == 1 and not self._errors else None

    @property
    def _shared(self) -> list[mx.array]:
        """What needs no caution, and the logits: their failure is no single row's."""
        arrays = [] if len(self._groups) == 1 and not self._custom else [self._logits]
        for group in self._groups:
            if not group.is_custom:
                arrays += group.arrays
        return arrays

    @property
    def _custom(self) -> list[_Group]:
        return [group for group in self._groups if group.is_custom]

    def launch(self) -> None:
        """Start the computation and return at once; rows with callables wait for `collect`."""
        mx.async_eval(self._shared)

    def collect(self) -> Sampled:
        """Wait for the tokens.

        Raises:
            Exception: whatever evaluating the logits raises. What a row's own callables
                raise is in ``errors`` instead.
        """
        mx.eval(self._shared)
        for group in self._custom:
            self._attempt(group)
        count = self._count
        sampled = Sampled(
            [-1] * count, [None] * count, [None] * count, [None] * count, self._errors
        )
        for group in self._groups:
            _fill(sampled, group, self._logits.shape[1])
        return sampled

    def _attempt(self, group: _Group) -> None:
        try:
            mx.eval(group.arrays)
        except Exception as error:
            self._errors[group.indices[0]] = error
            self._groups.remove(group)


def prepare(logits: mx.array, rows: Sequence[SampleRow], ahead: int = 0) -> Pending:
    """Build the graph of a step's tokens, without computing anything.

    Args:
        logits: ``[rows, vocab]``, float32, float16 or bfloat16; not changed.
        rows: one for each row of ``logits``.
        ahead: tokens that each row will have got by then; for rows that ``forgets`` only.

    Raises:
        ValueError: ``logits`` is not of that shape.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits must be [{len(rows)}, vocab], got {list(logits.shape)}")
    count = len(rows)
    if not count:
        return Pending(logits, [], {})
    if all(row.plain for row in rows):
        tokens = mx.argmax(logits, axis=-1)
        group = _Group(list(range(count)), rows, tokens, _at(logits, tokens))
        return Pending(logits, [group], {})

    batches: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        # A row with callables is a batch of its own, so that its failure stays its own.
        key = i if row.is_custom else (row.plan, row.forbids_ends)
        batches.setdefault(key, []).append(i)
    groups: list[_Group] = []
    errors: dict[int, Exception] = {}
    for indices in batches.values():
        part = logits if len(indices) == count else logits[mx.array(indices)]
        members = [rows[i] for i in indices]
        try:
            groups.append(_build(part, indices, members, ahead))
        except Exception as error:
            if not members[0].is_custom:
                raise
            errors[indices[0]] = error
    return Pending(logits, groups, errors)


def sample(logits: mx.array, rows: Sequence[SampleRow]) -> Sampled:
    """The next token of every row of ``logits`` (see ``prepare``), now."""
    return prepare(logits, rows).collect()


def _build(
    logits: mx.array, indices: list[int], rows: Sequence[SampleRow], ahead: int = 0
) -> _Group:
    """One batch of rows with equal plans: logits ``[rows, vocab]`` to a group."""
    plan, sampler = rows[0].plan, rows[0].sampler
    scores = _process(logits.astype(mx.float32), rows)
    # Subtracting the same number from a row can only round unequal logits to equal ones, so
    # the greedy token is read off the logits.
    greedy = mx.argmax(scores, axis=-1) if plan.greedy and sampler is None else None
    if plan.scored:
        scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    if sampler is not None:
        tokens = _call_sampler(sampler, scores)
    else:
        tokens = _draw(scores, rows, ahead) if greedy is None else greedy
    # A user's id may be out of range, and gathers are not checked.
    inside = tokens if sampler is None else mx.clip(tokens, 0, scores.shape[-1] - 1)
    group = _Group(indices, rows, tokens, _at(scores, inside), rows[0].is_custom)
    if plan.logprobs:
        ids = _most_likely(scores, plan.logprobs)
        group.top = ids, mx.take_along_axis(scores, ids, axis=-1)
    if plan.full:
        group.full = [scores[i] for i in range(len(rows))]
    return group


def _at(scores: mx.array, tokens: mx.array) -> mx.array:
    """``scores[i, tokens[i]]``: ``[rows, vocab]``, ``[rows]`` to ``[rows]``."""
    return mx.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]


def _most_likely(scores: mx.array, k: int) -> mx.array:
    """The ids of the ``k`` largest scores of each row, in no order: ``[rows, k]``."""
    k = min(k, scores.shape[-1])
    return mx.argpartition(-scores, kth=k - 1, axis=-1)[:, :k]


def _process(logits: mx.array, rows: Sequence[SampleRow]) -> mx.array:
    plan = rows[0].plan
    if plan.biased:
        logits = _add_bias(logits, [row.bias for row in rows])
    if plan.penalised:
        logits = _penalise(logits, rows)
    for processor in rows[0].logits_processors:
        logits = _call_processor(processor, rows[0].tokens, logits)
    if rows[0].forbids_ends:  # last, so that no processor can allow them again
        logits = _add_bias(logits, [row.end_bias for row in rows])
    return logits


def _add_bias(logits: mx.array, biases: Sequence[Mapping[int, float]]) -> mx.array:
    """Add to single logits: one scatter over all rows' (row, token) pairs."""
    at = np.repeat(np.arange(len(biases), dtype=np.int32), [len(bias) for bias in biases])
    ids = np.array([token for bias in biases for token in bias], dtype=np.int32)
    amounts = np.array([x for bias in biases for x in bias.values()], dtype=np.float32)
    return logits.at[mx.array(at), mx.array(ids)].add(mx.array(amounts))


def _penalise(logits: mx.array, rows: Sequence[SampleRow]) -> mx.array:
    """Repetition, presence and frequency penalties: one gather and one scatter over all rows."""
    at: list[int] = []
    ids: list[int] = []
    factors: list[float] = []
    shifts: list[float] = []
    for i, row in enumerate(rows):
        factor, shift = _penalties(row.params, row.tokens)
        tokens = factor.keys() | shift.keys()
        at += [i] * len(tokens)
        ids += tokens
        factors += [factor.get(token, 1.0) for token in tokens]
        shifts += [shift.get(token, 0.0) for token in tokens]
    if not ids:
        return logits
    where = mx.array(at), mx.array(ids)
    scale = mx.array(factors)
    values = logits[where]
    values = mx.where(values < 0, values * scale, values / scale) - mx.array(shifts)
    logits = logits[:]  # the assignment rebinds this handle, and not the caller's
    logits[where] = values
    return logits


def _penalties(
    params: SamplingParams, tokens: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """By token id: what to scale its logit with, and what to subtract then."""
    factor: dict[int, float] = {}
    shift: dict[int, float] = {}
    if params.repetition_penalty:
        window = tokens[-params.repetition_context_size :]
        factor = dict.fromkeys(window, params.repetition_penalty)
    if params.presence_penalty:
        window = tokens[-params.presence_context_size :]
        shift = dict.fromkeys(window, params.presence_penalty)
    if params.frequency_penalty:
        for token in tokens[-params.frequency_context_size :]:
            shift[token] = shift.get(token, 0.0) + params.frequency_penalty
    return factor, shift


def _call_processor(
    processor: LogitsProcessor, tokens: Sequence[int], logits: mx.array
) -> mx.array:
    processed = processor(mx.array(list(tokens)), logits)
    if not isinstance(processed, mx.array) or processed.shape != logits.shape:
        got = list(processed.shape) if isinstance(processed, mx.array) else repr(processed)
        raise ValueError(
            f"a logits processor must return logits {list(logits.shape)}, got {got}: {processor!r}"
        )
    return processed.astype(mx.float32)


def _call_sampler(sampler: Sampler, logprobs: mx.array) -> mx.array:
    """The sampler's token as ``[1]``, int64: wide enough to see any id out of range."""
    token: Any = sampler(logprobs)
    if isinstance(token, int | np.integer | np.ndarray):
        token = mx.array(np.asarray(token))
    if not isinstance(token, mx.array):
        raise ValueError(f"a sampler must return one integer token id, got {token!r}: {sampler!r}")
    if token.size != 1 or not mx.issubdtype(token.dtype, mx.integer):
        raise ValueError(
            f"a sampler must return one integer token id, "
            f"got {token.dtype} {list(token.shape)}: {sampler!r}"
        )
    return token.reshape(1).astype(mx.int64)


def _draw(logprobs: mx.array, rows: Sequence[SampleRow], ahead: int) -> mx.array:
    """Filter and draw one token per row: ``[rows, vocab]`` to ``[rows]``.

    The noise belongs to token ids and is drawn for the whole vocabulary, so that the draw does
    not depend on the order in which the filter finds the candidates.
    """
    uniform = _uniform(rows, logprobs.shape[-1], ahead)
    kept, ids = _filter(logprobs, rows)
    if ids is not None:
        uniform = mx.take_along_axis(uniform, ids, axis=-1)
    # Below 1e-30 the reciprocal would overflow; the draw is greedy long before.
    temperature = mx.maximum(_column(rows, "temperature"), 1e-30)
    # Gumbel-max: argmax(log p - log(-log u)) has the distribution p. With 1 - u for u, the
    # large values that decide the draw come from small u, where float32 is finest.
    noise = -mx.log(-mx.log1p(-uniform))
    best = mx.argmax(kept * (1.0 / temperature) + noise, axis=-1)
    return best if ids is None else _at(ids, best)


def _filter(logprobs: mx.array, rows: Sequence[SampleRow]) -> tuple[mx.array, mx.array | None]:
    """Top-k, top-p and min-p: the candidates' log-probabilities, -inf where filtered out.

    All three keep the head of the same order, so top-k comes first and leaves the others only
    ``[rows, k]`` to look at. The second array has the candidates' ids; None: all, in order.
    """
    plan, ids = rows[0].plan, None
    if 0 < plan.top_k < logprobs.shape[-1]:
        ids = _most_likely(logprobs, plan.top_k)
        logprobs = mx.take_along_axis(logprobs, ids, axis=-1)
    kept = logprobs
    if plan.top_p:
        kept = mx.where(_outside_top_p(logprobs, _column(rows, "top_p")), -math.inf, kept)
    if plan.min_p:
        floor = mx.max(logprobs, axis=-1, keepdims=True) + mx.log(_column(rows, "min_p"))
        kept = mx.where(logprobs < floor, -math.inf, kept)
    return kept, ids


def _column(rows: Sequence[SampleRow], name: str) -> mx.array:
    """An option of every row as ``[rows, 1]``, float32."""
    return mx.array([[getattr(row.params, name)] for row in rows], dtype=mx.float32)


def _uniform(rows: Sequence[SampleRow], vocab_size: int, ahead: int = 0) -> mx.array:
    """``[rows, vocab]`` in (0, 1): each row from its own key, whatever the other rows are."""
    keys = np.array(
        [draw_key(row.seed, row.num_generated + ahead) for row in rows], dtype=np.uint32
    )
    draw = mx.vmap(lambda key: mx.random.uniform(shape=(vocab_size,), key=key))
    return mx.maximum(draw(mx.array(keys)), 2.0**-33)  # zero would be infinite noise


def _outside_top_p(logprobs: mx.array, top_p: mx.array) -> mx.array:
    """Which tokens have ``top_p`` (``[rows, 1]``) of the probability above them.

    As in mlx-lm, the token that crosses the line is kept, and so are its equals.
    """
    ascending = mx.sort(logprobs, axis=-1)
    mass_above = mx.cumsum(mx.exp(ascending), axis=-1, reverse=True, inclusive=False)
    dropped = mx.sum(mass_above >= top_p, axis=-1, keepdims=True)
    return logprobs < mx.take_along_axis(ascending, dropped, axis=-1)


def _fill(sampled: Sampled, group: _Group, vocab_size: int) -> None:
    """Write an evaluated group's rows to the step's outcome."""
    tokens: Any = group.tokens.tolist()
    chosen: Any = group.chosen.tolist()
    plan = group.rows[0].plan
    if not plan.scored and len(tokens) == len(sampled.tokens) and all(map(math.isfinite, chosen)):
        sampled.tokens = tokens  # greedy rows and nothing else: the usual step
        return
    top: Any = group.top and [array.tolist() for array in group.top]
    reported = plan.logprobs is not None or plan.full or group.rows[0].params.best_of is not None
    for j, i in enumerate(group.indices):
        error = _fault(tokens[j], chosen[j], group.rows[j], vocab_size)
        if error is not None:
            sampled.errors[i] = error
            continue
        sampled.tokens[i] = tokens[j]
        if reported:
            sampled.logprobs[i] = chosen[j]
        if top is not None:
            pairs = zip(top[0][j], top[1][j], strict=True)
            sampled.top[i] = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
        if group.full is not None:
            sampled.full[i] = group.full[j]


def _fault(token: int, chosen: float, row: SampleRow, vocab_size: int) -> Exception | None:
    """What is wrong with a row's token, if anything."""
    if not 0 <= token < vocab_size:
        return ValueError(
            f"the sampler must return a token id from 0 to {vocab_size - 1}, got {token}"
        )
    if math.isnan(chosen) or chosen == math.inf:
        return RuntimeError("no token can be chosen: the logits are not finite numbers")
    if chosen == -math.inf and row.sampler is None:
        return RuntimeError("no token can be chosen: the logits forbid every token")
    return None
