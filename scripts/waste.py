"""How much of the KV memory that four ways to reserve it hold is real tokens.

A request of p prompt and a answer tokens holds p + t tokens at step t = 1 ... a. For it are
reserved, at that step,

  max     the whole window of the model
  pow2    p + 2^ceil(log2 a): the answer's length guessed as the next power of two
  oracle  p + a: the answer's length known beforehand
  paged   the blocks begun, block size * ceil((p + t) / block size)

The sums over all steps of all requests are exact integers, in closed form. "real %" is held over
reserved, "slots" the mean reserved per running request, "running" how many of these fit into
--slots at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.data import Requests, add_data_arguments, load_requests
from scripts.formats import IntArray
from scripts.published import WASTE
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

POLICIES = ("max", "pow2", "oracle", "paged")
WINDOW = 2048
SLOTS = 15_700  # OPT-13B on an A100 with 40 GB (PagedAttention, Kwon et al. 2023, Table 1)


def held(prompt: IntArray, answer: IntArray) -> int:
    """Tokens held, summed over every step of every request."""
    return int((answer * prompt + answer * (answer + 1) // 2).sum())


def paged(prompt: IntArray, answer: IntArray, block_size: int) -> int:
    """Slots of the blocks held, summed over every step of every request."""

    def upto(tokens: IntArray) -> IntArray:
        """The sum of block_size * ceil(n / block_size) for n = 1 ... tokens."""
        full, rest = np.divmod(tokens, block_size)
        total: IntArray = block_size * (block_size * full * (full + 1) // 2 + rest * (full + 1))
        return total

    return int((upto(prompt + answer) - upto(prompt)).sum())


def next_power_of_two(values: IntArray) -> IntArray:
    """The smallest power of two that is at least each value; values are 1 or more."""
    exponents = np.frexp(values - 1)[1]  # exact below 2^53, so no logarithm to round
    power: IntArray = np.left_shift(np.int64(1), exponents.astype(np.int64))
    return power


def window_for(requests: Requests, window: int | None) -> int:
    """`window`, by default 2,048 or the next power of two that the longest request fits into.

    Raises:
        ValueError: a window shorter than the longest request.
    """
    longest = int((requests.prompt + requests.answer).max())
    if window is None:
        return max(WINDOW, int(next_power_of_two(np.array([longest]))[0]))
    if window < longest:
        raise ValueError(
            f"window is {window}, but the longest request of {requests.name} has {longest} tokens"
        )
    return window


def waste(
    requests: Requests, block_size: int = 16, window: int | None = None, slots: int = SLOTS
) -> dict[str, Any]:
    """The figures of every policy; sums are exact, fractions are rounded to six digits.

    Raises:
        ValueError: a window shorter than the longest request; a block size or number of slots
            below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    if slots < 1:
        raise ValueError(f"slots is {slots}; it must be at least 1")
    prompt, answer = requests.prompt, requests.answer
    window = window_for(requests, window)
    steps, tokens = int(answer.sum()), held(prompt, answer)
    reserved = {
        "max": window * steps,
        "pow2": int((answer * (prompt + next_power_of_two(answer))).sum()),
        "oracle": int((answer * (prompt + answer)).sum()),
        "paged": paged(prompt, answer, block_size),
    }
    figures: dict[str, Any] = {"window": window, "held": tokens, "steps": steps}
    for policy in POLICIES:
        figures[policy] = {
            "reserved": reserved[policy],
            "real_fraction": round(tokens / reserved[policy], 6),
            "slots_per_request": round(reserved[policy] / steps, 3),
            "running_at_once": slots * steps // reserved[policy],
        }
    return figures


def table_rows(requests: Requests, figures: dict[str, Any]) -> list[list[Cell]]:
    """Ours, and beside it what was published for the same data set."""
    published = WASTE.get(requests.family or "", {})
    rows: list[list[Cell]] = []
    for policy in POLICIES:
        ours = figures[policy]
        running = published.get("running", {}).get(policy)
        slots = published.get("slots", {}).get(policy)
        rows.append(
            [
                policy,
                100 * ours["real_fraction"],
                published.get("real_percent", {}).get(policy),
                round(ours["slots_per_request"]),
                None if slots is None else int(slots),
                ours["running_at_once"],
                None if running is None else int(running),
            ]
        )
    return rows


def _plot(results: Sequence[tuple[Requests, dict[str, Any]]], path: str) -> None:
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.2))
    width = 0.8 / len(results)
    for index, (requests, figures) in enumerate(results):
        real = [100 * figures[policy]["real_fraction"] for policy in POLICIES]
        places = np.arange(len(POLICIES)) + (index - (len(results) - 1) / 2) * width
        bars = axis.bar(places, real, width, label=requests.name)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks(range(len(POLICIES)), POLICIES)
    axis.set(ylabel="real tokens (% of reserved slots)", ylim=(0, 108))
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper left")
    save_figure(figure, path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "python -m scripts.waste --data sharegpt --plot waste")
    add_data_arguments(parser, default=("sharegpt", "alpaca"))
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="of paged (16)")
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens that max reserves (default: 2,048, or the power of two that all fit into)",
    )
    parser.add_argument(
        "--slots", type=int, default=SLOTS, metavar="N", help="tokens that fit (default: 15,700)"
    )
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    results = []
    for source in args.data:
        requests = load_requests(source, args.requests, args.tokenizer, args.seed)
        figures = waste(requests, args.block_size, args.window, args.slots)
        results.append((requests, figures))
        print_table(
            f"{requests.name}: {len(requests):,} requests of {requests.prompt.mean():.0f} prompt "
            f"and {requests.answer.mean():.0f} answer tokens, window {figures['window']:,}, "
            f"block size {args.block_size}",
            [
                "reserved",
                "real %",
                "published",
                "slots",
                "published",
                f"running in {args.slots:,}",
                "published",
            ],
            table_rows(requests, figures),
        )
    write_json(args.json, {requests.name: figures for requests, figures in results})
    if args.plot is not None:
        _plot(results, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
