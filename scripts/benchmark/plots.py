"""The figures drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.report import COLOURS, pyplot, save_figure


def bench(figures: Mapping[str, Any], path: Path) -> None:
    """Ratios with their intervals, and peak memory over mlx-lm's."""
    rows = [
        (f"{name}\n{rival}", found)
        for name, result in figures["workloads"].items()
        for rival, found in result.get("against", {}).items()
    ]
    plt = pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 1.2 + 0.42 * len(rows)), sharey=True, width_ratios=(3, 2)
    )
    places = list(range(len(rows)))[::-1]
    for place, (_, found) in zip(places, rows, strict=True):
        ratio = found["ratio"]
        errors = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
        colour = COLOURS[0] if ratio["median"] >= 1 else COLOURS[1]
        left.errorbar(ratio["median"], place, xerr=errors, fmt="o", color=colour, capsize=3)
        left.annotate(
            f"{ratio['median']:.2f}",
            (ratio["median"], place),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
        if found["peak_ratio"] is not None:
            bar = right.barh(place, found["peak_ratio"], 0.5, color=COLOURS[2])
            right.bar_label(bar, fmt="%.2f", fontsize=8, padding=2)
    for axis in (left, right):
        axis.axvline(1, color="#666666", linewidth=0.8)
    left.set_xscale("log")
    left.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"], minor=False)
    left.minorticks_off()
    left.set(xlabel="ours over mlx-lm's (speed, or how many)", ylim=(-0.6, len(rows) - 0.2))
    left.set_yticks(places, [label for label, _ in rows])
    right.set(xlabel="peak memory over mlx-lm's")
    save_figure(figure, path)
    plt.close(figure)


def scaling(figures: Mapping[str, Any], path: Path) -> None:
    """Time per decode step against context, rows and pool size."""
    plt = pyplot()
    panels = [(name, panel) for name, panel in figures["scaling"].items() if panel["points"]]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.2), squeeze=False)
    for axis, (name, panel) in zip(axes[0], panels, strict=True):
        for side in ("ours", "mlx-lm"):
            points = [p for p in panel["points"] if side in p]
            if not points:
                continue
            sizes = [point["size"] for point in points]
            median = [1000 * point[side]["median"] for point in points]
            low = [1000 * point[side]["low"] for point in points]
            high = [1000 * point[side]["high"] for point in points]
            (line,) = axis.plot(sizes, median, marker="o", label=side)
            axis.fill_between(sizes, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set(xlabel=panel["unit"], ylim=(0, None), title=panel["about"])
        axis.title.set_fontsize(9)
        del name
    axes[0][0].set_ylabel("ms per decode step")
    axes[0][0].legend()
    save_figure(figure, path)
    plt.close(figure)
