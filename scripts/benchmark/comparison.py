"""Two measurements side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.benchmark.tables import MIB
from scripts.report import Cell, format_table

SCHEMA = 1


def read(path: Path) -> dict[str, Any]:
    """What `--json` wrote.

    Raises:
        ValueError: the file is something else.
    """
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(figures, dict) or figures.get("benchmark") != "mlx_paged":
        raise ValueError(f"{path} was not written by scripts.bench")
    if figures.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {figures.get('schema')}; this reads {SCHEMA}")
    return figures


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """A table of our figures in A and B; mlx-lm's beside them shows how alike the machines were.

    "change" is B over A of the ratio to mlx-lm, which a slower or busier machine moves less than
    the figures themselves. It counts as one where the two ratios' intervals do not meet.
    """
    rows: list[list[Cell]] = []
    for name, result in a["workloads"].items():
        other = b["workloads"].get(name, {})
        for rival, found in result.get("against", {}).items():
            after = other.get("against", {}).get(rival)
            if after is None:
                continue
            first, second = found["ratio"], after["ratio"]
            rows.append(
                [
                    name,
                    rival,
                    found["measure"],
                    found["ours"],
                    after["ours"],
                    found["theirs"],
                    after["theirs"],
                    f"{first['median']:.2f}",
                    f"{second['median']:.2f}",
                    f"{second['median'] / first['median']:.2f}",
                    _verdict(first, second),
                    _peak(result),
                    _peak(other),
                ]
            )
    header = ["workload", "against", "measure", "ours A", "ours B", "theirs A", "theirs B"]
    header += ["ratio A", "ratio B", "change", "", "peak MiB A", "peak MiB B"]
    table = format_table("B against A", header, rows)
    return "\n".join([*_differences(a, b), table])


def _verdict(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    if b["low"] > a["high"]:
        return "better"
    return "worse" if b["high"] < a["low"] else "same"


def _peak(result: Mapping[str, Any]) -> float | None:
    side = result.get("sides", {}).get("ours", {})
    memory = side.get("memory") or side
    return memory["peak_bytes"] / MIB if "peak_bytes" in memory else None


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    found = []
    for part in ("model", "machine", "options"):
        for key in sorted({*a[part], *b[part]}):
            left, right = a[part].get(key), b[part].get(key)
            if left != right:
                found.append(f"not the same: {part} {key}: A {left}, B {right}")
    for name, result in a["workloads"].items():
        sizes = b["workloads"].get(name, {}).get("sizes")
        if sizes is None:
            found.append(f"not the same: {name} is in A only")
        elif sizes != result["sizes"]:
            found.append(f"not the same: sizes of {name}: A {result['sizes']}, B {sizes}")
    found += [f"not the same: {n} is in B only" for n in b["workloads"] if n not in a["workloads"]]
    return found
