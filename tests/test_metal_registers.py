"""What a GPU would keep in registers is kept there by clang: no local array needs memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_cases import METAL, make_case, require_emulator, run_case
from tests.metal_on_cpu.compiler import arrays_in_memory
from tests.metal_on_cpu.kernel import numpy_dtype
from tests.metal_on_cpu.signature import Input, signature
from tests.metal_on_cpu.translate import to_cpp

require_emulator()
if METAL:
    pytest.skip("Apple's compiler is not asked", allow_module_level=True)


@pytest.mark.parametrize(("group", "head_dim"), [(6, 128), (7, 64)])
def test_no_array_of_the_kernels_lies_in_memory(group: int, head_dim: int) -> None:
    found: dict[str, list[str]] = {}

    def factory(**arguments: Any) -> Any:
        def launch(**call: Any) -> list[mx.array]:
            inputs = zip(arguments["input_names"], call["inputs"], strict=True)
            sig = signature(
                arguments["name"],
                [Input(n, numpy_dtype(a.dtype), tuple(a.shape)) for n, a in inputs],
                [
                    (n, numpy_dtype(d))
                    for n, d in zip(arguments["output_names"], call["output_dtypes"], strict=True)
                ],
                arguments["source"],
                arguments["header"],
                [
                    (n, numpy_dtype(v) if isinstance(v, mx.Dtype) else v)
                    for n, v in call["template"]
                ],
            )
            cpp = to_cpp(sig, arguments["header"], arguments["source"])
            found[arguments["name"]] = arrays_in_memory(cpp)
            shapes = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return [mx.zeros(s, d) for s, d in shapes]

        return launch

    case = make_case([40, 50], group=group, head_dim=head_dim, shared_tokens=32, dtype=mx.float16)
    run_case(case, factory)
    assert len(found) == 3
    assert not any(found.values()), found


def test_an_array_in_memory_is_found() -> None:
    body = "float x[8]; for (int i = 0; i < 8; i++) x[i] = a[i]; o[0] = x[int(a[8])]; // grid_size"
    f32 = np.dtype("float32")
    sig = signature("indexed", [Input("a", f32, (9,))], [("o", f32)], body)
    assert arrays_in_memory(to_cpp(sig, "", body))
