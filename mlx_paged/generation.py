"""The samples of one prompt in the making: what `generate`, `stream_generate` and the CLI share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_paged.arguments import check_model, read_arguments, wrap_tokenizer
from mlx_paged.chat import encode_chat, is_chat
from mlx_paged.engine import Engine
from mlx_paged.request import Output
from mlx_paged.responses import Answer, GenerationResponse, PoolUse, best
from mlx_paged.sampling import SamplingParams
from mlx_paged.shared_engine import SharedEngine, engine_of

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | np.ndarray | mx.array | Messages


@dataclass(frozen=True)
class Figures:
    """Speeds of a generation, as mlx-lm reports them, and what happened in the pool.

    Attributes:
        prompt_tokens, prompt_tps: of the prompt, until the first token.
        generation_tokens, generation_tps: of all samples, since the first token.
        peak_memory: in 10**9 bytes.
        pool: what happened in the block pool.
    """

    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    pool: PoolUse

    def __str__(self) -> str:
        return "\n".join(
            [
                f"Prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.3f} tokens-per-sec",
                f"Generation: {self.generation_tokens} tokens, "
                f"{self.generation_tps:.3f} tokens-per-sec",
                f"Peak memory: {self.peak_memory:.3f} GB",
                f"Pool: {self.pool}",
            ]
        )


class Generation:
    """Iterate once to generate; the answers grow meanwhile.

    Everything is checked when it is made, but for the length, which is when iteration begins.

    Args:
        function: of the API, for error messages.
        model, tokenizer, prompt, max_tokens: see `stream_generate`.
        given: the rest of the function's keyword arguments.
        full_logprobs: whether responses carry [vocab] log-probabilities.

    Attributes:
        params: of the request.
        answers: one for each sample, in the order of their numbers.
        figures: of a generation that ended, however it ended; None if it did not begin.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        model: Any,
        tokenizer: Any,
        prompt: Prompt,
        max_tokens: int | None,
        given: Mapping[str, Any],
        *,
        full_logprobs: bool = False,
    ) -> None:
        self._model = check_model(model)  # the engine has a weak reference only
        self._tokenizer = wrap_tokenizer(tokenizer)
        arguments = read_arguments(function, self._model, max_tokens, given)
        self._shared: SharedEngine = engine_of(self._model, self._tokenizer, arguments.engine)
        engine = self._shared.engine
        self._prompt = encode_prompt(engine, self._tokenizer, prompt)
        self.params = arguments.params_for(len(self._prompt), max_tokens, engine)
        self._request = {"full_logprobs": full_logprobs, **arguments.request}
        self._ends = end_tokens(self._tokenizer, self.params)
        self.answers = [Answer(index) for index in range(self.params.num_samples)]
        self.figures: Figures | None = None

    def best(self) -> list[Answer]:
        """The n answers that were asked for, ranked if there are more."""
        if self.params.best_of is None:
            return self.answers
        return best(self.answers, self.params.n)

    def __iter__(self) -> Iterator[GenerationResponse]:
        size = len(self._prompt)
        begin = time.perf_counter()
        first: float | None = None
        with self._shared.call() as call:
            call.add(self._tokenizer, self._prompt, self.params, **self._request)
            try:
                while outputs := call.outputs():
                    now = time.perf_counter()
                    first = now if first is None else first
                    prompt_tps = size / max(first - begin, 1e-9)
                    for output in outputs:
                        answer = self.answers[output.index]
                        answer.add(checked(output), self._ends)
                        yield self._response(output, answer, prompt_tps, first)
            finally:
                now = time.perf_counter()
                tokens = sum(answer.num_tokens for answer in self.answers)
                self.figures = Figures(
                    prompt_tokens=size,
                    prompt_tps=0.0 if first is None else size / max(first - begin, 1e-9),
                    generation_tokens=tokens,
                    generation_tps=0.0 if first is None else tokens / max(now - first, 1e-9),
                    peak_memory=mx.get_peak_memory() / 1e9,
                    pool=call.pool_use(),
                )

    def _response(
        self, output: Output, answer: Answer, prompt_tps: float, first: float
    ) -> GenerationResponse:
        assert output.token is not None
        return GenerationResponse(
            text=output.text,
            token=output.token,
            logprobs=output.full_logprobs,
            from_draft=False,
            prompt_tokens=len(self._prompt),
            prompt_tps=prompt_tps,
            generation_tokens=answer.num_tokens,
            generation_tps=answer.num_tokens / max(time.perf_counter() - first, 1e-9),
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=output.finish_reason,
            index=output.index,
            logprob=output.logprob if self.params.logprobs is not None else None,
            top_logprobs=output.top_logprobs,
        )


def encode_prompt(engine: Engine, tokenizer: TokenizerWrapper, prompt: Prompt) -> list[int]:
    """Token ids of text, token ids or chat messages.

    Raises:
        ValueError, TypeError: it is empty, or none of these, or has ids that do not exist.
    """
    if is_chat(prompt):
        return engine.encode(encode_chat(tokenizer, prompt))  # type: ignore[arg-type]
    if not isinstance(prompt, str | Sequence | np.ndarray | mx.array) or isinstance(prompt, bytes):
        raise TypeError(f"prompt must be text, token ids or chat messages, got {prompt!r}")
    if isinstance(prompt, str):
        engine.tokenizer = tokenizer
    return engine.encode(prompt)  # type: ignore[arg-type]


def end_tokens(tokenizer: TokenizerWrapper, params: SamplingParams) -> frozenset[int]:
    """Tokens that end an answer and are no part of it."""
    stops = frozenset(params.stop_token_ids)
    return stops if params.ignore_eos else stops | frozenset(tokenizer.eos_token_ids)


def checked(output: Output) -> Output:
    """The output, unless its sample ended with an error, which is raised."""
    if output.error is not None:
        raise output.error
    return output
