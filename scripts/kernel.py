"""What attention over blocks costs beside attention over a contiguous cache.

The main table has 16 sequences of 4,096 cached tokens in Qwen2.5-1.5B's shapes (12 query heads, 2
kv heads, head dim 128, float16), for each block size, with blocks in order and scattered:
attention, and plain copying of K and V; "x" is the time relative to the same kernel on a
contiguous cache, addressed without a table. The second table has unequal lengths, small batches,
short and long contexts, other group sizes, and a prefix that 16 rows share, with MLX's
scaled_dot_product_attention on a contiguous cache and on gathered blocks beside it.

On a Mac it prints times. Without Metal it runs the same code at small sizes on the emulated kernel
(tests/metal_on_cpu; needs clang) and prints what the kernel moves: K and V bytes loaded in units
of the distinct bytes, all other traffic in percent of that, loads and stores per token. That says
nothing about the time on a Mac.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_paged.kernels.metal import kernel_source, paged_decode, plan_decode
from scripts.report import (
    Cell,
    add_output_arguments,
    make_parser,
    print_table,
    progress,
    pyplot,
    run,
    save_figure,
    write_json,
)

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEAD_DIM = 128
KV_HEADS = 2
Timer = Callable[[], float]
Factory = Callable[..., Any]

_COPY_TOKENS = 256  # per threadgroup: 32 for each of its 8 SIMD groups
_COPY_BODY = """
  uint first = threadgroup_position_in_grid.x * 256 + simdgroup_index_in_threadgroup * 32;
  uint row = threadgroup_position_in_grid.y;
  uint head = threadgroup_position_in_grid.z;
  uint heads = threadgroups_per_grid.z;
  uint lane = thread_index_in_simdgroup;
  uint end = uint(tokens);
  uint offset = 0;
  if (first + lane < end)
    offset = row_offset<D>(
        block_tables, row, table_width, first + lane, block_size, heads, head);
  for (uint t = 0; t < 32 && first + t < end; t++) {
    uint from = simd_broadcast(offset, ushort(t));
    uint to = ((row * heads + head) * end + first + t) * D;
    float part[per_lane<D>()];
    load_part<D>(keys + from, lane, part);
    store_part<D>(key_copy + to, lane, part);
    load_part<D>(values + from, lane, part);
    store_part<D>(value_copy + to, lane, part);
  }
