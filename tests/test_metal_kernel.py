"""The decode kernels against float64, and what they load; real Metal where there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import metal
from mlx_paged.kernels.metal import paged_decode, plan_decode, variants
from tests.metal_cases import (
    METAL,
    TOLERANCE,
    Case,
    Outcome,
    as_float64,
    compiling_ahead,
    kernel_factory,
    make_case,
    reference,
    require_emulator,
    run_case,
)

require_emulator()

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]

# One factory for the module: a kernel is compiled once, its reports are read per run.
FACTORY = kernel_factory()


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead(request: pytest.FixtureRequest) -> Iterator[None]:
    def launch(
        group: int, head_dim: int, dtype: mx.Dtype
    ) -> Callable[[Callable[..., Any]], object]:
        case = make_case([1], group=group, head_dim=head_dim, dtype=dtype)
        return lambda factory: run_case(case, factory)

    shapes = itertools.product((1, 5, 6, 7, 8), (64, 128), DTYPES)
    with compiling_ahead(request, (launch(*shape) for shape in shapes)):
        yield


def dtype_name(value: Any) -> str | None:
    return str(value).removeprefix("mlx.core.") if isinstance(value, mx.Dtype) else None


def check(case: Case, outcome: Outcome, dtype: mx.Dtype) -> None:
    assert outcome.error <= TOLERANCE[dtype]
    if not METAL:
        assert outcome.loaded == 1.0


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 5, 6, 7, 8])
def test_every_block_size_in_order_and_scattered(
    dtype: mx.Dtype, head_dim: int, group: int
) -> None:
    for block_size in BLOCK_SIZES:
        for scattered in (False, True):
            case = make_case(
                [1, block_size, block_size + 1] if scattered else [block_size + 1, 2],
                group=group,
                head_dim=head_dim,
                block_size=block_size,
                kv_heads=2 if scattered and block_size <= 32 else 1,
                dtype=dtype,
                scattered=scattered,
                seed=block_size + scattered,
            )
            check(case, run_case(case, FACTORY), dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        (mx.float16, 80, 4),
        (mx.bfloat16, 96, 2),
        (mx.float32, 256, 3),
        (mx.float16, 256, 8),
        (mx.float16, 128, 16),
    ],
    ids=dtype_name,
)
def test_other_head_dims_and_groups(dtype: mx.Dtype, head_dim: int, group: int) -> None:
    case = make_case([1, 35, 64, 150], group=group, head_dim=head_dim, dtype=dtype)
    check(case, run_case(case, FACTORY), dtype)


@pytest.mark.parametrize("order", ["backward", "random"])
def test_the_order_of_threads_does_not_matter(order: str) -> None:
    if METAL:
        pytest.skip("the GPU has its own order")
    case = make_case([70, 33] + [80] * 18, group=6, shared_tokens=32, kv_heads=1)
    forward = run_case(case, FACTORY)
    other = run_case(case, kernel_factory(order=order, seed=3))
    assert (forward.output == other.output).all()


@pytest.mark.parametrize("rows", [1, 7, 8, 9])
@pytest.mark.parametrize("columns", [1, 7, 8])
def test_small_inputs_stay_in_the_device_address_space(rows: int, columns: int) -> None:
    case = make_case([columns * 2] * rows, group=6, block_size=2, kv_heads=1)
    check(case, run_case(case, FACTORY), mx.float32)


def test_padding_of_tables_is_never_read() -> None:
    case = make_case([1, 16, 17, 40], group=6, spare_columns=5)
    check(case, run_case(case, FACTORY), mx.float32)


def test_a_split_context_is_read_once_and_merged() -> None:
    case = make_case([1000, 300, 17], group=6, kv_heads=1)
    outcome = run_case(case, FACTORY, gpu_cores=64)
    check(case, outcome, mx.float32)
    one_segment = run_case(case, FACTORY, gpu_cores=1)
    assert np.abs(outcome.output - one_segment.output).max() < 1e-6


def test_scores_of_any_size_are_safe() -> None:
    case = make_case([50, 200], group=6, kv_heads=1)
    for factor in (0.0, 60.0):
        scaled = Case(
            case.queries * factor,
            case.keys,
            case.values,
            case.block_tables,
            case.context_lens,
            case.scale,
            case.expected,
        )
        assert np.isfinite(run_case(scaled, FACTORY, gpu_cores=64).output).all()


# ---- shared prefixes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_prefix_of_16_rows_is_read_once(dtype: mx.Dtype) -> None:
    """1,024 shared tokens and 64 of their own: at most 1.05 of the distinct bytes; 8.5 unshared."""
    if dtype != mx.float16:
        case = make_case([136] * 16, group=6, shared_tokens=128, kv_heads=1, dtype=dtype)
    else:
        case = make_case([1088] * 16, group=6, shared_tokens=1024, kv_heads=1, dtype=dtype)
    check(case, run_case(case, FACTORY), dtype)


def test_without_sharing_the_prefix_is_read_by_every_row() -> None:
    if METAL:
        pytest.skip("only the emulator counts bytes")
    case = make_case([136] * 16, group=6, shared_tokens=128, kv_heads=1)
    alone = run_case(case, FACTORY, share=False)
    assert alone.error <= TOLERANCE[mx.float32]
    assert alone.loaded == pytest.approx(136 * 16 / (128 + 8 * 16))


@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "shared"),
    [(2, 1, 64, 96), (64, 7, 128, 64), (64, 16, 64, 32), (9, 8, 256, 48)],
)
def test_sets_of_up_to_64_rows_read_k_and_v_once(
    rows: int, group: int, head_dim: int, shared: int
) -> None:
    """More queries than the registers hold, and more tokens than a tile."""
    case = make_case(
        [shared + 1 + i % 3 for i in range(rows)],
        group=group,
        head_dim=head_dim,
        shared_tokens=shared,
        kv_heads=1,
        dtype=mx.float16,
    )
    check(case, run_case(case, FACTORY, gpu_cores=1), mx.float16)


def test_nested_prefixes_and_a_row_that_is_all_prefix() -> None:
    case = make_case([96, 130, 144, 129], group=5, shared_tokens=96, kv_heads=1)
    tables = case.block_tables.copy()
    tables[3, 6:8] = tables[1, 6:8]  # rows 1 and 3 share two blocks more
    q, k, v = case.queries, case.keys, case.values
    expected = reference(q, k, v, tables, case.context_lens, case.scale)
    nested = Case(q, k, v, tables, case.context_lens, case.scale, expected)
    check(nested, run_case(nested, FACTORY), mx.float32)


# ---- traffic ------------------------------------------------------------------------------------


def test_other_traffic_is_small() -> None:
    """At 16 rows of 4,096 tokens (here 2 of them, with as many splits or more): at most 5 %."""
    if METAL:
        pytest.skip("only the emulator counts bytes")
    case = make_case([4096] * 2, group=6, kv_heads=1, dtype=mx.float16)
    for cores in (16, 40):
        outcome = run_case(case, FACTORY, gpu_cores=-(-cores // 16))
        check(case, outcome, mx.float16)
        assert outcome.other <= 0.05


# ---- compilation and refusals -------------------------------------------------------------------


def test_the_compiled_variants_are_fixed_and_listed() -> None:
    if METAL:
        pytest.skip("MLX does not tell what it compiles")
    factory = kernel_factory(mode="fast")
    rng = np.random.default_rng(0)
    for rows in [*range(1, 10), 15, 16, 31, 32, 63, 64]:
        shared = int(rng.choice([0, 32]))
        contexts = rng.integers(shared + 1, shared + 20, rows)
        case = make_case(contexts.tolist(), group=2, kv_heads=1, shared_tokens=shared)
        assert run_case(case, factory, gpu_cores=int(rng.integers(1, 40))).error < 1e-6
    listed = variants(mx.float32, 2, 1, 128)
    kernels = getattr(factory, "kernels", [])
    assert sorted(k.name for k in kernels) == sorted(v.name for v in listed)
    assert [len(k.variants) for k in kernels] == [1] * len(listed)
    assert len({v.name for v in listed}) == 3


def test_every_variant_has_its_own_name() -> None:
    names: dict[str, Any] = {}
    for dtype in metal.DTYPES:
        for head_dim in metal.HEAD_DIMS:
            for group in range(1, metal.MAX_GROUP + 1):
                for variant in variants(dtype, group, 1, head_dim):
                    assert names.setdefault(variant.name, variant) == variant
    assert len(names) > 300


Arrays = tuple[mx.array, mx.array, mx.array]


def arguments(**changes: Any) -> tuple[Arrays, dict[str, Any]]:
    """Valid arguments but for the changes: arrays, and the plan's arguments."""
    sizes = {"rows": 2, "heads": 4, "kv_heads": 2, "dim": 64, "blocks": 4, "block_size": 16}
    sizes |= {k: v for k, v in changes.items() if k in sizes}
    dtype = changes.get("dtype", mx.float32)
    pool = (sizes["blocks"], sizes["kv_heads"], sizes["block_size"], sizes["dim"])
    arrays = (
        mx.zeros((sizes["rows"], sizes["heads"], sizes["dim"]), dtype),
        mx.zeros(pool, dtype),
        mx.zeros(changes.get("value_pool", pool), changes.get("value_dtype", dtype)),
    )
    return arrays, {"num_kv_heads": sizes["kv_heads"], "block_size": sizes["block_size"]}


