"""Pictures of the block pool: which sequence holds which block, step by step.

Reads a trace, as `mlx-paged generate --trace FILE` writes it, and draws it as one HTML page that
needs nothing else (--html: a slider over the steps; blocks coloured by sequence, shared ones
marked, cached ones pale; copies and evictions as events), and as a still picture (--plot) of one
step, by default the last with the most blocks in use. Without --data: a prompt of 44 tokens
sampled four times for 64 tokens, block size 16.
"""

from __future__ import annotations

import colorsys
import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.data import FOLDER
from scripts.formats import broken, records
from scripts.report import (
    Cell,
    add_output_arguments,
    make_parser,
    print_table,
    pyplot,
    run,
    save_figure,
    write_json,
)

EXAMPLE = FOLDER / "four_samples.jsonl"
TEMPLATE = Path(__file__).with_suffix(".html")
COLUMNS = 16  # of blocks in the still picture
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}


@dataclass(frozen=True)
class Step:
    """The pool at the end of a step; see `mlx_paged.trace` for the fields."""

    step: int
    tables: dict[str, list[int]]
    computed: dict[str, int]
    cached: list[int]
    copies: list[tuple[int, int]]
    evictions: list[int]
    preempted: list[str]
    finished: list[str]

    def users(self) -> dict[int, list[str]]:
        """The sequences that refer to each block in use."""
        users: dict[int, list[str]] = {}
        for name, table in self.tables.items():
            for block in table:
                users.setdefault(block, []).append(name)
        return users


@dataclass(frozen=True)
class Trace:
    """A pool and its steps."""

    block_size: int
    num_blocks: int
    steps: list[Step]

    def fullest(self) -> int:
        """The last of the steps with the most blocks in use, as an index."""
        used = [len(step.users()) for step in self.steps]
        return len(used) - 1 - used[::-1].index(max(used))

    def sequences(self) -> list[str]:
        """All sequences, in the order in which they appear."""
        return list(dict.fromkeys(name for step in self.steps for name in step.tables))


def read_trace(path: Path) -> Trace:
    """Read and check a trace.

    Raises:
        ValueError: naming the file and the line that is wrong, or a file without steps.
        OSError: it cannot be read.
    """
    lines = records(path)
    first = next(lines, None)
    if first is None:
        raise ValueError(f"{path}: the file is empty")
    line, head = first
    size, total = head.get("block_size"), head.get("num_blocks")
    if type(size) is not int or type(total) is not int or size < 1 or total < 1:
        raise broken(path, line, "a trace begins with a block_size and num_blocks, both 1 or more")
    steps = []
    for line, record in lines:
        try:
            steps.append(_step(record, size, total))
        except ValueError as error:
            raise broken(path, line, str(error)) from None
    if not steps:
        raise ValueError(f"{path}: the trace has no step")
    return Trace(size, total, steps)


def _step(record: dict[str, Any], size: int, total: int) -> Step:
    number = record.get("step")
    if type(number) is not int:
        raise ValueError("the step has no number 'step'")
    tables, computed = record.get("tables"), record.get("computed")
    if not isinstance(tables, dict) or not isinstance(computed, dict):
        raise ValueError("'tables' and 'computed' must be objects, one entry for each sequence")
    if tables.keys() != computed.keys():
        raise ValueError("'tables' and 'computed' name different sequences")
    for name, table in tables.items():
        _check_blocks(f"the table of {name}", table, total)
        tokens = computed[name]
        if type(tokens) is not int or not 0 <= tokens <= len(table) * size:
            raise ValueError(
                f"{name} has {tokens!r} computed tokens in {len(table)} blocks of {size}"
            )
    lists = {key: record.get(key, []) for key in ("copies", "cached", "evictions")}
    for copy in lists["copies"] if isinstance(lists["copies"], list) else [None]:
        if not isinstance(copy, list) or len(copy) != 2:
            raise ValueError("'copies' must be a list of [source, target]")
        _check_blocks("'copies'", copy, total)
    for key in ("cached", "evictions"):
        _check_blocks(f"'{key}'", lists[key], total)
    in_use = {block for table in tables.values() for block in table}
    both = sorted(in_use & set(lists["cached"]))
    if both:
        raise ValueError(f"block {both[0]} is both in use and cached")
    names = {key: record.get(key, []) for key in ("preempted", "finished")}
    for key, value in names.items():
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"'{key}' must be a list of sequences")
    return Step(
        step=number,
        tables=tables,
        computed=computed,
        cached=lists["cached"],
        copies=[(source, target) for source, target in lists["copies"]],
        evictions=lists["evictions"],
        preempted=names["preempted"],
        finished=names["finished"],
    )


