"""mlx-lm's functions, on a paged KV cache.

    from mlx_paged import load, generate

They take mlx-lm's arguments and return what mlx-lm's return. Keyword arguments may also be:

- the fields of `SamplingParams` (temperature, top_p, n, seed, stop, logprobs, ...), or all of them
  as `params`;
- mlx-lm's callables `sampler` and `logits_processors`;
- the options of `Engine` (block_size, memory_limit, num_blocks, prefix_caching, ...).

A prompt is text, token ids, or a list of chat messages. All calls on a model use one engine, so a
prompt that begins like an earlier one computes its own tokens only. The engine is made anew when a
call gives it other options, and freed with the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.arguments import check_model, read_arguments, token_limit, wrap_tokenizer
from mlx_paged.chat import is_chat
from mlx_paged.generation import Generation, Prompt, checked, encode_prompt, end_tokens
from mlx_paged.printing import OrderedPrinter
from mlx_paged.responses import Answer, BatchResponse, BatchStats, GenerationResponse, best
from mlx_paged.sampling import SamplingParams
from mlx_paged.shared_engine import engine_of

BATCH_MAX_TOKENS = 128


def stream_generate(
    model: Any, tokenizer: Any, prompt: Prompt, max_tokens: int | None = None, **kwargs: Any
) -> Iterator[GenerationResponse]:
    """Generate token by token.

    Args:
        model, tokenizer: what `load` returned.
        prompt: text, token ids, or chat messages.
        max_tokens: the most tokens to generate (256); -1: up to the model's window.
        kwargs: see the module.

    Returns:
        A generator of responses. With n > 1 the samples alternate, told apart by `index`. Closing
        it ends the generation.

    Raises:
        TypeError: an argument is unknown or of the wrong type.
        ValueError: an argument is out of its range, contradicts another, or does not fit the
            model or the pool.
    """
    generation = Generation(
        stream_generate, model, tokenizer, prompt, max_tokens, kwargs, full_logprobs=True
    )
    if generation.params.best_of is not None:
        raise ValueError(
            f"best_of must be None in stream_generate, got {generation.params.best_of}: samples "
            "can be ranked only when they are whole; use generate"
        )
    return iter(generation)


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    *,
    max_tokens: int | None = None,
    **kwargs: Any,
) -> str | list[str]:
    """Generate an answer, or n of them.

    Args:
        model, tokenizer, prompt, max_tokens, kwargs: see `stream_generate`.
        verbose: print the text as it is made, and figures.

    Returns:
        The text; with n > 1 a list of n texts, with `best_of` the most likely ones (by the mean
        log-probability of their tokens), best first.

    Raises:
        TypeError, ValueError: see `stream_generate`.
    """
    generation = Generation(generate, model, tokenizer, prompt, max_tokens, kwargs)
    if verbose:
        _print_generation(generation)
    else:
        for _ in generation:
            pass
    texts = [answer.text for answer in generation.best()]
    return texts if generation.params.n > 1 else texts[0]


def _print_generation(generation: Generation) -> None:
    def write(text: str) -> None:
        print(text, end="", flush=True)

    write("=" * 10 + "\n")
    printer = OrderedPrinter(generation.params.n, write)
    if generation.params.best_of is None:
        for response in generation:
            printer.add(response.index, response.text, response.finish_reason is not None)
    else:
        for _ in generation:
            pass
        for i, answer in enumerate(generation.best()):
            printer.add(i, answer.text, finished=True)
    write("=" * 10 + f"\n{generation.figures}\n")


def batch_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    prompt_caches: None = None,
    max_tokens: int | Sequence[int] | None = None,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = True,
    return_logprobs: bool = False,
    **kwargs: Any,
) -> BatchResponse:
    """Answer many prompts at once.

    Args:
        model, tokenizer: what `load` returned.
        prompts: each is text, token ids, or chat messages.
        prompt_caches: must be None.
        max_tokens: the most tokens to generate (128), for all prompts or for each.
        verbose: print progress and figures.
        return_prompt_caches: must be False.
        return_token_ids: whether the response has them.
        return_logprobs: whether the response has the tokens' log-probabilities.
        kwargs: see the module.

    Raises:
        TypeError, ValueError: see `stream_generate`; a prompt's mistake names its number.
    """
    model, tokenizer = check_model(model), wrap_tokenizer(tokenizer)
    given = {
        "prompt_caches": prompt_caches,
        "return_prompt_caches": return_prompt_caches,
        **kwargs,
    }
    if isinstance(prompts, str) or is_chat(prompts):
        raise TypeError(f"prompts must be a list of prompts, got one: {prompts!r}")
    listed = isinstance(prompts, Sequence) or (
        isinstance(prompts, np.ndarray | mx.array) and prompts.ndim > 0
    )
    if isinstance(prompts, bytes) or not listed:
        raise TypeError(f"prompts must be a list of prompts, got {prompts!r}")
    limits = _limits(max_tokens, len(prompts), given)
    if return_logprobs:
        _ask_for_logprobs(given)
    # -1 stands for any limit, as each prompt's own is checked below.
    provisional = None if None in limits else -1
    arguments = read_arguments(batch_generate, model, provisional, given)
    shared = engine_of(model, tokenizer, arguments.engine)
    ends = end_tokens(tokenizer, arguments.params)
    answers: dict[int, list[Answer]] = {}  # by request, in the order of the prompts
    prompt_tokens = finished = 0
    begin = time.perf_counter()
    with shared.call() as call:
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            try:
                ids = encode_prompt(shared.engine, tokenizer, prompt)
                params = arguments.params_for(len(ids), limit, shared.engine)
                request = call.add(tokenizer, ids, params, **arguments.request)
            except (ValueError, TypeError) as error:
                raise type(error)(f"prompts[{i}]: {error}") from error
            prompt_tokens += len(ids)
            answers[request] = [Answer(index) for index in range(params.num_samples)]
        while outputs := call.outputs():
            before = finished
            for output in outputs:
                answer = answers[output.request_id][output.index]
                answer.add(checked(output), ends)
                finished += answer.finish_reason is not None
            if verbose and finished > before:
                total = sum(map(len, answers.values()))
                print(f"[batch_generate] Finished {finished}/{total} ...", end="\r", flush=True)
        pool = call.pool_use()
    stats = BatchStats(
        prompt_tokens=prompt_tokens,
        prompt_time=call.prompt_time,
        generation_tokens=sum(a.num_tokens for group in answers.values() for a in group),
        generation_steps=call.decode_steps,
        decode_time=call.decode_time,
        wall_time=time.perf_counter() - begin,
        peak_memory=mx.get_peak_memory() / 1e9,
        pool=pool,
    )
    if verbose:
        _print_batch(finished, stats)
    groups = [
        group if arguments.params.best_of is None else best(group, arguments.params.n)
        for group in answers.values()
    ]
    wants_logprobs = arguments.params.logprobs is not None

    def each(get: Callable[[Answer], Any]) -> list[Any]:
        if arguments.params.n == 1:
            return [get(group[0]) for group in groups]
        return [[get(answer) for answer in group] for group in groups]

    return BatchResponse(
        texts=each(lambda answer: answer.text),
        stats=stats,
        token_ids=each(lambda answer: answer.token_ids) if return_token_ids else None,
        logprobs=each(lambda answer: answer.logprobs) if wants_logprobs else None,
        finish_reasons=each(lambda answer: answer.finish_reason),
    )


def _limits(
    max_tokens: int | Sequence[int] | None, count: int, given: Mapping[str, Any]
) -> list[int] | list[None]:
    """Each prompt's `max_tokens`; None where `params` says it."""
    if max_tokens is None:
        return [None] * count if given.get("params") is not None else [BATCH_MAX_TOKENS] * count
    if isinstance(max_tokens, Integral):
        return [token_limit("max_tokens", max_tokens)] * count
    if isinstance(max_tokens, str) or not isinstance(max_tokens, Sequence):
        raise TypeError(
            f"max_tokens must be a whole number, or a list of one for each prompt, "
            f"got {max_tokens!r}"
        )
    if len(max_tokens) != count:
        raise ValueError(
            f"max_tokens must be one number, or one for each of the {count} prompts, "
            f"got {len(max_tokens)}"
        )
    return [token_limit(f"max_tokens[{i}]", limit) for i, limit in enumerate(max_tokens)]


def _ask_for_logprobs(given: dict[str, Any]) -> None:
    params = given.get("params")
    if params is None:
        given.setdefault("logprobs", 0)
    elif isinstance(params, SamplingParams) and params.logprobs is None:
        given["params"] = replace(params, logprobs=0)


def _print_batch(finished: int, stats: BatchStats) -> None:
    said = [
        f"Finished {finished}/{finished}    ",
        f"Prompt: {stats.prompt_tokens} tokens, {stats.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {stats.peak_memory:.3f} GB",
        f"Pool: {stats.pool}",
    ]
    print("\n".join(f"[batch_generate] {line}" for line in said))