TABLES = np.array([[0, 1], [2, 3]], np.int32)
CONTEXTS = np.array([17, 32], np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 72}, "head dim must be one of"),
        ({"heads": 34}, "query heads must be 1 to 16 times"),
        ({"heads": 5}, "query heads must be"),
        ({"dtype": mx.int32}, "dtype must be"),
        ({"value_dtype": mx.float16}, "dtypes differ"),
        ({"value_pool": (4, 2, 8, 64)}, "keys and values"),
        ({"rows": 3}, "the plan is for 2 rows"),
        ({"blocks": 3}, "names block 3, the pools have 3"),
    ],
)
def test_shapes_that_are_not_served_are_refused_before_the_launch(
    changes: dict[str, Any], message: str
) -> None:
    def never(**_: Any) -> Any:
        raise AssertionError("a kernel was made")

    arrays, plan = arguments(**changes)
    decode_plan = plan_decode(TABLES, CONTEXTS, **plan)
    with pytest.raises(ValueError, match=message):
        paged_decode(*arrays, decode_plan, scale=1.0, kernel_factory=never)


def test_a_plan_for_other_pools_is_refused() -> None:
    arrays, _ = arguments()
    decode_plan = plan_decode(TABLES, CONTEXTS, num_kv_heads=1, block_size=16)
    with pytest.raises(ValueError, match="the plan is for 1 kv heads"):
        paged_decode(*arrays, decode_plan, scale=1.0)