def _check_blocks(what: str, blocks: Any, total: int) -> None:
    if not isinstance(blocks, list):
        raise ValueError(f"{what} must be a list of blocks")
    for block in blocks:
        if type(block) is not int or not 0 <= block < total:
            raise ValueError(f"{what} has the block {block!r}; there are 0 to {total - 1}")


def figures(trace: Trace) -> dict[str, Any]:
    """Counts over a trace, and the tables of its fullest step."""
    step = trace.steps[trace.fullest()]
    users = step.users()
    return {
        "block_size": trace.block_size,
        "num_blocks": trace.num_blocks,
        "steps": len(trace.steps),
        "sequences": len(trace.sequences()),
        "fullest_step": step.step,
        "most_blocks_in_use": len(users),
        "shared_blocks": sum(len(names) > 1 for names in users.values()),
        "blocks_without_sharing": sum(map(len, step.tables.values())),
        "copies": sum(len(one.copies) for one in trace.steps),
        "evictions": sum(len(one.evictions) for one in trace.steps),
        "preempted": sum(len(one.preempted) for one in trace.steps),
        "tables": step.tables,
    }


def page(trace: Trace, title: str, first: int) -> str:
    """The HTML page, opened at the step of index `first`."""
    data = {
        "block_size": trace.block_size,
        "num_blocks": trace.num_blocks,
        "first": first,
        "steps": [vars(step) for step in trace.steps],
    }
    # Inside a script element only "</" could end it.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    template = TEMPLATE.read_text(encoding="utf-8")
    before, after = template.replace("__TITLE__", html.escape(title)).split("__TRACE__")
    return before + text + after


def colours(trace: Trace, lightness: float) -> dict[str, tuple[float, float, float]]:
    """A colour for each sequence, the same hue as on the page."""
    return {
        name: colorsys.hls_to_rgb((210 + index * 137.508) % 360 / 360, lightness, 0.62)
        for index, name in enumerate(trace.sequences())
    }


