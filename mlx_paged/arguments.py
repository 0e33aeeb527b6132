"""The keyword arguments of the API's functions, sorted and checked before any work."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from mlx_paged.checks import integer
from mlx_paged.engine import Engine, check_options
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.sampling import SamplingParams

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
ENGINE_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(Engine).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
REQUEST_OPTIONS = ("sampler", "logits_processors", "cache_salt")

# mlx-lm's arguments that mean nothing here; None, which turns them off there, is accepted.
_NO_KV_BITS = "keys and values are stored in the model's dtype"
_NO_DRAFT = "there is no speculative decoding"
_NO_PROMPT_CACHE = "the block pool finds computed prefixes by itself"
REFUSED = {
    "max_kv_size": "the pool bounds memory: use memory_limit or num_blocks",
    "kv_bits": _NO_KV_BITS,
    "kv_group_size": _NO_KV_BITS,
    "quantized_kv_start": _NO_KV_BITS,
    "draft_model": _NO_DRAFT,
    "num_draft_tokens": _NO_DRAFT,
    "prompt_cache": _NO_PROMPT_CACHE,
    "prompt_caches": _NO_PROMPT_CACHE,
    "return_prompt_caches": _NO_PROMPT_CACHE,
    "input_embeddings": "a prompt is text, token ids or chat messages",
    "prompt_progress_callback": "a step's progress is seen by the engine's observer",
    "prefill_batch_size": "a step takes prompts as far as max_batched_tokens allows",
    "stream": "the engine uses MLX's default stream",
}
# mlx-lm's names of what the engine calls otherwise.
RENAMED = {"prefill_step_size": "max_batched_tokens", "completion_batch_size": "max_num_seqs"}
# What a sampler of the caller's own takes the place of.
REPLACED_BY_SAMPLER = ("temperature", "top_p", "top_k", "min_p", "seed")


@dataclass(frozen=True)
class Arguments:
    """What a call asks for.

    Attributes:
        params: how to sample; its `max_tokens` may be provisional, see `params_for`.
        max_tokens: as given, -1 for as many as fit; None if `params` says it.
        engine: options of `Engine` that differ from its defaults.
        request: options of `Engine.add`.
    """

    params: SamplingParams
    max_tokens: int | None
    engine: dict[str, Any]
    request: dict[str, Any]

    def params_for(self, prompt_len: int, max_tokens: int | None, engine: Engine) -> SamplingParams:
        """The sampling parameters of one prompt.

        Args:
            prompt_len: its tokens.
            max_tokens: the most tokens to generate; -1: as many as the model's window and the
                pool allow; None: what the params say.
            engine: whose window and pool.
        """
        if max_tokens == -1:
            pool = engine.pool
            most = min(
                engine.model.config.max_position_embeddings, pool.num_blocks * pool.block_size + 1
            )
            max_tokens = max(1, most - prompt_len)
        return self.params if max_tokens is None else replace(self.params, max_tokens=max_tokens)


def read_arguments(
    function: Callable[..., Any], model: Qwen2, max_tokens: int | None, given: Mapping[str, Any]
) -> Arguments:
    """Sort the keyword arguments of a function of the API.

    Args:
        function: it, for the messages and the names of its own arguments.
        model: whose window is the provisional `max_tokens` of -1.
        max_tokens: what the call says; None: nothing.
        given: the rest of its keyword arguments.

    Raises:
        TypeError: an argument is unknown, or of the wrong type.
        ValueError: an argument is out of its range, or contradicts another.
    """
    name = function.__name__
    given = _refuse(name, given)
    _check_names(function, given)
    if max_tokens is not None:
        max_tokens = token_limit("max_tokens", max_tokens)
    # Checked before they are compared, so that 16.0 and True do not pass for equals of theirs.
    engine = check_options({key: given[key] for key in ENGINE_DEFAULTS if key in given})
    request = {key: given[key] for key in REQUEST_OPTIONS if given.get(key) is not None}
    sampling = {key: given[key] for key in SAMPLING_FIELDS if key in given}
    params = given.get("params")
    most = model.config.max_position_embeddings if max_tokens == -1 else max_tokens
    limit: dict[str, Any] = {} if most is None else {"max_tokens": most}
    if params is None:
        params = SamplingParams(**limit, **sampling)
    elif not isinstance(params, SamplingParams):
        raise TypeError(f"params must be SamplingParams, got {params!r}")
    elif sampling:
        raise ValueError(
            f"give params or its fields, not both: got params and {', '.join(sampling)}"
        )
    else:
        params = replace(params, **limit)
    budget = engine.get("max_batched_tokens")
    if budget is not None and "max_num_seqs" not in engine:
        # A step has a token at least for each sequence that runs.
        engine["max_num_seqs"] = min(budget, ENGINE_DEFAULTS["max_num_seqs"])
    engine = {key: value for key, value in engine.items() if value != ENGINE_DEFAULTS[key]}
    _check_callables(request, params)
    return Arguments(params, max_tokens, engine, request)


def token_limit(name: str, value: Any) -> int:
    """A `max_tokens`: at least 1, or -1 for as many as fit.

    Raises:
        TypeError, ValueError: it is neither.
    """
    return -1 if isinstance(value, Integral) and value == -1 else integer(name, value, 1)


def check_model(model: object) -> Qwen2:
    """A model of this package.

    Raises:
        TypeError: it is another's.
    """
    if not isinstance(model, Qwen2):
        kind = type(model)
        raise TypeError(
            f"model must come from mlx_paged.load, got a {kind.__module__}.{kind.__name__}"
        )
    return model


def wrap_tokenizer(tokenizer: Any) -> TokenizerWrapper:
    """mlx-lm's wrapper of a tokenizer, unless it is one."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    if isinstance(tokenizer, TokenizerWrapper):
        return tokenizer
    if not callable(getattr(tokenizer, "encode", None)):
        raise TypeError(f"tokenizer must be what mlx_paged.load returned, got {tokenizer!r}")
    return TokenizerWrapper(tokenizer)


