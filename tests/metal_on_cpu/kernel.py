"""A stand-in for `mx.fast.metal_kernel`: the same call, mx arrays in and out."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import mlx.core as mx
import numpy as np

from tests.metal_on_cpu.launch import Compiled, Report, build, library_of, run
from tests.metal_on_cpu.signature import BFLOAT16, Input, signature


def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    """MLX's dtype as numpy's."""
    name = str(dtype).removeprefix("mlx.core.")
    return BFLOAT16 if name == "bfloat16" else np.dtype("bool" if name == "bool_" else name)


def to_numpy(array: mx.array) -> np.ndarray:
    """A copy, so that nothing keeps MLX's buffer."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(BFLOAT16)
    return np.array(array)


def to_mlx(array: np.ndarray) -> mx.array:
    """The same bits as an mx.array."""
    if array.dtype == BFLOAT16:
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


class EmulatedKernel:
    """A kernel object: call it as the one that `mx.fast.metal_kernel` returns.

    With `compile_in` calls only start compiling, and return zeros: the compiled kernel is there,
    or on its way, when another object needs it.

    Attributes:
        variants: names of the functions compiled so far, in order.
        reports: one per launch, newest last.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        *,
        mode: str = "check",
        order: str = "forward",
        seed: int = 0,
        may_stay_unwritten: Sequence[str] = (),
        compile_in: Executor | None = None,
    ) -> None:
        if not ensure_row_contiguous:
            raise ValueError("the emulator takes row-contiguous inputs only")
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.atomic_outputs = atomic_outputs
        self.mode, self.order, self.seed = mode, order, seed
        self.may_stay_unwritten = tuple(may_stay_unwritten)
        self.compile_in = compile_in
        self.variants: dict[str, Compiled] = {}
        self.reports: list[Report] = []

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Compute at once (nothing is lazy here).

        Raises:
            MetalError: see its subclasses.
        """
        given = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
        dtypes = [numpy_dtype(d) for d in output_dtypes]
        sig = signature(
            self.name,
            [
                Input(n, numpy_dtype(a.dtype), tuple(a.shape))
                for n, a in zip(self.input_names, given, strict=True)
            ],
            list(zip(self.output_names, dtypes, strict=True)),
            self.source,
            self.header,
            [(n, numpy_dtype(v) if isinstance(v, mx.Dtype) else v) for n, v in template or ()],
            self.atomic_outputs,
        )
        if verbose:
            print(sig.source)
        if self.compile_in is not None:
            self.compile_in.submit(library_of, sig, self.header, self.source, self.mode)
            return [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
        if sig.name not in self.variants:
            self.variants[sig.name] = build(sig, self.header, self.source, self.mode)
        outputs, report = run(
            self.variants[sig.name],
            [to_numpy(a) for a in given],
            output_shapes,
            dtypes,
            grid=grid,
            threadgroup=threadgroup,
            init_value=init_value,
            check=self.mode == "check",
            order=self.order,
            seed=self.seed,
            may_stay_unwritten=self.may_stay_unwritten,
        )
        self.reports.append(report)
        return [to_mlx(o) for o in outputs]


def factory(**checks: Any) -> Callable[..., EmulatedKernel]:
    """Something to pass where `mx.fast.metal_kernel` is expected.

    The result's attribute `kernels` lists what was made.
    """

    def make(**arguments: Any) -> EmulatedKernel:
        kernel = EmulatedKernel(**arguments, **checks)
        make.kernels.append(kernel)  # type: ignore[attr-defined]
        return kernel

    make.kernels = []  # type: ignore[attr-defined]
    return make


def source_from_mlx(kernel: Callable[..., Any], inputs: Sequence[mx.array], **call: Any) -> str:
    """The Metal source that MLX generates for a call; needs no Metal."""
    path = os.path.join(tempfile.mkdtemp(), "kernel.mlxfn")
    with tempfile.TemporaryFile() as printed:
        with _standard_output(printed.fileno()):
            mx.export_function(
                path, lambda *a: tuple(kernel(inputs=list(a), verbose=True, **call)), *inputs
            )
        printed.seek(0)
        text = printed.read().decode()
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    start = text.index("```\n") + 4
    return text[start : text.rindex("\n```")]


@contextlib.contextmanager
def _standard_output(target: int) -> Any:
    saved = os.dup(1)
    os.dup2(target, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
