"""Metal source to C++ that clang compiles together with include/metal_stdlib."""

from __future__ import annotations

import re

from tests.metal_on_cpu.signature import Signature

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)

# threadgroup float tile[N];   one declaration per line, in a function's body
_THREADGROUP_ARRAY = re.compile(
    r"(?:(?<=[;{}])|^)(\s*)threadgroup\s+([\w:]+(?:\s*<[^;<>]*>)?)\s+(\w+)"
    r"\s*((?:\[[^\];]*\]\s*)*);",
    re.M,
)
_SEVERAL_ARRAYS = re.compile(
    r"(?:(?<=[;{}])|^)\s*threadgroup\s+[\w:]+(?:\s*<[^;<>]*>)?\s+\w+"
    r"\s*(?:\[[^\];]*\]\s*)*,[^;()]*;",
    re.M,
)

_VECTOR_ALIAS = re.compile(
    r"\busing\s+(\w+)\s*=\s*(?:metal::)?vec\s*<"
    r"|\btypedef\s+(?:metal::)?vec\s*<[^;]*>\s*(\w+)\s*;"
)

_SCALAR = r"(?:float|half|bfloat|bool|u?(?:char|short|int|long)|u?int(?:8|16|32|64)_t|b?float16_t)"
_POINTER = re.compile(
    r"[(,;{]\s*((?:(?:const|volatile)\s+)*(?:" + _SCALAR + r"[234]?|T|U|vec\s*<[^<>]*>)"
    r"(?:\s+const)?\s*[*&]\s*(?:const\s+)?\w+)\s*(?=[,)=;\[])"
)

_THREAD = """\
struct EmuThread {
  uint position_in_grid[3], threadgroup_in_grid[3], position_in_threadgroup[3];
  uint threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3];
  uint threadgroups_per_grid[3], threads_per_grid[3];
  uint lane, simdgroup, index, simdgroups, dispatch_simdgroups;
};
"""


def without_comments(source: str) -> str:
    """The source with comments blanked out; lines and columns stay."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)


def refused(source: str, file: str) -> list[str]:
    """What Metal refuses and clang does not, as messages with lines."""
    source = without_comments(source)
    messages = []
    for m in _POINTER.finditer(source):
        line = source.count("\n", 0, m.start(1)) + 1
        messages.append(f"{file}:{line}: `{m.group(1)}` has no address space")
    for m in _SEVERAL_ARRAYS.finditer(source):
        line = source.count("\n", 0, m.end()) + 1
        messages.append(f"{file}:{line}: one threadgroup array per declaration")
    return messages


def to_cpp(signature: Signature, header: str, body: str) -> str:
    """A C++ file with the kernel and `emu_entry`, which the runtime calls for each thread.

    Faults then name lines of "header" and "body", counted as in the strings given to MLX.
    """
    source = signature.source
    start = source.index(body, source.index("[[kernel]] void "))
    source = source[:start] + '\n#line 1 "body"\n' + source[start:]
    source = without_comments(source).replace("[[kernel]]", "          ")
    source = re.sub(r"\ntemplate \[\[host_name.*", "\n", source)
    source = re.sub(r"\[\[\w+(?:\(\d+\))?\]\]", "", source)
    source = _THREADGROUP_ARRAY.sub(_array_in_arena, source)
    for aliases in _VECTOR_ALIAS.findall(source):
        alias = aliases[0] or aliases[1]
        source = re.sub(rf"\b{alias}\s*\(", f"metal::emu_construct<{alias}>(", source)
    source = re.sub(
        r"\b(?:metal::)?vec\s*<([^<>;]*)>\s*\(",
        r"metal::emu_construct<metal::vec<\1>>(",
        source,
    )
    call = f"{signature.name}{signature.template_arguments}({', '.join(_arguments(signature))})"
    return (
        f"#include <metal_stdlib>\n#pragma GCC poison double\n{_THREAD}"
        f'#line 1 "header"\n{source}\n#line 1 "entry"\n'
        'extern "C" __attribute__((no_sanitize("thread", "undefined")))\n'
        f"void emu_entry(void** b, const EmuThread* t) {{\n  {call};\n}}\n"
    )


def _array_in_arena(m: re.Match[str]) -> str:
    space, ctype, name, dimensions = m.groups()
    alias = f"emu_type_{name}"
    return (
        f"{space}typedef {ctype} {alias}{dimensions}; threadgroup {alias}& {name} = "
        f"*(threadgroup {alias}*)(ulong)emu_threadgroup("
        f'sizeof({alias}), alignof({alias}), "{name}", __FILE__, __LINE__);'
    )


def _arguments(signature: Signature) -> list[str]:
    arguments = []
    for i, buffer in enumerate(signature.buffers):
        pointer = buffer.ctype.replace("&", "*")
        cast = f"({pointer})(ulong)b[{i}]"
        arguments.append(f"*{cast}" if buffer.ctype.endswith("&") else cast)
    return arguments + [expression for _, expression in signature.attributes]
