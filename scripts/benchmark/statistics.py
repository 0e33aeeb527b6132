"""Medians, spread, and how sure a ratio is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LEVEL = 95  # per cent of an interval
RESAMPLES = 2000


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, smallest, largest, and the values themselves."""
    return {
        "median": float(np.median(values)),
        "low": float(min(values)),
        "high": float(max(values)),
        "values": [float(value) for value in values],
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th."""
    found = np.percentile(values, [50, 90, 99]).tolist()
    return dict(zip(("p50", "p90", "p99"), found, strict=True))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Ours over theirs, pair by pair: the median, and its interval by the bootstrap.

    The interval holds the middle 95 % of the medians of resampled pairs (Efron and Tibshirani
    1993, chapter 13). It tells how the repetitions scatter; a bias that they all have in common
    it does not see.
    """
    ratios = np.array(ours, float) / np.array(theirs, float)
    rng = np.random.default_rng(0)
    draws = rng.choice(ratios, (RESAMPLES, len(ratios)))
    tail = (100 - LEVEL) / 2
    low, high = np.percentile(np.median(draws, axis=1), [tail, 100 - tail]).tolist()
    return {
        "median": float(np.median(ratios)),
        "low": low,
        "high": high,
        "values": ratios.tolist(),
    }


def verdict(ratio: dict[str, Any], names: tuple[str, str] = ("ours", "mlx-lm")) -> str:
    """Which side is ahead; "even" where the interval holds 1."""
    if ratio["low"] > 1:
        return names[0]
    return names[1] if ratio["high"] < 1 else "even"
