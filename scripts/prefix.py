"""What the prefix cache saves: three prompts through the engine, then real conversations.

1. Three prompts through the engine: A (103 tokens), A again, B (the first 85 tokens of A, then its
   own) and C (nothing of A). A full block that is found is not computed again; with reuse to the
   token, nor is the part of the next one.
2. ShareGPT conversations, turn by turn, each prompt the whole history in the Qwen2.5 chat template:
   how much of all prompt tokens a cache reuses, by block size, if it keeps everything.
3. The same, by cache size, least recently used evicted first, through the project's own block
   pool. The file has no times: in its order every conversation is finished before the next begins;
   more like a server is many open at once. Which earlier turn a turn shares its prefix with is not
   in the file either: it is taken to be the turn ahead, for first turns the latest that is long
   enough, so with small caches first turns are found rather too often.
4. Mooncake's trace of a chat service (prompts of 12,000 tokens; prefixes known in blocks of 512).

--data takes a turns file or a Mooncake trace, see scripts/data/README.md.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.data import FOLDER
from scripts.formats import MOONCAKE_BLOCK, Mooncake, Turns, kind_of, read_mooncake, read_turns
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
from scripts.reuse import replay, trace_of_mooncake, trace_of_turns, unlimited

TURNS = FOLDER / "sharegpt_turns.csv.gz"
MOONCAKE = FOLDER / "mooncake_conversation.jsonl.gz"
SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
CACHE_TOKENS = (4_096, 16_384, 65_536, 262_144, 1_048_576, None)
MOONCAKE_TOKENS = (262_144, 1_048_576, 4_194_304, 16_777_216, None)
SHARED = 85
# Qwen2.5-1.5B in 16 bits: 28 layers, 2 KV heads of 128, keys and values.
BYTES_PER_TOKEN = 28 * 2 * 128 * 2 * 2


def make_prompts(vocab_size: int, seed: int = 0) -> dict[str, list[int]]:
    """Token ids of A (103), of B (the first 85 of A and 20 others) and of C (90, none like A's)."""
    ids = random.Random(seed).sample(range(vocab_size), 103 + 20 + 90)
    return {"A": ids[:103], "B": ids[:SHARED] + ids[103:123], "C": ids[123:]}


def through_engine(model: Any, block_size: int = 16, seed: int = 0) -> list[dict[str, Any]]:
    """Run A, A again, B and C through one engine, and the same with reuse to the token.

    Args:
        model: a loaded model with a vocabulary of 213 tokens or more.

    Returns:
        One dict a prompt; `same` is whether its tokens are those of an engine without a cache.
    """
    from mlx_paged.engine import Engine
    from mlx_paged.sampling import SamplingParams

    prompts = make_prompts(model.config.vocab_size, seed)
    order = [("A", "A"), ("A repeated", "A"), ("B", "B"), ("C", "C")]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    results: list[dict[str, Any]] = []

    def answers(
        prefix_caching: bool, token_reuse: bool
    ) -> list[tuple[list[int | None], dict[str, int]]]:
        engine = Engine(
            model,
            block_size=block_size,
            num_blocks=-(-1024 // block_size),
            prefix_caching=prefix_caching,
            token_reuse=token_reuse,
        )
        found = []
        for _, key in order:
            before = engine.stats
            engine.add(prompts[key], params)
            tokens: list[int | None] = []
            while engine.has_work:
                tokens += [output.token for output in engine.step()]
            after = engine.stats
            names = ("blocks_reused", "tokens_reused", "tokens_copied")
            found.append((tokens, {n: getattr(after, n) - getattr(before, n) for n in names}))
        return found

    cold = answers(False, False)
    full = answers(True, False)
    part = answers(True, True)
    for i, (name, key) in enumerate(order):
        shared = sum(a == b for a, b in zip(prompts["A"], prompts[key], strict=False)) if i else 0
        counts = part[i][1]
        results.append(
            {
                "prompt": name,
                "tokens": len(prompts[key]),
                "shared_with_a": shared,
                "blocks_found": full[i][1]["blocks_reused"],
                "tokens_not_computed": full[i][1]["tokens_reused"],
                "tokens_not_computed_to_the_token": counts["tokens_reused"]
                + counts["tokens_copied"],
                "same": cold[i][0] == full[i][0] == part[i][0],
            }
        )
    return results


def first_conversations(turns: Turns, count: int) -> Turns:
    """The turns of the first `count` conversations; of all for 0.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"sample is {count}; give 0 for all conversations, or how many")
    ids = turns.conversation
    changes = (ids[1:] != ids[:-1]).cumsum()
    rows = len(turns) if not count else 1 + int((changes < count).sum())
    return Turns(
        ids[:rows], turns.turn[:rows], turns.prompt[:rows], turns.answer[:rows], turns.shared[:rows]
    )


def by_cache_size(
    turns: Turns, tokens: Sequence[int | None], block_size: int, conversations: int
) -> list[dict[str, Any]]:
    """Reuse under LRU by the cache's size in tokens; None keeps everything.

    Raises:
        ValueError: a cache smaller than a block.
    """
    single = trace_of_turns(turns, block_size)
    many = trace_of_turns(turns, block_size, conversations)
    rows = []
    for size in tokens:
        blocks = None if size is None else size // block_size
        if blocks == 0:
            raise ValueError(f"a cache of {size} tokens is smaller than a block of {block_size}")
        title = f"cache of {size or 'all'} tokens"
        rows.append(
            {
                "cache_tokens": size,
                "file_order": replay(single, blocks, title=title),
                "open": replay(many, blocks, title=title),
                "open_to_the_token": replay(many, blocks, to_the_token=True, title=title),
            }
        )
    return rows


def mooncake_tables(mooncake: Mooncake, tokens: Sequence[int | None]) -> dict[str, Any]:
    """Reuse in Mooncake's trace by block size (everything kept) and by cache size (LRU).

    `to_the_token_at_most` is what reuse to the token could reach: the trace does not tell more than
    that the prompts part somewhere in the next 512 tokens.
    """
    sizes: dict[str, Any] = {}
    for size in (MOONCAKE_BLOCK * n for n in (1, 2, 4, 8)):
        sizes[str(size)] = replay(trace_of_mooncake(mooncake, size), title=f"blocks of {size}")
    trace = trace_of_mooncake(mooncake)
    total = trace.prompt_tokens
    most = sum(min(r.shared + MOONCAKE_BLOCK - 1, r.prompt - 1) for r in trace.requests)
    caches = [
        replay(trace, None if size is None else size // MOONCAKE_BLOCK, title=f"cache of {size}")
        for size in tokens
    ]
    return {
        "unlimited": sizes,
        "to_the_token_at_most": round(most / total, 6),
        "lru": [cache | {"cache_tokens": size} for size, cache in zip(tokens, caches, strict=True)],
    }


def _percent(fraction: float) -> float:
    return 100 * fraction


def _size_cells(tokens: int | None) -> list[Cell]:
    if tokens is None:
        return ["unlimited", None]
    return [f"{tokens:,}", f"{tokens * BYTES_PER_TOKEN / 2**30:.2f}"]


def _print_engine(rows: Sequence[dict[str, Any]], block_size: int) -> None:
    print_table(
        f"Three prompts through the engine, block size {block_size}",
        [
            "prompt",
            "tokens",
            "shared with A",
            "blocks found",
            "not computed",
            "to the token",
            "same answer as without a cache",
        ],
        [
            [
                row["prompt"],
                row["tokens"],
                row["shared_with_a"],
                row["blocks_found"],
                row["tokens_not_computed"],
                row["tokens_not_computed_to_the_token"],
                str(row["same"]),
            ]
            for row in rows
        ],
    )


def _turns_part(turns: Turns, name: str, args: Any) -> dict[str, Any]:
    figures = {size: unlimited(turns, size) for size in args.sizes}
    print_table(
        f"{name}: {len(turns):,} turns, everything kept; reused % of the prompt tokens",
        ["block size", "all turns", "first turns", "later turns", "turns that reuse"],
        [
            [
                "1 (to the token)" if size == 1 else str(size),
                _percent(one["reused_fraction"]),
                _percent(one["first_turn_fraction"]),
                _percent(one["later_turn_fraction"]),
                one["requests_with_reuse"],
            ]
            for size, one in figures.items()
        ],
    )
    sample = first_conversations(turns, args.sample)
    caches = by_cache_size(sample, args.cache_tokens, args.block_size, args.open)
    print_table(
        f"{name}: the first {len(sample):,} turns, least recently used evicted, "
        f"block size {args.block_size}; reused %",
        [
            "cache tokens",
            "GiB, Qwen2.5-1.5B",
            "file order",
            f"{args.open} open at once",
            "and to the token",
        ],
        [
            [
                *_size_cells(row["cache_tokens"]),
                _percent(row["file_order"]["reused_fraction"]),
                _percent(row["open"]["reused_fraction"]),
                _percent(row["open_to_the_token"]["reused_fraction"]),
            ]
            for row in caches
        ],
    )
    return {"unlimited": {str(size): one for size, one in figures.items()}, "lru": caches}


def _mooncake_part(mooncake: Mooncake, name: str) -> dict[str, Any]:
    figures = mooncake_tables(mooncake, MOONCAKE_TOKENS)
    rows: list[list[Cell]] = [
        [size, _percent(one["reused_fraction"])] for size, one in figures["unlimited"].items()
    ]
    rows.insert(0, ["to the token, at most", _percent(figures["to_the_token_at_most"])])
    print_table(
        f"{name}: {len(mooncake.lengths):,} requests, everything kept; reused %",
        ["block size", "all requests"],
        rows,
    )
    print_table(
        f"{name}: least recently used evicted, block size {MOONCAKE_BLOCK}; reused %",
        ["cache tokens", "GiB, Qwen2.5-1.5B", "all requests", "requests too large"],
        [
            [
                *_size_cells(row["cache_tokens"]),
                _percent(row["reused_fraction"]),
                row["too_large"],
            ]
            for row in figures["lru"]
        ],
    )
    return figures


def _lru_lines(
    rows: Sequence[dict[str, Any]], conversations: int
) -> dict[str, list[tuple[int, float]]]:
    """(cache size in tokens, reused %) of every limited cache, by what to call the line."""
    labels = {
        "file_order": ", file order",
        "open": f", {conversations} open at once",
        "open_to_the_token": f", {conversations} open, to the token",
    }
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["cache_tokens"] is None:
            continue
        for key, label in labels.items() if "open" in row else [(None, "")]:
            figures = row if key is None else row[key]
            point = row["cache_tokens"], _percent(figures["reused_fraction"])
            lines.setdefault(label, []).append(point)
    return lines


def _plot(results: dict[str, Any], conversations: int, path: Path) -> None:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for name, part in results.items():
        if name == "engine":
            continue
        short = name.split(".")[0]
        sizes = [int(size) for size in part["unlimited"]]
        left.plot(
            sizes,
            [_percent(one["reused_fraction"]) for one in part["unlimited"].values()],
            marker="o",
            label=short,
        )
        for label, points in _lru_lines(part["lru"], conversations).items():
            right.plot(*zip(*points, strict=True), marker="o", label=short + label)
    left.set_xscale("log", base=2)
    left.set(xlabel="block size (tokens)", ylabel="prompt tokens reused (%)", ylim=(0, 100))
    left.set_title("everything kept", fontsize=9)
    right.set_xscale("log", base=2)
    right.set_xlabel("cache size (tokens), least recently used evicted")
    right.set_title("limited cache", fontsize=9)
    left.legend(fontsize=7)
    right.legend(fontsize=7)
    save_figure(figure, path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "python -m scripts.prefix --plot prefix")
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        nargs="+",
        default=[TURNS, MOONCAKE],
        help="turns files and Mooncake traces (default: the two in scripts/data)",
    )
    parser.add_argument(
        "--model", default="tiny", help="model of the three prompts; none leaves them out (tiny)"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="(16)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=list(SIZES), metavar="N", help="block sizes"
    )
    parser.add_argument(
        "--open", type=int, default=64, metavar="N", help="conversations open at once (64)"
    )
    parser.add_argument(
        "--sample",
        type=int,
        default=1000,
        metavar="N",
        help="conversations in the table by cache size, 0 for all (1,000)",
    )
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    args.cache_tokens = CACHE_TOKENS
    if not 1 <= args.block_size <= 256:
        raise ValueError(f"block size is {args.block_size}; it must be from 1 to 256")
    traces: list[tuple[str, Turns | Mooncake]] = []
    for path in args.data:
        kind = kind_of(path)
        if kind not in ("turns", "mooncake"):
            raise ValueError(f"{path}: holds no prefixes; a turns file or a Mooncake trace does")
        traces.append((path.name, read_turns(path) if kind == "turns" else read_mooncake(path)))
    results: dict[str, Any] = {}
    if args.model != "none":
        from mlx_paged.loader import load

        model, _ = load(args.model)
        results["engine"] = through_engine(model, args.block_size)
        _print_engine(results["engine"], args.block_size)
    for name, trace in traces:
        if isinstance(trace, Turns):
            results[name] = _turns_part(trace, name, args)
        else:
            results[name] = _mooncake_part(trace, name)
    write_json(args.json, results)
    if args.plot is not None:
        _plot(results, args.open, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
