"""Prompts to be sampled, as the lines of a file or the items of a list describe them."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_paged.arguments import SAMPLING_FIELDS
from mlx_paged.generation import Prompt

PROMPT_FIELDS = ("prompt", "messages", "token_ids")
SEED_BITS = 62  # so that the seeds of a prompt's later samples are valid, too


@dataclass(frozen=True)
class Job:
    """A prompt, its number, and sampling options of its own; or why it is none."""

    number: int
    prompt: Prompt = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    id: Any = None
    error: Exception | None = None


def read_job(number: int, item: Prompt | Mapping[str, Any]) -> Job:
    """A job from a prompt, or from an object as `batch_sample` describes it."""
    if not isinstance(item, Mapping):
        return Job(number, item)
    try:
        return Job(number, _prompt_of(item), _options_of(item), item.get("id"))
    except (TypeError, ValueError) as error:
        return Job(number, id=item.get("id"), error=error)


def _prompt_of(item: Mapping[str, Any]) -> Prompt:
    given = [name for name in PROMPT_FIELDS if name in item]
    if len(given) != 1:
        found = " and ".join(f'"{name}"' for name in given) or "none of them"
        raise ValueError(f'give one of "prompt", "messages" and "token_ids", got {found}')
    name, value = given[0], item[given[0]]
    if name == "prompt":
        if not isinstance(value, str):
            raise TypeError(f'"prompt" must be text, got {value!r}')
        return value
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f'"{name}" must be a list, got {value!r}')
    values = list(value)
    if name == "messages" and not (values and isinstance(values[0], Mapping)):
        raise TypeError(f'"messages" must hold objects with "role" and "content", got {value!r}')
    if name == "token_ids" and values and isinstance(values[0], Mapping):
        raise TypeError(f'"token_ids" must hold integers, got {value!r}')
    return values


def _options_of(item: Mapping[str, Any]) -> dict[str, Any]:
    known = (*SAMPLING_FIELDS, *PROMPT_FIELDS, "id")
    for name in item:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise ValueError(f'unknown field "{name}"{hint}')
    options = {name: item[name] for name in SAMPLING_FIELDS if name in item}
    bias = options.get("logit_bias")
    if isinstance(bias, Mapping):  # JSON has text as keys only
        options["logit_bias"] = {_integer(key): value for key, value in bias.items()}
    return options


def _integer(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def seed_of(seed: int, number: int) -> int:
    """The seed of a prompt's first sample, from the call's seed and the prompt's number."""
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)
