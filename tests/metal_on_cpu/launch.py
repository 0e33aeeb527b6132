"""Runs a compiled kernel over a grid, on numpy arrays."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.metal_on_cpu.compiler import compile_kernel, lines_of, runtime
from tests.metal_on_cpu.errors import CompileError, FaultError, MetalError
from tests.metal_on_cpu.signature import (
    BFLOAT16,
    Input,
    Signature,
    Template,
    signature,
)
from tests.metal_on_cpu.translate import refused, to_cpp

ORDERS = {"forward": 0, "backward": 1, "random": 2}
MAX_THREADS = 1024
_COUNTS = (
    *("loads", "loaded", "stores", "stored"),
    *("distinct_loaded", "distinct_stored", "unwritten", "first_unwritten"),
)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("name", ctypes.c_char * 64),
        *((name, ctypes.c_uint64) for name in _COUNTS),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("check", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("image_low", ctypes.c_uint64),
        ("image_high", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class BufferReport:
    """Traffic of one buffer in one launch (check mode only; zero otherwise).

    Attributes:
        size: bytes of the buffer.
        loads, stores: how many, over all threads.
        loaded, stored: bytes, over all threads.
        distinct_loaded, distinct_stored: different bytes.
        unwritten: bytes of an output that nobody wrote.
    """

    size: int
    loads: int
    loaded: int
    stores: int
    stored: int
    distinct_loaded: int
    distinct_stored: int
    unwritten: int


@dataclass
class Report:
    """One launch."""

    kernel: str
    grid: tuple[int, ...]
    buffers: dict[str, BufferReport] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """A kernel for one set of input types, ready to run."""

    signature: Signature
    library: Path
    entry: int
    image: tuple[int, int]
    handle: ctypes.CDLL


def build(sig: Signature, header: str, body: str, mode: str) -> Compiled:
    """Translate, compile and load.

    Raises:
        CompileError: the source is not valid Metal, as far as the emulator can tell.
    """
    library = library_of(sig, header, body, mode)
    runtime()
    handle = ctypes.CDLL(str(library))
    entry = ctypes.cast(handle.emu_entry, ctypes.c_void_p).value or 0
    return Compiled(sig, library, entry, _mapped(library), handle)


def library_of(sig: Signature, header: str, body: str, mode: str) -> Path:
    """Translate and compile only; any thread may do it."""
    messages = refused(header, "header") + refused(body, "body")
    if messages:
        raise CompileError("\n".join(f"error: {message}" for message in messages))
    return compile_kernel(to_cpp(sig, header, body), mode, header + body)


def _mapped(library: Path) -> tuple[int, int]:
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith(library.name):
                low, high = line.split()[0].split("-")
                ranges.append((int(low, 16), int(high, 16)))
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


def _contents(
    sig: Signature, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The memory behind each argument, in the signature's order."""
    arrays = []
    for b in sig.buffers:
        if b.kind == "output":
            arrays.append(outputs[b.index])
            continue
        a = inputs[b.index]
        if b.kind == "input":
            arrays.append(a)
        elif b.kind == "shape":
            arrays.append(np.array(a.shape, np.int32))
        elif b.kind == "strides":
            arrays.append(np.array([s // a.itemsize for s in a.strides], np.int64))
        else:
            arrays.append(np.array(a.ndim, np.int32))
    return arrays


def run(
    compiled: Compiled,
    inputs: Sequence[np.ndarray],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[np.dtype],
    *,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    init_value: float | None = None,
    check: bool = True,
    order: str = "forward",
    seed: int = 0,
    may_stay_unwritten: Sequence[str] = (),
) -> tuple[list[np.ndarray], Report]:
    """Run the kernel. Outputs that nobody wrote hold the bytes 0xFF: NaN in every float type.

    Args:
        order: of threads and threadgroups: "forward", "backward" or "random" (by seed).
        may_stay_unwritten: outputs that are larger than what the kernel fills.

    Raises:
        FaultError: a check failed.
        MetalError: the launch itself is not allowed.
    """
    if min(grid) < 1 or min(threadgroup) < 1:
        raise MetalError(
            f"grid {tuple(grid)} and threadgroup {tuple(threadgroup)} must be positive"
        )
    clamped = [min(g, t) for g, t in zip(grid, threadgroup, strict=True)]
    if int(np.prod(clamped)) > MAX_THREADS:
        raise MetalError(f"a threadgroup of {threadgroup} threads: Metal's limit is {MAX_THREADS}")
    library, sig = runtime(), compiled.signature
    outputs = [np.empty(tuple(s), d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
    for array in outputs:
        if init_value is None:
            array.reshape(-1).view(np.uint8)[:] = 0xFF
        else:
            array[...] = init_value
    contents = _contents(sig, inputs, outputs)
    buffers = (_Buffer * len(contents))()
    try:
        for raw, array, b in zip(buffers, contents, sig.buffers, strict=True):
            raw.data = library.emu_allocate(array.nbytes)
            raw.size = array.nbytes
            raw.kind = (1 if init_value is None else 2) if b.kind == "output" else 0
            raw.name = b.name.encode()[:63]
            ctypes.memmove(raw.data, array.ctypes.data, array.nbytes)
        launch = _Launch(
            entry=compiled.entry,
            buffers=buffers,
            num_buffers=len(contents),
            grid=(ctypes.c_uint32 * 3)(*grid),
            threadgroup=(ctypes.c_uint32 * 3)(*clamped),
            check=int(check),
            order=ORDERS[order],
            seed=seed,
            workers=os.cpu_count() or 1,
            image_low=compiled.image[0],
            image_high=compiled.image[1],
        )
        message = ctypes.create_string_buffer(4096)
        failed = library.emu_run(ctypes.byref(launch), message, len(message))
        for raw, array, b in zip(buffers, contents, sig.buffers, strict=True):
            if b.kind == "output":
                ctypes.memmove(array.ctypes.data, raw.data, array.nbytes)
        report = Report(sig.name, tuple(grid))
        for raw in buffers:
            counts = {name: getattr(raw, name) for name in _COUNTS[:-1]}
            report.buffers[raw.name.decode()] = BufferReport(size=raw.size, **counts)
        if failed:
            raise FaultError(_with_lines(compiled.library, message.value.decode()))
        if check and init_value is None:
            _refuse_unwritten(sig, buffers, outputs, may_stay_unwritten)
        return outputs, report
    finally:
        for raw, array in zip(buffers, contents, strict=True):
            if raw.data:
                library.emu_free(raw.data, array.nbytes)


def _with_lines(library: Path, message: str) -> str:
    def lines(m: re.Match[str]) -> str:
        return "at " + lines_of(library, int(m.group(1), 16) - 1)

    return re.sub(r"@pc (0x[0-9a-f]+)", lines, message)


def _refuse_unwritten(
    sig: Signature,
    buffers: ctypes.Array[_Buffer],
    outputs: Sequence[np.ndarray],
    allowed: Sequence[str],
) -> None:
    for raw, b in zip(buffers, sig.buffers, strict=True):
        if b.kind == "output" and raw.unwritten and b.name not in allowed:
            array = outputs[b.index]
            element = np.unravel_index(raw.first_unwritten // array.itemsize, array.shape)
            raise FaultError(
                f"output `{b.name}`: {raw.unwritten} of {raw.size} bytes never written, the first "
                f"in element {tuple(int(i) for i in element)}"
            )


def emulate(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    *,
    inputs: Sequence[np.ndarray],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[np.dtype],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    template: Template = (),
    init_value: float | None = None,
    atomic_outputs: bool = False,
    mode: str = "check",
    order: str = "forward",
    seed: int = 0,
    may_stay_unwritten: Sequence[str] = (),
) -> tuple[list[np.ndarray], Report]:
    """Compile and run in one call: the arguments of `mx.fast.metal_kernel`, and numpy arrays."""
    arrays = [np.ascontiguousarray(a).reshape(np.shape(a)) for a in inputs]
    described = [Input(n, a.dtype, a.shape) for n, a in zip(input_names, arrays, strict=True)]
    dtypes = [np.dtype(d) for d in output_dtypes]
    sig = signature(
        name,
        described,
        list(zip(output_names, dtypes, strict=True)),
        source,
        header,
        template,
        atomic_outputs,
    )
    return run(
        build(sig, header, source, mode),
        arrays,
        output_shapes,
        dtypes,
        grid=grid,
        threadgroup=threadgroup,
        init_value=init_value,
        check=mode == "check",
        order=order,
        seed=seed,
        may_stay_unwritten=may_stay_unwritten,
    )


__all__ = ["BFLOAT16", "BufferReport", "Compiled", "Report", "build", "emulate", "run"]
