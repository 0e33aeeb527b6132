"""The emulator's function signature equals MLX's, letter by letter."""

from __future__ import annotations

import itertools
import random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_paged.kernels import metal
from tests.metal_cases import make_case, run_case
from tests.metal_on_cpu.kernel import numpy_dtype, source_from_mlx
from tests.metal_on_cpu.signature import Input, signature

DTYPES = [
    *(mx.float32, mx.float16, mx.bfloat16, mx.bool_),
    *(mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
]
ATTRIBUTES = [
    *("thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid"),
    *("threads_per_grid", "threads_per_threadgroup", "threadgroups_per_grid"),
    *("thread_index_in_simdgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup"),
    *("thread_index_in_threadgroup", "thread_execution_width", "threads_per_simdgroup"),
    *("dispatch_threads_per_threadgroup", "dispatch_simdgroups_per_threadgroup"),
    *("grid_origin", "quadgroup_index_in_threadgroup", "thread_index_in_quadgroup"),
    *("quadgroups_per_threadgroup", "dispatch_quadgroups_per_threadgroup", "grid_size"),
]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (8,), (9,), (2, 3), (2, 4), (1, 1, 8), (3, 5, 7)]


def ours(arguments: dict[str, Any], inputs: list[mx.array], call: dict[str, Any]) -> str:
    outputs = [numpy_dtype(d) for d in call["output_dtypes"]]
    return signature(
        arguments["name"],
        [
            Input(name, numpy_dtype(a.dtype), tuple(a.shape))
            for name, a in zip(arguments["input_names"], inputs, strict=True)
        ],
        list(zip(arguments["output_names"], outputs, strict=True)),
        arguments["source"],
        arguments.get("header", ""),
        [
            (n, numpy_dtype(v) if isinstance(v, mx.Dtype) else v)
            for n, v in call.get("template") or ()
        ],
        arguments.get("atomic_outputs", False),
    ).source


def same(arguments: dict[str, Any], inputs: list[mx.array], call: dict[str, Any]) -> None:
    kernel: Any = mx.fast.metal_kernel(**arguments)
    theirs = source_from_mlx(kernel, inputs, **call)
    assert ours(arguments, inputs, call).splitlines() == theirs.splitlines()
    assert ours(arguments, inputs, call) == theirs


def random_call(seed: int) -> tuple[dict[str, Any], list[mx.array], dict[str, Any]]:
    """A kernel and a call: any number of inputs and outputs, of any type and size."""
    r = random.Random(seed)
    inputs = [mx.zeros(r.choice(SHAPES), r.choice(DTYPES)) for _ in range(r.randint(1, 5))]
    names = r.sample(["a", "b", "keys", "block_tables", "x1", "q"], len(inputs))
    outputs = r.sample(["o", "out", "acc", "stats"], r.randint(1, 3))
    used = r.sample(ATTRIBUTES, r.randint(1, 6))
    for name in names:
        used += [f"{name}_{kind}" for kind in ("shape", "strides", "ndim") if r.random() < 0.3]
    template: list[tuple[str, Any]] = r.sample(
        [
            ("T", r.choice(DTYPES)),
            ("N", r.randint(-3, 300)),
            ("B", r.random() < 0.5),
            ("U", mx.int8),
        ],
        r.randint(0, 4),
    )
    arguments = {
        "name": f"case_{seed}",
        "input_names": names,
        "output_names": outputs,
        "source": "".join(f"  // {word}\n" for word in used),
        "header": r.choice(["", "// a header\n", "constant constexpr int W = 3;\n"]),
        "atomic_outputs": r.random() < 0.2,
    }
    call = {
        "template": template,
        "output_shapes": [(4,)] * len(outputs),
        "output_dtypes": [r.choice(DTYPES) for _ in outputs],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
    }
    return arguments, inputs, call


@pytest.mark.parametrize("seed", range(50))
def test_generated_cases(seed: int) -> None:
    same(*random_call(seed))


@pytest.mark.parametrize("dtype", metal.DTYPES, ids=lambda d: str(d).split(".")[-1])
@pytest.mark.parametrize("group", [1, 6, 16])
def test_the_projects_kernels(dtype: mx.Dtype, group: int) -> None:
    """Every launch of a step with shared and own segments, as the launcher makes it."""
    seen = []

    def recorder(**arguments: Any) -> Any:
        def launch(**call: Any) -> list[mx.array]:
            inputs = call.pop("inputs")
            same(arguments, list(inputs), call)
            seen.append(arguments["name"])
            shapes_and_types = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(s, d) for s, d in shapes_and_types]

        return launch

    case = make_case([40, 50], group=group, shared_tokens=32, dtype=dtype)
    run_case(case, recorder)
    assert len(seen) == 3
    listed = metal.variants(dtype, 2 * group, 2, 128)
    assert set(seen) == {v.name for v in listed}


def test_sizes_around_the_limit_of_the_constant_space() -> None:
    for size, dtype in itertools.product((1, 7, 8, 9), (mx.float32, mx.bfloat16)):
        arguments = {
            "name": "limit",
            "input_names": ["a"],
            "output_names": ["o"],
            "source": "o[0] = a[0]; // thread_position_in_grid",
        }
        call = {
            "output_shapes": [(1,)],
            "output_dtypes": [dtype],
            "grid": (1, 1, 1),
            "threadgroup": (1, 1, 1),
        }
        inputs = [mx.zeros((size,), dtype)]
        same(arguments, inputs, call)
        assert ("constant" in ours(arguments, inputs, call)) == (size < 8)
    assert np.prod(()) == 1  # a 0-d array has one element and is a reference