def draw(trace: Trace, index: int, title: str, path: Path) -> None:
    """The still picture of one step: the blocks, and below them the whole run."""
    plt = pyplot()
    from matplotlib.patches import Rectangle

    step, users = trace.steps[index], trace.steps[index].users()
    strong, pale = colours(trace, 0.66), colours(trace, 0.92)
    last: dict[int, str] = {}
    for one in trace.steps[: index + 1]:
        last.update((block, name) for name, table in one.tables.items() for block in table)
    rows = -(-trace.num_blocks // COLUMNS)
    figure, (blocks, run_axis) = plt.subplots(
        2, 1, figsize=(8, 1.9 + 0.42 * min(rows, 40)), height_ratios=(0.42 * rows, 1.3)
    )
    copied = {target for one in trace.steps[: index + 1] for _, target in one.copies}
    for block in range(trace.num_blocks):
        y, x = divmod(block, COLUMNS)
        names = users.get(block, [])
        for i, name in enumerate(names):
            tokens = step.computed[name] - step.tables[name].index(block) * trace.block_size
            fill = 0.9 * min(trace.block_size, max(tokens, 0)) / trace.block_size
            width = 0.9 / len(names)
            blocks.add_patch(
                Rectangle((x + i * width, y + 0.9 - fill), width, fill, color=strong[name], lw=0)
            )
        cached = block in step.cached
        if cached:
            owner = last.get(block)
            face = pale[owner] if owner else "#eeeeee"
            blocks.add_patch(Rectangle((x, y), 0.9, 0.9, color=face, lw=0))
        edge = "#000000" if len(names) > 1 else "#666666" if names else "#cccccc"
        style = "--" if cached else "-"
        width = 1.8 if len(names) > 1 else 0.7
        blocks.add_patch(Rectangle((x, y), 0.9, 0.9, fill=False, ec=edge, lw=width, ls=style))
        blocks.text(x + 0.06, y + 0.3, str(block), fontsize=6.5, color="#333333")
        if len(names) > 1:
            blocks.text(
                x + 0.84,
                y + 0.8,
                f"{len(names)}x",
                fontsize=7,
                ha="right",
                weight="bold",
                bbox=LABEL,
            )
        if block in copied and names:
            blocks.text(x + 0.84, y + 0.3, "copy", fontsize=5.5, ha="right", color="#000000")
    blocks.set(xlim=(-0.1, COLUMNS), ylim=(rows, -0.1), aspect="equal")
    blocks.set_axis_off()
    blocks.set_title(
        f"{title}: step {step.step}, {len(users)} of {trace.num_blocks} blocks in use, "
        f"{sum(len(n) > 1 for n in users.values())} shared, {len(step.cached)} cached",
        fontsize=9,
    )
    _draw_run(trace, step, run_axis)
    save_figure(figure, path)
    plt.close(figure)


def _draw_run(trace: Trace, step: Step, axis: Any) -> None:
    counts = [Counter(len(names) > 1 for names in one.users().values()) for one in trace.steps]
    numbers = [one.step for one in trace.steps]
    layers = [
        [count[True] for count in counts],
        [count[False] for count in counts],
        [len(one.cached) for one in trace.steps],
    ]
    axis.stackplot(
        numbers,
        layers,
        labels=("shared", "of one sequence", "cached"),
        colors=("#444b52", "#5b8fd6", "#dfe6ee"),
        step="post",
    )
    axis.axvline(step.step, color="black", linewidth=0.8)
    for one in trace.steps:
        if one.copies or one.evictions or one.preempted:
            colour = "#c1121f" if one.evictions or one.preempted else "#000000"
            axis.plot(one.step, 0, marker="^", color=colour, markersize=5, clip_on=False)
    axis.set(xlabel="step (black mark: copies; red: evictions, preemption)", ylabel="blocks")
    axis.set_ylim(0, max(map(sum, zip(*layers, strict=True))) * 1.05 + 1)
    axis.legend(fontsize=7, loc="upper left", ncols=3)


def _index_of(trace: Trace, number: int | None) -> int:
    if number is None:
        return trace.fullest()
    numbers = [step.step for step in trace.steps]
    if number not in numbers:
        raise ValueError(f"step is {number}; the trace has {numbers[0]} to {numbers[-1]}")
    return numbers.index(number)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        __doc__, "python -m scripts.poolview --data trace.jsonl --html pool.html --plot pool"
    )
    parser.add_argument(
        "--data", metavar="FILE", type=Path, default=EXAMPLE, help="a trace (default: the example)"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the page with the slider")
    parser.add_argument("--step", type=int, metavar="N", help="the step of the still picture")
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    trace = read_trace(args.data)
    index = _index_of(trace, args.step)
    title = args.data.name.removesuffix(".gz").removesuffix(".jsonl").replace("_", " ")
    found = figures(trace)
    rows: list[list[Cell]] = [
        [name, len(table), trace.steps[index].computed[name], str(table)]
        for name, table in trace.steps[index].tables.items()
    ]
    print_table(
        f"{title}: step {trace.steps[index].step} of {len(trace.steps)}",
        ["sequence", "blocks", "tokens", "block table"],
        rows,
    )
    print(
        f"{found['most_blocks_in_use']} blocks in use at most, {found['shared_blocks']} of them "
        f"shared ({found['blocks_without_sharing']} without sharing); {found['copies']} copies, "
        f"{found['evictions']} evictions, {found['preempted']} preemptions"
    )
    if args.html is not None:
        args.html.parent.mkdir(parents=True, exist_ok=True)
        args.html.write_text(page(trace, title, index), encoding="utf-8")
        print(f"wrote {args.html}")
    write_json(args.json, found)
    if args.plot is not None:
        draw(trace, index, title, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
