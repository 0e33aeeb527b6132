"""This engine against mlx-lm's contiguous cache: same weights, same machine, one run.

Workloads (name them, or measure all):

  single    one prompt                                     against stream_generate
  uniform   prompts of one length                          against batch_generate
  skewed    one long prompt among short ones               against batch_generate
  mixed     ShareGPT's lengths, in limited memory          against batch_generate, free of the
            limit and, "limited", with a batch so small that it keeps to it
  samples   samples of one prompt                          against batch_generate of copies, and
            against one prefill with copied caches
  chat      conversations on one system prompt             against LRUPromptCache
  capacity  how many of ShareGPT's requests run at once in a number of bytes, weights aside, found
            by running them: against one batch, and against unbatched caches in turns

batch_generate is there twice: with its defaults, and "tuned", with those settings (batch sizes,
step of long prompts) that were the fastest on this very workload. Ours has its defaults.

Both sides take the most likely token, from the same weights and token ids, without text. They run
in turn; the ratio is the median over pairs of runs, with a 95 % interval by the bootstrap. Peak
memory comes from processes of their own, which run one side once. "different" counts answers that
are not the same on both sides; the gap is that of the two best logits where they part, over the
largest logit (1e-6 is a tie in float32). Our pool is made before the clock starts, as a server
makes it once; ours is warm, and so is mlx-lm.

On Linux, give MLX a BLAS: preload OpenBLAS (LD_PRELOAD), as the README shows.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlx_paged.options import add_engine_arguments, engine_options
from scripts.benchmark.workloads import NAMES, PRESETS, Sizes, chosen_sizes
from scripts.report import Cell, add_output_arguments, make_parser, print_table, run, write_json

EXAMPLE = """python -m scripts.bench
  python -m scripts.bench single uniform --repeat 9 --plot bench
  python -m scripts.bench --model path/to/Qwen2.5-0.5B --preset small --json real.json
  python -m scripts.bench skewed --random 8x512 --size skewed.long=8192 --size skewed.new=32
  python -m scripts.bench --profile
  python -m scripts.bench --scaling --plot scaling
  python -m scripts.bench --compare before.json after.json"""


def make_arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = make_parser(__doc__, EXAMPLE)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(NAMES))
    what = parser.add_argument_group("instead of workloads").add_mutually_exclusive_group()
    what.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSON", help="B against A, from two files"
    )
    what.add_argument(
        "--profile",
        action="store_true",
        help="how much of a decode step is our own Python, by phase, and by function",
    )
    what.add_argument(
        "--scaling",
        action="store_true",
        help="time per decode step against context, rows, and size of the pool",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help="tiny, a checkpoint's folder, or a Hub id")
    model.add_argument(
        "--random",
        default="4x256",
        metavar="LxH",
        help="without --model: random weights, L layers of hidden size H (%(default)s)",
    )
    model.add_argument("--heads", type=int, metavar="N", help="of --random (one per 64 of hidden)")
    model.add_argument("--kv-heads", type=int, metavar="N", help="of --random (half the heads)")
    model.add_argument("--vocab", type=int, default=4096, metavar="N", help="of --random (4096)")
    model.add_argument(
        "--intermediate", type=int, metavar="N", help="of --random (2.6875 x hidden: 688 of 256)"
    )
    model.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="of both sides (float32 on a CPU; elsewhere as stored, random float16)",
    )
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="full",
        help="full; small, for a real model on a few CPU cores; smoke, to see that all works "
        "(%(default)s)",
    )
    sizes.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="W.S=N",
        help="set size S of workload W; may be repeated. In full: "
        + "; ".join(_sizes_line(one) for one in PRESETS["full"])
        + ". room is in tokens; memory, in bytes such as 64MiB, overrides it if not 0; of "
        "capacity these are the bytes of all but the weights, with whole=0 of keys and values only",
    )
    sizes.add_argument("--data", default="sharegpt", metavar="SOURCE", help="see scripts.data")
    sizes.add_argument("--seed", type=int, default=0, help="of prompts and weights (0)")
    how = parser.add_argument_group("measurement")
    how.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each side (5)")
    how.add_argument(
        "--no-tune",
        action="store_true",
        help="do not look for mlx-lm's best settings: quicker, but half of the comparison",
    )
    how.add_argument("--no-memory", action="store_true", help="no processes for peak memory")
    how.add_argument(
        "--steps", type=int, default=60, metavar="N", help="per case of --profile, --scaling (60)"
    )
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser


def _sizes_line(sizes: Sizes) -> str:
    return f"{sizes.name} " + " ".join(
        f"{field.name}={getattr(sizes, field.name)}" for field in fields(sizes)
    )


class Interrupted:
    """A place for measurements that Ctrl-C may cut short: what is there is kept."""

    def __init__(self) -> None:
        self.happened = False

    def run(self, work: Callable[[], None]) -> None:
        """Do the work; a Ctrl-C, or a polite kill, ends it here."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            work()
        except KeyboardInterrupt:
            self.happened = True
            print("interrupted; what was measured follows", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_arguments()
    args = parser.parse_args(argv)
    if args.compare:
        return _compare(args.compare)
    for name, value in (("repeat", args.repeat), ("steps", args.steps)):
        if value < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1")
    chosen = chosen_sizes(args.preset, args.workloads, args.size)
    engine = engine_options(args)
    for name in ("memory_limit", "num_blocks"):
        if name in engine:
            raise ValueError(
                f"--{name.replace('_', '-')} is not for the benchmark, whose pools follow the "
                "workload; set --size mixed.memory or capacity.memory"
            )
    # Here, as these load MLX: --help and mistakes must not wait for it.
    from scripts.benchmark import machine
    from scripts.benchmark.measurement import Bench, Options
    from scripts.benchmark.models import ModelSpec, load_models

    spec = ModelSpec(
        model=args.model,
        random=args.random,
        heads=args.heads,
        kv_heads=args.kv_heads,
        vocab=args.vocab,
        intermediate=args.intermediate,
        dtype=args.dtype,
        seed=args.seed,
    )
    options = Options(
        model=spec,
        repeat=args.repeat,
        tune=not args.no_tune,
        memory=not args.no_memory,
        engine=engine,
        data=args.data,
        seed=args.seed,
    )
    models = load_models(spec)
    load = machine.load_average()
    described = machine.describe()
    config = models.ours.config
    figures: dict[str, Any] = {
        "benchmark": "mlx_paged",
        "schema": 1,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {
            "name": spec.label,
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "vocab": config.vocab_size,
            "dtype": str(models.dtype).removeprefix("mlx.core."),
            "parameters": models.parameters,
            "weight_bytes": models.weight_bytes,
            "bytes_per_token": models.bytes_per_token,
        },
        "machine": described,
        "load_average": load,
        "warnings": machine.warnings(described, load),
        "options": {key: value for key, value in asdict(options).items() if key != "model"},
        "interrupted": False,
    }
    from scripts.benchmark import tables

    print(tables.head(figures))
    if args.profile:
        return _profile(args, models, options, figures)
    if args.scaling:
        return _scaling(args, models, options, figures)
    with Bar(len(chosen)) as bar:
        bench = Bench(options, models, bar.tell)
        figures["workloads"] = bench.results

        def work() -> None:
            for sizes in chosen:
                bench.run(sizes)
                bar.advance()
                if args.json not in (None, "-"):
                    write_json(args.json, figures)  # a power cut loses one workload at most

        interrupted = Interrupted()
        interrupted.run(work)
    figures["interrupted"] = interrupted.happened
    workloads = figures["workloads"]
    print(tables.main_table(workloads, args.repeat), end="\n\n")
    print(tables.side_table(workloads), end="\n\n")
    print(tables.memory_table(workloads), end="\n\n")
    for note in tables.notes(workloads):
        print(note)
    write_json(args.json, figures)
    if args.plot is not None and any(r.get("against") for r in workloads.values()):
        from scripts.benchmark import plots

        plots.bench(figures, args.plot)
    return 130 if interrupted.happened else 0


class Bar:
    """A progress bar on stderr that says what runs; none where stderr is not a terminal."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, disable=None, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, text: str) -> None:
        """What runs now."""
        self._bar.set_description(text)

    def advance(self) -> None:
        """One more is done."""
        self._bar.update()


def _compare(paths: Sequence[Path]) -> int:
    from scripts.benchmark import comparison

    a, b = (comparison.read(path) for path in paths)
    for path, figures in zip(paths, (a, b), strict=True):
        if "workloads" not in figures:
            raise ValueError(f"{path} has no workloads; --profile and --scaling cannot be compared")
    print(comparison.compare(a, b))
    return 0


def _profile(args: argparse.Namespace, models: Any, options: Any, figures: dict[str, Any]) -> int:
    from scripts.benchmark.measurement import context
    from scripts.benchmark.profiling import PHASES, Case, functions, profile

    made = context(models, options.data)
    cases = [Case(1, 64), Case(1, 1024), Case(1, 4096), Case(1, 64, 512 * 2**20)]
    cases += [Case(8, 64), Case(32, 64)]
    window = models.ours.config.max_position_embeddings
    cases = [case for case in cases if case.context + args.steps + 32 <= window]
    found: list[dict[str, Any]] = []

    def work() -> None:
        with Bar(len(cases)) as bar:
            for case in cases:
                bar.tell(f"{case.rows} x {case.context}")
                found.append(profile(models, made, case, args.steps, **options.engine))
                bar.advance()

    interrupted = Interrupted()
    interrupted.run(work)
    rows: list[list[Cell]] = []
    for one in found:
        spent = one["microseconds"]
        rows.append(
            [
                f"{one['rows']} x {one['context']:,}",
                round(one["pool_bytes"] / 2**20),
                *(round(spent[phase]) for phase in (*PHASES, "replay", "mlx", "total", "hidden")),
                f"{100 * one['share']:.1f} %",
                f"{100 * one['share_not_hidden']:.1f} %",
            ]
        )
    print_table(
        "Microseconds per decode step, medians. Ours: all but MLX and its replays of a graph; "
        "hidden: what of ours and the replay ran while MLX computed; idle: MLX was not computing",
        [
            *("rows x context", "pool MiB", *PHASES),
            *("replay", "MLX", "step", "hidden", "ours", "idle"),
        ],
        rows,
    )
    figures["profile"] = found
    if not interrupted.happened:
        top = functions(models, made, cases[0], args.steps, 15, **options.engine)
        figures["functions"] = top
        print_table(
            "1 row by function, own time as cProfile sees it (Python looks slower than it is)",
            ["function", "calls per step", "microseconds per step"],
            [[one["function"], one["calls"], one["microseconds"]] for one in top],
        )
    figures["interrupted"] = interrupted.happened
    write_json(args.json, figures)
    return 130 if interrupted.happened else 0


def _scaling(args: argparse.Namespace, models: Any, options: Any, figures: dict[str, Any]) -> int:
    from scripts.benchmark import scaling
    from scripts.benchmark.measurement import context

    small = args.preset == "smoke"
    panels = scaling.panels(
        models,
        contexts=scaling.CONTEXTS[:2] if small else scaling.CONTEXTS,
        rows=scaling.ROWS[:2] if small else scaling.ROWS,
        pools=scaling.POOLS[:2] if small else scaling.POOLS,
    )
    rounds = 1 if small else 3
    total = rounds * sum(len(panel["cases"]) for panel in panels.values())
    with Bar(total) as bar:

        def told(text: str) -> None:
            bar.tell(text)
            bar.advance()

        interrupted = Interrupted()
        interrupted.run(
            lambda: scaling.measure(
                models,
                context(models, options.data),
                panels,
                steps=args.steps,
                rounds=rounds,
                told=told,
                **options.engine,
            )
        )
    for name, panel in panels.items():
        del panel["cases"]
        panel["points"] = [point for point in panel.get("points", []) if "ours" in point]
        rows: list[list[Cell]] = []
        for point in panel["points"]:
            cells: list[Cell] = [f"{point['size']:,}"]
            for side in ("ours", "mlx-lm"):
                one = point.get(side)
                cells += (
                    [None] * 2
                    if one is None
                    else [
                        f"{1000 * one['median']:.2f}",
                        f"{1000 * one['low']:.2f} to {1000 * one['high']:.2f}",
                    ]
                )
            rows.append(cells)
        header = [panel["unit"], "ours", "10th to 90th", "mlx-lm", "10th to 90th"]
        print_table(f"ms per decode step against {name}, {panel['about']}", header, rows)
    ratio = scaling.pool_ratio(panels["pool"])
    if ratio is not None:
        print(f"the largest pool over the smallest: {ratio:.3f}")
    figures["scaling"] = panels
    figures["interrupted"] = interrupted.happened
    write_json(args.json, figures)
    if args.plot is not None:
        from scripts.benchmark import plots

        plots.scaling(figures, args.plot)
    return 130 if interrupted.happened else 0


if __name__ == "__main__":
    run(main)