"""


@dataclass(frozen=True)
class Machine:
    """What computes, and what is measured.

    Attributes:
        factory: stands in for mx.fast.metal_kernel; None on a Mac.
        timer: seconds; None: nothing is timed.
        calls: kernel calls per evaluation, so that the cost of one submission does not count.
        gpu_cores: None: this machine's.
    """

    factory: Any
    timer: Timer | None
    calls: int = 30
    repeats: int = 5
    gpu_cores: int | None = None

    @property
    def kernels(self) -> list[Any]:
        return list(getattr(self.factory, "kernels", []))


@dataclass(frozen=True)
class Result:
    """One measurement; what was not measured is None.

    Attributes:
        seconds: per call.
        error: the largest, relative to the largest output.
        loaded: K and V bytes loaded, in units of the distinct bytes.
        other: all other bytes, in units of K and V.
        instructions: loads and stores of device memory, per distinct token and kv head.
    """

    seconds: float | None = None
    error: float | None = None
    loaded: float | None = None
    other: float | None = None
    instructions: float | None = None
    gigabytes_per_second: float | None = None


class Workload:
    """Queries, and keys and values [rows, kv heads, tokens, head dim], in float16."""

    def __init__(self, lengths: Sequence[int], group: int = 6, shared: int = 0) -> None:
        rng = np.random.default_rng(len(lengths) + group)
        self.lengths = np.array(lengths, dtype=np.int32)
        self.group, self.shared = group, shared
        shape = (len(lengths), KV_HEADS, int(self.lengths.max()), HEAD_DIM)
        self.keys, self.values = (
            rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(2)
        )
        for array in (self.keys, self.values):
            array[:, :, :shared] = array[:1, :, :shared]
        heads = KV_HEADS * group
        queries = rng.standard_normal((len(lengths), heads, HEAD_DIM), dtype=np.float32)
        self.queries = queries.astype(np.float16)
        self.scale = HEAD_DIM**-0.5
        self.expected = self._expected()

    @property
    def tokens(self) -> int:
        """Distinct ones."""
        return int(self.lengths.sum()) - (len(self.lengths) - 1) * self.shared

    @property
    def distinct_bytes(self) -> int:
        return 2 * 2 * self.tokens * KV_HEADS * HEAD_DIM

    def _expected(self) -> np.ndarray:
        out = np.empty(self.queries.shape)
        for i, length in enumerate(self.lengths):
            k, v = (a[i, :, :length].astype(np.float64) for a in (self.keys, self.values))
            q = self.queries[i].astype(np.float64).reshape(KV_HEADS, self.group, HEAD_DIM)
            scores = q @ k.swapaxes(1, 2) * self.scale
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[i] = (weights @ v).reshape(-1, HEAD_DIM)
        return out

    def paged(self, block_size: int, scattered: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pools and tables; what no token owns is NaN."""
        used = -(-self.lengths // block_size)
        common = self.shared // block_size
        num_blocks = common + int((used - common).sum()) + 1
        numbers = np.arange(num_blocks)
        if scattered:
            np.random.default_rng(block_size).shuffle(numbers)
        shape = (num_blocks, KV_HEADS, block_size, HEAD_DIM)
        pools = [np.full(shape, np.nan, dtype=np.float16) for _ in range(2)]
        tables = np.full((len(used), int(used.max())), -1, dtype=np.int32)
        free = common
        for i, count in enumerate(used):
            tables[i, :common] = numbers[:common]
            tables[i, common:count] = numbers[free : free + count - common]
            free += int(count) - common
            for pool, sequence in zip(pools, (self.keys, self.values), strict=True):
                padded = np.full((KV_HEADS, int(count) * block_size, HEAD_DIM), np.nan, np.float16)
                padded[:, : self.lengths[i]] = sequence[i, :, : self.lengths[i]]
                blocks = padded.reshape(KV_HEADS, int(count), block_size, HEAD_DIM)
                pool[tables[i, :count]] = blocks.swapaxes(0, 1)
        return pools[0], pools[1], tables


def contiguous_factory(machine: Machine) -> Factory:
    """Kernels that find their keys and values without a table."""
    make: Factory = mx.fast.metal_kernel if machine.factory is None else machine.factory

    def factory(**arguments: Any) -> Any:
        name, header = arguments["name"] + "_contiguous", arguments["header"]
        return make(**{**arguments, "name": name, "header": "#define CONTIGUOUS\n" + header})

    return factory


def measure(
    machine: Machine, work: Workload, call: Callable[[], list[mx.array]], expected: np.ndarray
) -> Result:
    """Check one call against `expected`, count what it moves, and time it."""
    seen = {id(k): len(k.reports) for k in machine.kernels}
    out = np.array(call()[0]).astype(np.float64)
    error = float(np.abs(out - expected).max() / np.abs(expected).max())
    kv = other = instructions = 0
    for kernel in machine.kernels:
        for report in kernel.reports[seen.get(id(kernel), 0) :]:
            for name, buffer in report.buffers.items():
                instructions += buffer.loads + buffer.stores
                if name in ("keys", "values"):
                    kv += buffer.loaded
                else:
                    other += buffer.loaded + buffer.stored
    seconds = _seconds(machine, call)
    counted = bool(kv)
    return Result(
        seconds=seconds,
        error=error,
        loaded=kv / work.distinct_bytes if counted else None,
        other=other / kv if counted else None,
        instructions=instructions / (work.tokens * KV_HEADS) if counted else None,
        gigabytes_per_second=work.distinct_bytes / seconds / 1e9 if seconds else None,
    )


def _seconds(machine: Machine, call: Callable[[], list[mx.array]]) -> float | None:
    if machine.timer is None:
        return None
    best = float("inf")
    for _ in range(machine.repeats):
        start = machine.timer()
        mx.eval([call() for _ in range(machine.calls)])
        best = min(best, (machine.timer() - start) / machine.calls)
    return best


# ---- contestants ---------------------------------------------------------------------------------


def attention(machine: Machine, work: Workload, block_size: int, scattered: bool) -> Result:
    """Our kernel on blocks."""
    return _attention(machine, work, work.paged(block_size, scattered), machine.factory)


def contiguous_attention(machine: Machine, work: Workload, factory: Factory) -> Result:
    """The same kernel on one block per row, found without a table; equal lengths."""
    tables = np.arange(len(work.lengths), dtype=np.int32)[:, None]
    return _attention(machine, work, (work.keys, work.values, tables), factory)


def _attention(
    machine: Machine,
    work: Workload,
    cache: tuple[np.ndarray, np.ndarray, np.ndarray],
    factory: Any,
) -> Result:
    keys, values = mx.array(cache[0]), mx.array(cache[1])
    queries = mx.array(work.queries)
    plan = plan_decode(
        cache[2],
        work.lengths,
        num_kv_heads=KV_HEADS,
        block_size=keys.shape[2],
        gpu_cores=machine.gpu_cores,
    )

    def call() -> list[mx.array]:
        return [paged_decode(queries, keys, values, plan, scale=work.scale, kernel_factory=factory)]

    return measure(machine, work, call, work.expected)


def copying(machine: Machine, work: Workload, block_size: int, scattered: bool) -> Result:
    """Copy K and V out of their blocks; equal lengths."""
    return _copying(machine, work, work.paged(block_size, scattered), machine.factory)


def contiguous_copying(machine: Machine, work: Workload, factory: Factory) -> Result:
    """Copy K and V of a contiguous cache."""
    tables = np.arange(len(work.lengths), dtype=np.int32)[:, None]
    return _copying(machine, work, (work.keys, work.values, tables), factory)


def _copying(
    machine: Machine,
    work: Workload,
    cache: tuple[np.ndarray, np.ndarray, np.ndarray],
    factory: Any,
) -> Result:
    rows, tokens = len(work.lengths), int(work.lengths[0])
    make: Factory = mx.fast.metal_kernel if factory is None else factory
    kernel = make(
        name="paged_copy",
        input_names=["keys", "values", "block_tables", "table_width", "block_size", "tokens"],
        output_names=["key_copy", "value_copy"],
        source=_COPY_BODY,
        header=kernel_source(),
    )
    table = np.full(max(8, cache[2].size), -1, dtype=np.int32)
    table[: cache[2].size] = cache[2].ravel()
    sizes = [mx.array(n, mx.int32) for n in (cache[2].shape[1], cache[0].shape[2], tokens)]
    inputs = [mx.array(cache[0]), mx.array(cache[1]), mx.array(table), *sizes]
    shape = (rows, KV_HEADS, tokens, HEAD_DIM)

    def call() -> list[mx.array]:
        result: list[mx.array] = kernel(
            inputs=inputs,
            template=[("T", mx.float16), ("D", HEAD_DIM)],
            output_shapes=[shape, shape],
            output_dtypes=[mx.float16, mx.float16],
            grid=(256 * -(-tokens // _COPY_TOKENS), rows, KV_HEADS),
            threadgroup=(256, 1, 1),
        )
        return result

    return measure(machine, work, call, work.keys.astype(np.float64))


def mlx_contiguous(machine: Machine, work: Workload) -> Result:
    """MLX's fused attention on the contiguous cache; a mask where lengths differ."""
    keys, values = mx.array(work.keys), mx.array(work.values)
    return measure(machine, work, lambda: _sdpa(work, keys, values), work.expected)


def mlx_gathered(machine: Machine, work: Workload, block_size: int = 16) -> Result:
    """Blocks gathered into a contiguous cache in every call, then MLX's attention."""
    pools = work.paged(block_size, True)
    keys, values = (mx.array(np.nan_to_num(p)) for p in pools[:2])
    tables = mx.array(np.maximum(pools[2], 0))
    rows, width = pools[2].shape

    def gathered(pool: mx.array) -> mx.array:
        blocks = pool[tables].swapaxes(1, 2)
        return blocks.reshape(rows, KV_HEADS, width * block_size, HEAD_DIM)

    return measure(
        machine, work, lambda: _sdpa(work, gathered(keys), gathered(values)), work.expected
    )


def _sdpa(work: Workload, keys: mx.array, values: mx.array) -> list[mx.array]:
    mask = None
    if (work.lengths != keys.shape[2]).any():
        positions = mx.arange(keys.shape[2])
        mask = positions[None, None, None] < mx.array(work.lengths)[:, None, None, None]
    out = mx.fast.scaled_dot_product_attention(
        mx.array(work.queries)[:, :, None], keys, values, scale=work.scale, mask=mask
    )
    return [out[:, :, 0]]


# ---- the experiments -----------------------------------------------------------------------------


def block_sizes(
    machine: Machine, rows: int, tokens: int
) -> Iterator[tuple[str, int | None, str, Result]]:
    """(what, block size, order, result) of the main table; block size None: contiguous."""
    work = Workload([tokens] * rows)
    factory = contiguous_factory(machine)
    yield "attention", None, "contiguous", contiguous_attention(machine, work, factory)
    yield "copying", None, "contiguous", contiguous_copying(machine, work, factory)
    for size in BLOCK_SIZES:
        for order in ("in order", "scattered"):
            yield "attention", size, order, attention(machine, work, size, order == "scattered")
            yield "copying", size, order, copying(machine, work, size, order == "scattered")


def workloads(rows: int, tokens: int, longest: int) -> dict[str, Workload]:
    """The rest: what the main table leaves out."""
    unequal = [max(1, tokens * (i + 1) * 2 // (rows + 1)) for i in range(rows)]
    contexts = [n for n in (longest // 64, longest // 16, longest // 4, longest) if n]
    works = {f"{rows} rows, lengths {unequal[0]:,} to {unequal[-1]:,}": Workload(unequal)}
    works |= {f"{n} row{'s' * (n > 1)} of {tokens:,}": Workload([tokens] * n) for n in (1, 4)}
    works |= {f"1 row of {n:,}": Workload([n]) for n in contexts if n != tokens}
    works |= {f"group {g}, {rows} rows": Workload([tokens] * rows, g) for g in (5, 6, 7, 8)}
    shared = min(1024, max(32, tokens // 16 * 16))
    own = max(16, shared // 16)
    works[f"16 rows, {shared:,} shared + {own:,}"] = Workload([shared + own] * 16, 6, shared)
    return works


def _percent(x: float | None) -> float | None:
    return None if x is None else 100 * x


def _cells(result: Result) -> list[Cell]:
    def text(x: float | None, form: str) -> Cell:
        return None if x is None else format(x, form)

    return [
        text(result.error, ".1e"),
        text(result.loaded, ".3f"),
        text(_percent(result.other), ".1f"),
        text(result.instructions, ".0f"),
    ]


COUNTS = ["error", "K+V loaded", "other %", "ld+st/token"]


def _times(result: Result, base: Result | None) -> list[Cell]:
    if result.seconds is None or result.gigabytes_per_second is None:
        return []
    ratio = result.seconds / base.seconds if base and base.seconds else None
    return [
        result.seconds * 1e6,
        None if ratio is None else f"{ratio:.2f}",
        result.gigabytes_per_second,
    ]


def plot(rows: Sequence[tuple[str, int | None, str, Result]], path: Any) -> None:
    """Over the block size: the time relative to a contiguous cache, or what is moved."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2))
    for axis, what in zip(axes, ("attention", "copying"), strict=True):
        base = next(r for w, size, _, r in rows if w == what and size is None)
        timed = base.seconds is not None
        for order in ("in order", "scattered"):
            points = [(s, r) for w, s, o, r in rows if w == what and o == order]
            if base.seconds is not None:
                ys = [(r.seconds or 0.0) / base.seconds for _, r in points]
            else:
                ys = [100 * (r.other or 0.0) for _, r in points]
            axis.plot([s for s, _ in points], ys, marker="o", label=order)
        axis.set_xscale("log", base=2)
        axis.set_title(what)
        axis.set_xlabel("block size (tokens)")
        axis.set_ylabel("time, contiguous = 1" if timed else "other traffic, % of K and V")
        axis.set_ylim(bottom=0)
        axis.legend()
    save_figure(figure, path)


def benchmark(
    machine: Machine, rows: int, tokens: int, longest: int
) -> tuple[list[tuple[str, int | None, str, Result]], dict[str, dict[str, Result]]]:
    """Everything: the main table's rows, and per workload the contestants' results."""
    total = 2 + 4 * len(BLOCK_SIZES)
    main_rows = list(progress(block_sizes(machine, rows, tokens), "block sizes", total))
    others = {}
    for name, work in progress(list(workloads(rows, tokens, longest).items()), "workloads"):
        others[name] = {
            "paged": attention(machine, work, 16, True),
            "MLX contiguous": mlx_contiguous(machine, work),
            "gather + MLX": mlx_gathered(machine, work),
        }
    return main_rows, others


def report(
    main_rows: Sequence[tuple[str, int | None, str, Result]],
    others: dict[str, dict[str, Result]],
    shape: str,
) -> dict[str, Any]:
    """Print both tables; returns them for JSON."""
    timed = main_rows[0][3].seconds is not None
    time_columns = ["us", "x", "GB/s"] if timed else []
    base = {what: r for what, size, _, r in main_rows if size is None}
    print_table(
        f"Attention and copying over blocks: {shape}",
        ["", "block size", "order", *time_columns, *COUNTS],
        [
            [what, size, order, *_times(r, base[what]), *_cells(r)]
            for what, size, order, r in sorted(main_rows, key=lambda row: row[0])
        ],
    )
    print_table(
        "Other workloads (blocks of 16, scattered)",
        ["", "by", *time_columns, *COUNTS],
        [
            [name, who, *_times(r, results["paged"]), *_cells(r)]
            for name, results in others.items()
            for who, r in results.items()
        ],
    )
    return {
        "shape": shape,
        "metal": mx.metal.is_available(),
        "block_sizes": [
            {"what": what, "block_size": size, "order": order, **asdict(r)}
            for what, size, order, r in main_rows
        ],
        "workloads": {n: {who: asdict(r) for who, r in rs.items()} for n, rs in others.items()},
    }


def emulated() -> Any:
    """The emulator's factory.

    Raises:
        ValueError: there is no compiler for it.
    """
    from tests import metal_on_cpu

    missing = metal_on_cpu.missing_clang()
    if missing:
        raise ValueError(f"there is no Metal here, and {missing}")
    return metal_on_cpu.factory(may_stay_unwritten=("acc", "stats"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module's docstring."""
    parser = make_parser(__doc__, "python -m scripts.kernel --plot kernel")
    metal = mx.metal.is_available()
    parser.add_argument(
        "--rows", type=int, default=16 if metal else 2, help="sequences (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=4096 if metal else 160,
        help="cached tokens of each (default: %(default)s)",
    )
    parser.add_argument(
        "--longest",
        type=int,
        default=65536 if metal else 1024,
        help="the longest single context (default: %(default)s)",
    )
    add_output_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("rows", "tokens", "longest"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if metal:
        machine = Machine(None, time.perf_counter)
    else:
        print(
            "No Metal here: the kernel runs at small sizes on an emulator that counts what it\n"
            "moves. These are no times, and nothing here was measured on a Mac.\n"
        )
        machine = Machine(emulated(), None, gpu_cores=1)
    main_rows, others = benchmark(machine, args.rows, args.tokens, args.longest)
    shape = (
        f"{args.rows} rows of {args.tokens:,} tokens, {6 * KV_HEADS} query and {KV_HEADS} kv heads "
        f"of {HEAD_DIM}, float16"
    )
    figures = report(main_rows, others, shape)
    write_json(args.json, figures)
    if args.plot is not None:
        plot(main_rows, args.plot)
    return 0


if __name__ == "__main__":
    run(main)
