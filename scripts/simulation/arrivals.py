"""Which requests arrive, and when."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scripts.data import Requests


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes (seconds), its prompt and its answer (tokens)."""

    time: float
    prompt: int
    answer: int


def stretched(requests: Requests, prompt_mean: float, answer_mean: float, window: int) -> Requests:
    """The same requests, all prompts and all answers stretched to given means.

    Each is at least 1 token; an answer is cut where it would pass the window. As that lowers the
    mean, the answers are stretched a little more, until their mean is right to a tenth of a token
    or the window allows no more.
    """
    prompt = np.maximum(np.rint(requests.prompt * (prompt_mean / requests.prompt.mean())), 1)
    prompt = np.minimum(prompt.astype(np.int64), window - 1)
    factor = answer_mean / requests.answer.mean()
    for _ in range(50):
        longer = np.maximum(np.rint(requests.answer * factor), 1).astype(np.int64)
        answer = np.minimum(longer, window - prompt)
        if abs(answer.mean() - answer_mean) < 0.1:
            break
        factor *= answer_mean / answer.mean()
    return Requests(f"{requests.name}, stretched", prompt, answer)


def poisson(requests: Requests, count: int, rate: float, seed: int = 0) -> list[Arrival]:
    """`count` requests drawn at random, arriving independently at `rate` a second.

    The same seed draws the same requests, and the same gaps but for the rate's factor.

    Raises:
        ValueError: count or rate is not positive.
    """
    _check(count, rate)
    random = np.random.default_rng(seed)
    rows = random.choice(len(requests), count, replace=count > len(requests))
    times = random.exponential(1, count).cumsum() / rate
    return _arrivals(requests, rows, times)


def from_trace(requests: Requests, count: int, rate: float | None = None) -> list[Arrival]:
    """The first `count` requests of a trace at its own times, or these scaled to a rate.

    Raises:
        ValueError: the data has no times; count or rate is not positive.
    """
    if requests.arrival is None:
        raise ValueError(f"{requests.name} has no arrival times; take poisson, or a trace")
    _check(count, 1 if rate is None else rate)
    times = requests.arrival[:count]
    if rate is not None and times[-1] > 0:
        times = times * (len(times) / rate / times[-1])
    return _arrivals(requests, np.arange(len(times)), times)


def at_once(requests: Requests, count: int, seed: int = 0) -> list[Arrival]:
    """`count` requests drawn at random, all there from the beginning."""
    return [Arrival(0.0, one.prompt, one.answer) for one in poisson(requests, count, 1.0, seed)]


def _arrivals(requests: Requests, rows: np.ndarray, times: np.ndarray) -> list[Arrival]:
    columns = times.tolist(), requests.prompt[rows].tolist(), requests.answer[rows].tolist()
    return [Arrival(*row) for row in zip(*columns, strict=True)]


def _check(count: int, rate: float) -> None:
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate}; it must be positive and finite")
