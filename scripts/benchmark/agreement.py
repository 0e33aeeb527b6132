"""Whether both sides gave the same tokens and, where not, whether it was a tie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from scripts.benchmark.workloads import Tokens, Workload

MOST_CHECKED = 8  # differences looked into; each costs a forward pass of the whole prompt


def compare(
    workload: Workload, ours: Sequence[Tokens], theirs: Sequence[Tokens], model: Any
) -> dict[str, Any]:
    """Count the answers that differ.

    Args:
        ours, theirs: the tokens of every stream.
        model: mlx-lm's; it tells how close the two best tokens were where answers part.

    Returns:
        Answers compared and different, tokens equal before the first difference, and the largest
        gap between the two best logits there, over the largest logit: about 1e-6 is a tie of
        float32, 1e-2 is a mistake.
    """
    different = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    gaps = []
    for stream in different[:MOST_CHECKED]:
        equal = common(ours[stream], theirs[stream])
        request = stream // workload.samples
        answers: Mapping[int, Tokens] = dict(enumerate(ours))
        if workload.sequential and not _same_history(workload, request, ours, theirs):
            continue  # the prompts were not the same any more
        gaps.append(_gap(model, workload.prompt(request, answers) + ours[stream][:equal]))
    return {
        "answers": len(ours),
        "different": len(different),
        "first": min((common(ours[i], theirs[i]) for i in different), default=None),
        "gap": max(gaps, default=None),
    }


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens at the start that are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum over repetitions."""
    firsts = [part["first"] for part in parts if part["first"] is not None]
    gaps = [part["gap"] for part in parts if part["gap"] is not None]
    return {
        "answers": sum(part["answers"] for part in parts),
        "different": sum(part["different"] for part in parts),
        "first": min(firsts, default=None),
        "gap": max(gaps, default=None),
    }


def _same_history(
    workload: Workload, index: int, ours: Sequence[Tokens], theirs: Sequence[Tokens]
) -> bool:
    before = workload.requests[index].follows
    while before is not None:
        if ours[before] != theirs[before]:
            return False
        before = workload.requests[before].follows
    return True


def _gap(model: Any, tokens: Tokens) -> float:
    logits = model(mx.array([tokens]))[0, -1].astype(mx.float32)
    second, best = np.array(mx.sort(logits)[-2:])
    return float((best - second) / np.array(mx.abs(logits).max()))
