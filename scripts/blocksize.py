"""What the block size costs and what it buys.

Small blocks leave less of the last one empty ("real %", as scripts.waste counts it), large ones
need fewer entries in the block tables ("blocks per request", when it is finished). Large ones also
share less: of a prefix that two prompts have in common, only whole blocks are found ("reused of
85": block size * floor(85 / block size), for two prompts that share their first 85 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.data import Requests, add_data_arguments, load_requests
from scripts.published import BLOCK_SIZE
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
from scripts.waste import held, paged

SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
SHARED = 85


def block_size(requests: Requests, size: int, shared: int = SHARED) -> dict[str, Any]:
    """The figures of one block size; sums are exact, fractions are rounded.

    Raises:
        ValueError: a size below 1, or `shared` below 0.
    """
    if size < 1:
        raise ValueError(f"block size is {size}; it must be at least 1")
    if shared < 0:
        raise ValueError(f"shared is {shared}; it must be at least 0")
    reserved = paged(requests.prompt, requests.answer, size)
    blocks = int(-(-(requests.prompt + requests.answer) // size).sum())
    return {
        "reserved": reserved,
        "real_fraction": round(held(requests.prompt, requests.answer) / reserved, 6),
        "blocks_per_request": round(blocks / len(requests), 4),
        "shared_tokens_reused": size * (shared // size),
    }


def _plot(results: Sequence[tuple[Requests, dict[int, dict[str, Any]]]], path: str) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
    for requests, figures in results:
        sizes = list(figures)
        real = [100 * one["real_fraction"] for one in figures.values()]
        blocks = [one["blocks_per_request"] for one in figures.values()]
        left.plot(sizes, real, marker="o", label=requests.name)
        right.plot(sizes, blocks, marker="o", label=requests.name)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel("block size (tokens)")
        axis.axvline(16, color="#666666", linewidth=0.8, linestyle=":")
    left.set(ylabel="real tokens (% of slots held)", ylim=(0, 103))
    right.set(ylabel="blocks per request", yscale="log")
    left.legend()
    save_figure(figure, path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "python -m scripts.blocksize --data sharegpt --plot blocksize")
    add_data_arguments(parser, default=("sharegpt", "alpaca"))
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="block sizes"
    )
    parser.add_argument(
        "--shared", type=int, default=SHARED, metavar="N", help="tokens two prompts share (85)"
    )
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    results = []
    for source in args.data:
        requests = load_requests(source, args.requests, args.tokenizer, args.seed)
        figures = {size: block_size(requests, size, args.shared) for size in args.sizes}
        results.append((requests, figures))
        published = BLOCK_SIZE.get(requests.family or "", {})
        rows: list[list[Cell]] = []
        for size, ours in figures.items():
            real, blocks = published.get(size, (None, None))
            rows.append(
                [
                    str(size),
                    100 * ours["real_fraction"],
                    real,
                    ours["blocks_per_request"],
                    blocks,
                    ours["shared_tokens_reused"],
                    f"{100 * ours['shared_tokens_reused'] / max(args.shared, 1):.0f} %",
                ]
            )
        print_table(
            f"{requests.name}: {len(requests):,} requests",
            [
                "block size",
                "real %",
                "published",
                "blocks per request",
                "published",
                f"reused of {args.shared}",
                "",
            ],
            rows,
        )
    write_json(
        args.json,
        {
            requests.name: {str(size): one for size, one in figures.items()}
            for requests, figures in results
        },
    )
    if args.plot is not None:
        _plot(results, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
