"""Samples of many prompts, given out as they finish.

A prompt's samples are drawn with the seeds s, s + 1, s + 2 and so on, where s is the prompt's own
"seed" or follows from the call's seed and the prompt's number. So which samples are made, in which
order and how many at once has no say in what they are: a call that leaves out what an earlier one
has made gives the rest. Only rounding has: in another batch a log-probability may differ in its
last digits, and of two tokens that are equally likely up to rounding the other one may win.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_paged.arguments import check_model, read_arguments, wrap_tokenizer
from mlx_paged.generation import Prompt, encode_prompt, end_tokens
from mlx_paged.jobs import Job, read_job, seed_of
from mlx_paged.request import FinishReason, Output
from mlx_paged.responses import Answer, best
from mlx_paged.sampling import SamplingParams
from mlx_paged.shared_engine import Call, engine_of

MAX_FAILED = 100  # failed prompts given out together

IsDone = Callable[[int, int | None], bool]


@dataclass(frozen=True, kw_only=True)
class BatchSample:
    """One sample, or what went wrong instead.

    Attributes:
        number: of its prompt.
        sample: 0 to n - 1, with `best_of` the most likely first; None if the whole prompt failed.
        id: of the prompt, if it has one.
        text: up to a stop string or the end.
        token_ids: without the token that ended it.
        finish_reason: "stop", "length" or "error".
        seed: what gives this very sample.
        prompt_tokens: tokens of the prompt.
        logprobs: of `token_ids`, if asked for.
        top_logprobs: for each of them the most likely tokens, if asked for.
        mean_logprob: what `best_of` ranked by.
        error: what went wrong, if finish_reason is "error".
    """

    number: int
    sample: int | None
    id: Any = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "error"
    seed: int | None = None
    prompt_tokens: int = 0
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    mean_logprob: float | None = None
    error: Exception | None = None


def batch_sample(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt | Mapping[str, Any]],
    *,
    seed: int = 0,
    **kwargs: Any,
) -> Iterator[BatchSample]:
    """Sample many prompts, many at once.

        for sample in batch_sample(model, tokenizer, ["Hello!", "Bye!"], n=4, temperature=0.8):
            print(sample.number, sample.sample, sample.text)

    Args:
        model, tokenizer: what `load` returned.
        prompts: read as they are needed. Each is text, token ids, chat messages, or a mapping with
            one of "prompt" (text), "token_ids" and "messages", and beside it, if need be, "id",
            which its samples carry, and fields of `SamplingParams` in the place of the call's.
        seed: of all prompts without a seed of their own.
        kwargs: the fields of `SamplingParams`, or all of them as `params`; `cache_salt`; mlx-lm's
            `sampler` and `logits_processors`; the options of `Engine`. All calls on a model use
            one engine. n and best_of may be larger than the engine is wide.

    Returns:
        An iterator of samples in the order in which they finish. A prompt that cannot be sampled
        gives one with an error, and does not stop the others. Closing the iterator ends what is
        going on.

    Raises:
        TypeError, ValueError: one of the arguments, besides the prompts, is wrong.
    """
    jobs = (read_job(number, item) for number, item in enumerate(prompts))
    sampler = BatchSampler(model, tokenizer, jobs, {"seed": seed, **kwargs})
    return (sample for finished in sampler for sample in finished)


# How it is done


@dataclass
class _Task:
    """A job in the making: samples `to_make` are drawn, samples `to_give` are given out."""

    job: Job
    params: SamplingParams  # with the seed of the first sample
    ids: list[int]
    ends: frozenset[int]
    to_make: list[int]
    to_give: list[int]
    answers: dict[int, Answer] = field(default_factory=dict)  # unfinished, or not ranked yet
    num_finished: int = 0
    error: Exception | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_finished == len(self.to_make)

    def params_of(self, part: _Part) -> SamplingParams:
        """What the engine is asked for: samples of these numbers, which it does not rank."""
        params = self.params
        assert params.seed is not None
        needs_logprobs = params.best_of is not None and params.logprobs is None
        return replace(
            params,
            n=part.count,
            best_of=None,
            seed=params.seed + part.first,
            logprobs=0 if needs_logprobs else params.logprobs,
        )

    def finish(self, index: int, error: Exception | None) -> list[BatchSample]:
        """What can be given out now that a sample has finished."""
        self.num_finished += 1
        if self.params.best_of is None:
            return [self._sample(index, self.answers.pop(index), error)]
        self.error = self.error or error
        if not self.is_finished:
            return []
        if self.error is not None:
            return [failed(self.job, self.error)]
        ranked = best(list(self.answers.values()), self.params.n)
        return [self._sample(rank, ranked[rank], None) for rank in self.to_give]

    def _sample(self, number: int, answer: Answer, error: Exception | None) -> BatchSample:
        params = self.params
        assert params.seed is not None
        return BatchSample(
            number=self.job.number,
            sample=number,
            id=self.job.id,
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason or "error",
            seed=params.seed + answer.index,
            prompt_tokens=len(self.ids),
            logprobs=None if params.logprobs is None else answer.logprobs,
            top_logprobs=answer.top_logprobs if params.logprobs else None,
            mean_logprob=None if params.best_of is None else answer.mean_logprob,
            error=error,
        )


@dataclass
class _Part:
    """Consecutive samples of a task: one request of the engine."""

    task: _Task
    first: int
    count: int


def failed(job: Job, error: Exception) -> BatchSample:
    """What a job gives that cannot be sampled."""
    return BatchSample(number=job.number, sample=None, id=job.id, error=error)


class BatchSampler:
    """Samples jobs; iterate once, for lists of samples that finished together.

    Args:
        model, tokenizer: what `load` returned.
        jobs: read as they are needed.
        given: the keyword arguments of `batch_sample`.
        is_done: whether a sample of the job of that number is there already; None: all of it.

    Attributes:
        jobs_done: so far, with those that failed or were there already.
        tokens: generated so far.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        jobs: Iterable[Job],
        given: Mapping[str, Any],
        is_done: IsDone = lambda number, sample: False,
    ) -> None:
        options = {"seed": 0, **given}
        limit = options.pop("max_tokens", None)
        self._model = check_model(model)  # the engine has a weak reference only
        self._tokenizer = wrap_tokenizer(tokenizer)
        self._seed = _checked_seed(options.pop("seed"))
        self._arguments = read_arguments(batch_sample, self._model, limit, options)
        self._shared = engine_of(self._model, self._tokenizer, self._arguments.engine)
        self._is_done = is_done
        self._parts = self._plan_all(jobs)
        self._requests: dict[int, _Part] = {}
        self._unfinished = 0  # samples of these
        self.jobs_done = 0
        self.tokens = 0

    @property
    def pool_figures(self) -> str:
        """Blocks in use, and blocks that could be found again."""
        stats = self._shared.engine.stats
        return f"{stats.blocks_used}/{stats.num_blocks} blocks, {stats.blocks_cached} cached"

    def __iter__(self) -> Iterator[list[BatchSample]]:
        with self._shared.call() as call:
            while True:
                failures = self._fill(call)
                if failures:
                    yield failures
                outputs = call.outputs()
                if not outputs and not failures:
                    return
                finished = [sample for output in outputs for sample in self._take(output)]
                if finished:
                    yield finished

    def _fill(self, call: Call) -> list[BatchSample]:
        """Queue enough for no place of the engine to stay empty; return what failed."""
        failures: list[BatchSample] = []
        while self._unfinished < 2 * self._width and len(failures) < MAX_FAILED:
            part = next(self._parts, None)
            if part is None:
                break
            failure = part if isinstance(part, BatchSample) else self._start(call, part)
            if failure is not None:
                failures.append(failure)
                self.jobs_done += 1
        return failures

    def _start(self, call: Call, part: _Part) -> BatchSample | None:
        task = part.task
        if task.error is not None:
            return None  # as an earlier part has failed
        try:
            request = call.add(
                self._tokenizer, task.ids, task.params_of(part), **self._arguments.request
            )
        except (TypeError, ValueError) as error:
            task.error = error
            return failed(task.job, error)
        self._requests[request] = part
        self._unfinished += part.count
        return None

    def _take(self, output: Output) -> list[BatchSample]:
        part = self._requests[output.request_id]
        task, index = part.task, part.first + output.index
        answer = task.answers.setdefault(index, Answer(index))
        if output.error is None:
            answer.add(output, task.ends)
            self.tokens += 1
        if output.finish_reason is None:
            return []
        self._unfinished -= 1
        samples = task.finish(index, output.error)
        self.jobs_done += task.is_finished
        return samples

    @property
    def _width(self) -> int:
        return self._shared.engine.scheduler.max_num_seqs

    def _plan_all(self, jobs: Iterable[Job]) -> Iterator[_Part | BatchSample]:
        for job in jobs:
            parts: list[_Part] = []
            if not self._is_done(job.number, None):
                try:
                    parts = self._plan(job)
                except (TypeError, ValueError) as error:
                    yield failed(job, error)
                    continue
            self.jobs_done += not parts
            yield from parts

    def _plan(self, job: Job) -> list[_Part]:
        """What is to be done for a job, in runs of samples as long as the engine is wide."""
        if job.error is not None:
            raise job.error
        options = dict(job.options)
        limit = options.pop("max_tokens", self._arguments.max_tokens)
        if limit is not None:
            window = self._model.config.max_position_embeddings
            options["max_tokens"] = window if limit == -1 else limit
        arguments = replace(self._arguments, params=replace(self._arguments.params, **options))
        n, best_of = arguments.params.n, arguments.params.best_of
        to_give = [i for i in range(n) if not self._is_done(job.number, i)]
        if not to_give:
            return []
        ids = encode_prompt(self._shared.engine, self._tokenizer, job.prompt)
        params = arguments.params_for(len(ids), limit, self._shared.engine)
        if params.seed is None:
            params = replace(params, seed=seed_of(self._seed, job.number))
        to_make = to_give if best_of is None else list(range(best_of))
        task = _Task(job, params, ids, end_tokens(self._tokenizer, params), to_make, to_give)
        return [_Part(task, first, count) for first, count in _runs(to_make, self._width)]


def _checked_seed(seed: Any) -> int:
    checked = SamplingParams(seed=seed).seed
    if checked is None:
        raise TypeError("seed must be an integer, got None")
    return checked


def _runs(numbers: list[int], longest: int) -> list[tuple[int, int]]:
    """Ascending numbers as runs (first, count) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number and runs[-1][1] < longest:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs
