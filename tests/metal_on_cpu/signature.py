"""The function signature that MLX writes around a kernel's body.

Our own copy, so that the kernel can be called with the right arguments; a test compares it, letter
by letter, with what MLX prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONSTANT_BELOW = 8  # an input with fewer elements lies in the constant address space

Template = Sequence[tuple[str, "bool | int | np.dtype"]]

_TYPES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t", "bool": "bool"}

# Metal's thread attributes in MLX's order: type, and where the emulator's EmuThread has it.
_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "t->dispatch_simdgroups * 8"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "t->dispatch_simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", "dispatch_threads_per_threadgroup"),
    "grid_origin": ("uint3", None),
    "grid_size": ("uint3", "threads_per_grid"),
    "quadgroup_index_in_threadgroup": ("uint", "t->index / 4"),
    "quadgroups_per_threadgroup": ("uint", "t->simdgroups * 8"),
    "simdgroup_index_in_threadgroup": ("uint", "t->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "t->simdgroups"),
    "thread_execution_width": ("uint", "32"),
    "thread_index_in_quadgroup": ("uint", "t->lane % 4"),
    "thread_index_in_simdgroup": ("uint", "t->lane"),
    "thread_index_in_threadgroup": ("uint", "t->index"),
    "thread_position_in_grid": ("uint3", "position_in_grid"),
    "thread_position_in_threadgroup": ("uint3", "position_in_threadgroup"),
    "threadgroup_position_in_grid": ("uint3", "threadgroup_in_grid"),
    "threadgroups_per_grid": ("uint3", "threadgroups_per_grid"),
    "threads_per_grid": ("uint3", "threads_per_grid"),
    "threads_per_simdgroup": ("uint", "32"),
    "threads_per_threadgroup": ("uint3", "threads_per_threadgroup"),
}


@dataclass(frozen=True)
class Input:
    """An input as far as the signature depends on it."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def space(self) -> str:
        return "constant" if self.size < CONSTANT_BELOW else "device"


@dataclass(frozen=True)
class Buffer:
    """One argument: what it holds ("input", "shape", "strides", "ndim", "output"), of which array.

    `ctype` is its Metal type, a pointer or a reference.
    """

    kind: str
    index: int
    name: str
    ctype: str


@dataclass(frozen=True)
class Signature:
    """A whole Metal function."""

    source: str  # as MLX hands it to the compiler
    name: str
    template_arguments: str
    buffers: list[Buffer]
    attributes: list[tuple[str, str]]  # Metal type, C++ expression of the emulator


def type_name(dtype: np.dtype) -> str:
    """The Metal name of a dtype, as MLX spells it."""
    return _TYPES.get(dtype.name, f"{dtype.name}_t")


def _argument(value: bool | int | np.dtype) -> str:
    return str(int(value)) if isinstance(value, (bool, int)) else type_name(value)


def _parameter(value: bool | int | np.dtype) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _attribute(name: str) -> tuple[str, str]:
    kind, place = _ATTRIBUTES[name]
    if kind == "uint":
        return kind, str(place)
    parts = ", ".join("0" if place is None else f"t->{place}[{i}]" for i in range(3))
    return kind, f"uint3{{{parts}}}"


def _buffers(
    inputs: Sequence[Input],
    outputs: Sequence[tuple[str, np.dtype]],
    body: str,
    atomic_outputs: bool,
) -> list[Buffer]:
    buffers = []
    for i, a in enumerate(inputs):
        mark = "*" if a.shape else "&"
        buffers.append(Buffer("input", i, a.name, f"const {a.space} {type_name(a.dtype)}{mark}"))
        if not a.shape:
            continue
        for kind, ctype in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if f"{a.name}_{kind}" in body:
                buffers.append(Buffer(kind, i, f"{a.name}_{kind}", f"const constant {ctype}"))
    for i, (name, dtype) in enumerate(outputs):
        element = f"atomic<{type_name(dtype)}>" if atomic_outputs else type_name(dtype)
        buffers.append(Buffer("output", i, name, f"device {element}*"))
    return buffers


def signature(
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[tuple[str, np.dtype]],
    body: str,
    header: str = "",
    template: Template = (),
    atomic_outputs: bool = False,
) -> Signature:
    """The function that MLX generates for a call with these inputs."""
    arguments = f"<{', '.join(_argument(v) for _, v in template)}>" if template else ""
    full = "custom_kernel_" + name
    if template:
        mangled = arguments.replace(", ", "_")
        for character in "<>-":
            mangled = mangled.replace(character, "_")
        full += "_" + mangled[:-1]
    for a in inputs:
        suffix = "" if a.size >= CONSTANT_BELOW else "c" if a.shape else "s"
        full += f"_{type_name(a.dtype)}{suffix}"
    full += "".join(f"_{type_name(dtype)}" for _, dtype in outputs)

    source = header
    if template:
        parameters = ", ".join(f"{_parameter(v)} {n}" for n, v in template)
        source += f"template <{parameters}>\n"
    buffers = _buffers(inputs, outputs, body, atomic_outputs)
    lines = [f"  {b.ctype} {b.name} [[buffer({i})]]" for i, b in enumerate(buffers)]
    attributes = [n for n in _ATTRIBUTES if n in body]
    lines += [f"  {_ATTRIBUTES[n][0]} {n} [[{n}]]" for n in attributes]
    source += f"[[kernel]] void {full}(\n" + ",\n".join(lines) + ") {\n" + body + "\n}\n"
    if template:
        source += (
            f'\ntemplate [[host_name("{full}")]] [[kernel]] '
            f"decltype({full}{arguments}) {full}{arguments};\n"
        )
    return Signature(source, full, arguments, buffers, [_attribute(n) for n in attributes])