def _refuse(function: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Without mlx-lm's arguments that are turned off, and under our names."""
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name in REFUSED:
            if value is None or value is False:
                continue
            raise ValueError(f"{function}() does not take {name}: {REFUSED[name]}")
        ours = RENAMED.get(name, name)
        if ours in kept or (ours != name and ours in given):
            raise ValueError(f"give {ours} or {name}, not both: they mean the same")
        kept[ours] = value
    return kept


def _check_names(function: Callable[..., Any], given: Iterable[str]) -> None:
    known = (*SAMPLING_FIELDS, *ENGINE_DEFAULTS, *REQUEST_OPTIONS, "params")
    for name in given:
        if name not in known:
            own = [
                parameter.name
                for parameter in inspect.signature(function).parameters.values()
                if parameter.kind is not inspect.Parameter.VAR_KEYWORD
            ]
            hint = _closest(name, [*known, *own])
            raise TypeError(
                f"{function.__name__}() got an unexpected argument {name!r}"
                + (f"; did you mean {hint!r}?" if hint else "")
            )


def _closest(name: str, known: Sequence[str]) -> str | None:
    begun = [other for other in known if other.startswith(name)]
    return next(iter(begun or difflib.get_close_matches(name, known, 1, 0.5)), None)


def _check_callables(request: Mapping[str, Any], params: SamplingParams) -> None:
    sampler = request.get("sampler")
    if sampler is not None:
        if not callable(sampler):
            raise TypeError(f"sampler must be callable, got {sampler!r}")
        plain = SamplingParams()
        for name in REPLACED_BY_SAMPLER:
            if getattr(params, name) != getattr(plain, name):
                raise ValueError(
                    f"give a sampler or {name}, not both: the sampler takes its place, "
                    f"got {name}={getattr(params, name)}"
                )
    processors = request.get("logits_processors", ())
    if not isinstance(processors, list | tuple):
        raise TypeError(f"logits_processors must be a list of callables, got {processors!r}")
    for i, processor in enumerate(processors):
        if not callable(processor):
            raise TypeError(f"logits_processors[{i}] must be callable, got {processor!r}")
