"""What every script shares: its arguments, its table, its JSON, its figure and its progress bar.

A script is a module with a `main(argv)` that builds its parser with `make_parser`, adds its own
arguments, and returns an exit code. `run(main)` turns a user's mistake (ValueError, OSError) into
one line on stderr and exit code 2, and Ctrl-C into exit code 130.

    def main(argv: Sequence[str] | None = None) -> int:
        parser = make_parser(__doc__, "python -m scripts.waste --plot waste")
        add_output_arguments(parser)
        args = parser.parse_args(argv)
        ...
        print_table("Waste", ["policy", "real %"], [["max", 17.3]])
        write_json(args.json, {"max": 0.173})
        if args.plot is not None:
            save_figure(figure, args.plot)
        return 0

    if __name__ == "__main__":
        run(main)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
Cell = str | int | float | None

# Colour-blind safe (Okabe and Ito, 2008), in the order in which a figure uses them.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#F0E442")


def make_parser(doc: str | None, example: str) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring followed by `example`, a command line."""
    return argparse.ArgumentParser(
        description=(doc or "").strip(),
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--json [FILE]` and `--plot FILE`, which mean the same in every script."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write the figures as JSON to FILE; without FILE as one line after the table",
    )
    group.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw the figures: FILE.png and FILE.svg"
    )


def run(main: Callable[[], int]) -> NoReturn:
    """Run a script's `main` and exit; what the user got wrong becomes one line, no traceback."""
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def format_cell(value: Cell) -> str:
    """Integers with thousands separators, floats with one decimal, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def format_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A plain text table: the first column flush left, the others flush right.

    Raises:
        ValueError: a row has not as many cells as the header.
    """
    cells = [[format_cell(value) for value in row] for row in rows]
    for row in cells:
        if len(row) != len(header):
            raise ValueError(f"a row of {len(row)} cells under a header of {len(header)}: {row}")
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([title, rule, line(header), rule, *map(line, cells)])


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print `format_table` and an empty line."""
    print(format_table(title, header, rows) + "\n")


def write_json(target: str | Path | None, figures: Mapping[str, Any]) -> None:
    """Write `figures` to a file, or as one line to stdout if `target` is "-"; None writes nothing.

    Raises:
        ValueError: a figure is not finite, which JSON cannot say.
    """
    if target is None:
        return
    if str(target) == "-":
        print(json.dumps(figures, allow_nan=False))
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files only.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from cycler import cycler
    except ImportError as error:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install 'mlx-paged[plot]'"
        ) from error
    matplotlib.use("Agg")
    # The same figure gives the same bytes, and text in an SVG stays text.
    matplotlib.rcParams.update(
        {
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.prop_cycle": cycler(color=COLOURS),
            "figure.constrained_layout.use": True,
            "font.size": 9,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "mlx-paged",
        }
    )
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: str | Path) -> list[Path]:
    """Write a matplotlib figure beside `path` as .png and as .svg, say so, and return both paths.

    A .png or .svg at the end of `path` is dropped; any other dot belongs to the name.
    """
    path = Path(path)
    stem = path.with_suffix("") if path.suffix.lower() in (".png", ".svg") else path
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.parent / f"{stem.name}{suffix}" for suffix in (".png", ".svg")]
    figure.savefig(written[0], dpi=130, metadata={"Software": None})
    figure.savefig(written[1], metadata={"Date": None, "Creator": None})
    print("wrote " + " and ".join(map(str, written)), file=sys.stderr)
    return written


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """Iterate with a bar on stderr; none where stderr is not a terminal."""
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(
        items, desc=title, total=total, disable=None, leave=False, dynamic_ncols=True
    )
    return bar
