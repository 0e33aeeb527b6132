"""The figures as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scripts.report import Cell, format_table

MIB = 2**20


def head(figures: Mapping[str, Any]) -> str:
    """What was measured where."""
    model, machine = figures["model"], figures["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    threads = "".join(f", {name}={value}" for name, value in machine["threads"].items())
    kernels = f" ({machine['blas_kernels']} kernels)" if machine["blas_kernels"] else ""
    return "\n".join(
        [
            f"model    {model['name']}, {model['layers']} layers, hidden {model['hidden']}, "
            f"{model['heads']}/{model['kv_heads']} heads, vocabulary {model['vocab']:,}, "
            f"{model['dtype']}, {model['weight_bytes'] / MIB:,.0f} MiB; "
            f"{model['bytes_per_token']:,} bytes of keys and values per token",
            f"machine  {machine['processor']}, {machine['cores']} of "
            f"{machine['cores_of_machine']} cores, {machine['system']}, "
            f"{machine['device']}, BLAS: {machine['blas']}{kernels}{threads}; "
            f"load average {figures['load_average']}",
            f"versions Python {machine['python']}, {versions}",
            *(f"warning  {line}" for line in figures["warnings"]),
            "",
        ]
    )


def main_table(workloads: Mapping[str, Any], repeat: int) -> str:
    """Ours against every rival."""
    rows: list[list[Cell]] = []
    for name, result in workloads.items():
        for rival, found in result.get("against", {}).items():
            ratio = found["ratio"]
            exact = ratio["low"] == ratio["high"]
            rows.append(
                [
                    name,
                    rival,
                    found["measure"],
                    _short(found["ours"]),
                    _short(found["theirs"]),
                    f"{ratio['median']:.2f}",
                    "-" if exact else f"{ratio['low']:.2f} to {ratio['high']:.2f}",
                    found["ahead"],
                    _two(found["peak_ratio"]),
                    _agreement(found["agreement"]),
                ]
            )
    header = ["workload", "against", "measure", "ours", "theirs", "ratio", "95 %", "ahead"]
    header += ["peak memory", "different"]
    title = (
        f"Ours over mlx-lm's, medians of {repeat} runs in turn; above 1 ours is ahead "
        "(peak memory: below 1)"
    )
    return format_table(title, header, rows)


def side_table(workloads: Mapping[str, Any]) -> str:
    """Speed and latency of every side."""
    rows: list[list[Cell]] = []
    for name, result in workloads.items():
        for side, found in result.get("sides", {}).items():
            if "prompt_tps" not in found:
                continue
            speed = found["generation_tps"]
            first, gap = found["first_token"], found["per_token"]
            rows.append(
                [
                    name,
                    side,
                    _short(found["prompt_tps"]["median"]),
                    _short(speed["median"]),
                    f"{_short(speed['low'])} to {_short(speed['high'])}",
                    *(_ms(first[key]) for key in ("p50", "p90")),
                    *(_ms(gap[key]) for key in ("p50", "p90", "p99")),
                ]
            )
    header = ["workload", "side", "prompt", "generation", "spread"]
    header += ["first 50", "90", "token 50", "90", "99"]
    title = (
        "Tokens per second; ms to the first token (median, 90th) and per token (median, 90th, 99th)"
    )
    return format_table(title, header, rows)


def memory_table(workloads: Mapping[str, Any]) -> str:
    """Memory of every side, each in a process of its own."""
    rows: list[list[Cell]] = []
    keys = ("peak_bytes", "rss_bytes", "kv_reserved_bytes", "kv_held_bytes", "kv_live_bytes")
    for name, result in workloads.items():
        for side, found in result.get("sides", {}).items():
            memory = found if name == "capacity" else found.get("memory")
            if memory and "error" not in memory:
                cells = [memory.get(key) for key in keys]
                rows.append([name, side, *(c if c is None else c / MIB for c in cells)])
    header = ["workload", "side", "peak (MLX)", "process", "KV reserved", "KV held", "KV live"]
    title = "MiB, weights included in the first two; held and live when most was held"
    return format_table(title, header, rows)


def notes(workloads: Mapping[str, Any]) -> list[str]:
    """Settings of mlx-lm, and what is missing."""
    found = []
    for name, result in workloads.items():
        if "skipped" in result:
            found.append(f"{name}: left out, {result['skipped']}")
        for side, why in result.get("left_out", {}).items():
            found.append(f"{name}, {side}: left out, {why}")
        for side, figures in result.get("sides", {}).items():
            memory = figures.get("memory") or {}
            if "error" in memory:
                found.append(f"{name}, {side}: no memory figures, {memory['error']}")
            if side == "ours" or not figures.get("settings"):
                continue
            settings = " ".join(f"{k}={v}" for k, v in figures["settings"].items())
            line = f"{name}, {side}: {settings}"
            if len(figures["tried"]) > 1:
                line += f", the fastest of {len(figures['tried'])} settings"
            found.append(line)
    return found


def _agreement(found: Mapping[str, Any]) -> str:
    text = f"{found['different']} of {found['answers']}"
    if found["gap"] is not None:
        text += f" (gap {found['gap']:.0e})"
    return text


def _short(value: float) -> str:
    """Three figures or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _two(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _ms(seconds: float) -> str:
    return _short(1000 * seconds)
