"""Numbers that users give, checked; what is wrong is named, with its value and what is right."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """A whole number of any kind, numpy's too, as an int.

    Raises:
        TypeError: it is none; a bool counts as none.
        ValueError: it is not from `low` to `high`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    found = int(value)
    if found < low or (high is not None and found > high):
        right = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {right}, got {value}")
    return found


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A real number of any kind as a float no larger than float32's.

    Raises:
        TypeError: it is none; a bool counts as none.
        ValueError: it is not finite in float32, or not from `low` to `high`.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, got {value}")
    if not low <= found <= high:
        right = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be {right}, got {value}")
    if abs(found) > FLOAT32_MAX:
        raise ValueError(f"{name} must be at most {FLOAT32_MAX:.3g} either way, got {value}")
    return found


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