@pytest.mark.parametrize(
    ("tables", "contexts", "block_size", "message"),
    [
        (TABLES, CONTEXTS, 131_073, "block_size must lie in"),
        (TABLES, CONTEXTS, 0, "block_size must lie in"),
        (np.zeros((257, 1), np.int32), np.ones(257, np.int32), 16, "at most 256 rows"),
        (np.zeros((1, 9000), np.int32), np.array([131_073], np.int32), 16, "at most 131072"),
        (np.array([[0, -1], [2, 3]], np.int32), CONTEXTS, 16, "row 0's table ends before"),
        (TABLES, np.array([17, 33], np.int32), 16, "row 1 attends to 33 tokens"),
    ],
)
def test_plans_out_of_range_are_refused(
    tables: np.ndarray, contexts: np.ndarray, block_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_decode(tables, contexts, num_kv_heads=2, block_size=block_size)


def test_without_metal_there_is_a_clear_error() -> None:
    if METAL:
        pytest.skip("there is Metal")
    arrays, plan = arguments()
    decode_plan = plan_decode(TABLES, CONTEXTS, **plan)
    with pytest.raises(RuntimeError, match="needs Metal"):
        paged_decode(*arrays, decode_plan, scale=1.0)


def test_gpu_cores_come_from_the_name() -> None:
    assert metal.cores_of("Apple M1") == 8
    assert metal.cores_of("Apple M2 Max") == 38
    assert metal.cores_of("Apple M3 Ultra") == 80
    assert metal.cores_of("Apple M9 Pro") == 20
    assert metal.cores_of("AMD Radeon Pro 5500M") == 16


# ---- prompt chunks ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("context", "chunk"), [(1, 1), (16, 16), (33, 5), (100, 99), (130, 130)])
def test_prompt_chunks_attend_causally_after_their_prefix(
    dtype: mx.Dtype, context: int, chunk: int
) -> None:
    group, kv_heads, head_dim, block_size = 3, 2, 64, 16
    case = make_case(
        [context], group=group, head_dim=head_dim, block_size=block_size, dtype=dtype, seed=chunk
    )
    rng = np.random.default_rng(1)
    shape = (chunk, kv_heads * group, head_dim)
    queries = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    out = metal.paged_prefill(
        queries, case.keys, case.values, case.block_tables[0], context, case.scale
    )
    expected = reference(
        queries,
        case.keys,
        case.values,
        np.repeat(case.block_tables, chunk, axis=0),
        np.arange(context - chunk + 1, context + 1),
        case.scale,
    )
    error = np.abs(as_float64(out) - expected).max() / np.abs(expected).max()
    assert error <= {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}[dtype]


def test_prompt_chunks_that_do_not_fit_are_refused() -> None:
    (queries, keys, values), _ = arguments(rows=5)
    with pytest.raises(ValueError, match="a chunk of 5 tokens"):
        metal.paged_prefill(queries, keys, values, TABLES[0], 4, 1.0)
    with pytest.raises(ValueError, match="table must name 3"):
        metal.paged_prefill(queries, keys, values, TABLES[0], 40, 1.0)
