"""Small kernels, right and wrong, and what the emulator must say about each.

The line with the fault ends in `// HERE`; the message must name it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.metal_on_cpu.launch import emulate
from tests.metal_on_cpu.signature import BFLOAT16

F32, I32 = np.dtype("float32"), np.dtype("int32")
IOTA = np.arange(64, dtype=np.float32)
START = """
  uint i = thread_position_in_grid.x;
  uint lane = thread_index_in_simdgroup;
  uint simd = simdgroup_index_in_threadgroup;
"""
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


@dataclass(frozen=True)
class Kernel:
    """A kernel of one to two inputs; by default 64 threads, input `a` and output `o` of 64 floats.

    Attributes:
        says: parts of the message, in this order; none for a kernel that is right.
    """

    name: str
    body: str
    says: Sequence[str] = ()
    header: str = ""
    b: np.ndarray | None = None
    outputs: Sequence[tuple[str, tuple[int, ...], np.dtype]] = (("o", (64,), F32),)
    threads: int = 64
    threadgroup: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str | None:
        """File and line of the fault, as messages name it."""
        for file, text in (("header", self.header), ("body", START + self.body)):
            for number, line in enumerate(text.split("\n"), 1):
                if "// HERE" in line:
                    return f"{file}:{number}"
        return None

    def run(self, **options: Any) -> list[np.ndarray]:
        """Emulate it; raises what the emulator raises."""
        inputs = [IOTA] if self.b is None else [IOTA, self.b]
        outputs, _ = emulate(
            "case",
            ["a", "b"][: len(inputs)],
            [name for name, _, _ in self.outputs],
            START + self.body,
            self.header,
            inputs=inputs,
            output_shapes=[shape for _, shape, _ in self.outputs],
            output_dtypes=[dtype for _, _, dtype in self.outputs],
            grid=(self.threads, 1, 1),
            threadgroup=(self.threadgroup, 1, 1),
            **{**self.options, **options},
        )
        return outputs


THREAD = "[thread ("
DEVICE_HELPER = "inline float first(device const float* p) { return p[0]; }\n"
SCRATCH = "threadgroup float s[64];\n  s[i] = a[i];\n  "

RIGHT = [
    Kernel("plain", "o[i] = a[i];"),
    Kernel(
        "8 elements to a device helper",
        "o[i] = first(b);",
        header=DEVICE_HELPER,
        b=np.zeros(8, F32),
    ),
    Kernel("threadgroup memory with a barrier", SCRATCH + BARRIER + "\n  o[i] = s[63 - i];"),
    Kernel(
        "within a SIMD group its own barrier is enough",
        SCRATCH + "simdgroup_barrier(mem_flags::mem_threadgroup);\n  o[i] = s[i ^ 1];",
    ),
    Kernel(
        "a whole SIMD group may return",
        "o[i] = 0;\n  if (simd == 1) return;\n  o[i] = simd_sum(a[i]);",
    ),
    Kernel("an output with initial values", "if (i != 17) o[i] = a[i];", options={"init_value": 0}),
    Kernel(
        "atomics on one counter",
        "atomic_fetch_add_explicit(&o[0], 1, memory_order_relaxed);",
        outputs=[("o", (1,), I32)],
        options={"atomic_outputs": True, "init_value": 0},
    ),
    Kernel(
        "SIMD group matrices",
        """simdgroup_matrix<float, 8, 8> x, y, z = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(x, a, 8);
  simdgroup_load(y, a, 8, ulong2(0, 0), true);
  simdgroup_multiply_accumulate(z, x, y, z);
  simdgroup_store(z, o, 8);""",
        threads=32,
        threadgroup=32,
    ),
    Kernel(
        "vectors",
        """float4 v = *(device const float4*)(a + i / 4 * 4);
  using half4_t = vec<half, 4>;
  half4_t h = half4_t(v);
  o[i] = float(h[i % 4]) + dot(v, float4(0.0f)) + vec<float, 2>(v.xy).x * 0.0f;""",
    ),
    Kernel(
        "a tile used in turns",
        """threadgroup float s[64];
  float sum = 0.0f;
  for (int t = 0; t < 3; t++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s[i] = a[i] * float(t);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum += s[63 - i];
  }
  o[i] = sum;""",
    ),
]

BOUNDS = [
    Kernel("one past an input", "o[i] = a[i + 1];  // HERE",
           ["out of bounds", "byte 256", "`a`", "256 bytes", "thread (63,0,0)"]),
    Kernel("before an input", "o[i] = a[int(i) - 1];  // HERE",
           ["out of bounds", "byte -4", "`a`", "thread (0,0,0)"]),
    Kernel("far past an input", "o[i] = a[i + 100000];  // HERE",
           ["out of bounds", "byte 400000", "`a`", THREAD]),
    Kernel("a stride twice too large", "o[i] = a[i * 2];  // HERE",
           ["out of bounds", "byte 256", "`a`", "thread (32,0,0)"]),
    Kernel("a vector over the end",
           "o[i] = (*(device const packed_float4*)(a + min(i, 62u))).x;  // HERE",
           ["out of bounds", "load of 16 bytes", "`a`", "thread (61,0,0)"]),
    Kernel("one past an output", "o[i + 1] = a[i];  // HERE",
           ["out of bounds", "store", "byte 256", "`o`", "thread (63,0,0)"]),
    Kernel("before an output", "o[int(i) - 1] = a[i];  // HERE",
           ["out of bounds", "store", "byte -4", "`o`", THREAD]),
    Kernel("the smaller of two inputs", "o[i] = a[i] + b[i];  // HERE",
           ["out of bounds", "byte 128", "`b`", "thread (32,0,0)"], b=np.zeros(32, F32)),
    Kernel("past a constant input", "o[i] = a[i] + b[i % 4];  // HERE",
           ["out of bounds", "byte 12", "`b`", "thread (3,0,0)"], b=np.zeros(3, F32)),
    Kernel("a table's padding", "o[i] = a[b[i % 8] * 8];  // HERE",
           ["out of bounds", "byte -32", "`a`", "thread (5,0,0)"],
           b=np.array([0, 1, 2, 3, 4, -1, -1, -1], I32)),
    Kernel("past a shape", "o[i] = float(a_shape[1]);  // HERE",
           ["out of bounds", "byte 4", "`a_shape`", THREAD]),
    Kernel("past a threadgroup array",
           "threadgroup float s[32];\n  s[i] = a[i];  // HERE\n  o[i] = 0;",
           ["array index out of its bounds", "thread (32,0,0)"]),
    Kernel("a pointer past a threadgroup array",
           "threadgroup float s[32];\n  threadgroup float t[32];\n  threadgroup float* p = s;\n"
           "  p[i] = a[i];  // HERE\n  o[i] = 0;",
           ["out of bounds", "byte 128", "threadgroup array `s`", "thread (32,0,0)"]),
    Kernel("a pointer before a threadgroup array",
           "threadgroup float s[64];\n  threadgroup float* p = s;\n"
           "  p[int(i) - 1] = a[i];  // HERE\n  o[i] = 0;",
           ["out of bounds", "threadgroup", "thread (0,0,0)"]),
    Kernel("past an array of the thread",
           "float s[4] = {0, 1, 2, 3};\n  o[i] = s[int(a[i]) / 8];  // HERE",
           ["array index out of its bounds", "thread (32,0,0)"]),
]  # fmt: skip

ALIGNMENT = [
    Kernel("a misaligned float4", "o[i] = (*(device const float4*)(a + i % 2)).x;  // HERE",
           ["misaligned", "16 bytes", "thread (1,0,0)"]),
    Kernel("a misaligned float2 in threadgroup memory",
           "threadgroup float s[66];\n  s[i] = a[i];\n  if (i < 2) s[64 + i] = 0.0f;\n  "
           + BARRIER + "\n  o[i] = (*(threadgroup float2*)(s + i)).x;  // HERE",
           ["misaligned", "8 bytes", THREAD]),
]  # fmt: skip

UNWRITTEN = [
    Kernel("threadgroup memory read before it is written",
           f"threadgroup float s[64];\n  if (i > 0) s[i] = a[i];\n  {BARRIER}\n"
           "  o[i] = s[63 - i];  // HERE",
           ["threadgroup array `s`, which nobody has written", "thread (63,0,0)"]),
    Kernel("half of a tile is filled",
           f"threadgroup float s[64];\n  if (i < 32) s[i] = a[i];\n  {BARRIER}\n"
           "  o[i] = s[i];  // HERE",
           ["threadgroup array `s`, which nobody has written", "SIMD group 1"]),
    Kernel("an output is read first", "o[i] += a[i];  // HERE",
           ["load of byte 0 of output `o`, which nobody has written", "thread (0,0,0)"]),
    Kernel("a variable without a value", "float x;\n  if (i < 3) x = 1.0f;\n  o[i] = x;  // HERE",
           ["error", "uninitialized"]),
    Kernel("an element that nobody writes", "if (i != 17) o[i] = a[i];",
           ["output `o`: 4 of 256 bytes never written", "(17,)"]),
    Kernel("the tail is left out", "if (i < 60) o[i] = a[i];",
           ["output `o`: 16 of 256 bytes never written", "(60,)"]),
    Kernel("the second output is forgotten", "o[i] = a[i];",
           ["output `second`: 16 of 16 bytes never written", "(0,)"],
           outputs=[("o", (64,), F32), ("second", (4,), F32)]),
]  # fmt: skip

RACES = [
    Kernel("no barrier between write and read",
           SCRATCH + "simd_sum(1.0f);\n  o[i] = s[i ^ 1];  // HERE",
           ["data race", "threadgroup array `s`", "written by thread", THREAD]),
    Kernel("a barrier for nothing",
           SCRATCH + "threadgroup_barrier(mem_flags::mem_none);\n  o[i] = s[63 - i];  // HERE",
           ["data race", "threadgroup array `s`", THREAD]),
    Kernel("a barrier for the other memory",
           SCRATCH + "threadgroup_barrier(mem_flags::mem_device);\n  o[i] = s[63 - i];  // HERE",
           ["data race", "threadgroup array `s`", THREAD]),
    Kernel("a SIMD barrier between SIMD groups",
           "threadgroup float s[64];\n  s[63 - i] = a[i];\n"
           "  threadgroup_barrier(mem_flags::mem_none);\n"
           "  simdgroup_barrier(mem_flags::mem_threadgroup);\n  o[i] = s[i];  // HERE",
           ["data race", "threadgroup array `s`", THREAD]),
    Kernel("a tile refilled while others read",
           SCRATCH + BARRIER + "\n  o[i] = s[min(i + 1, 63u)];\n  s[i] = 0.0f;  // HERE",
           ["data race", "threadgroup array `s`", "written here", "read by", THREAD]),
    Kernel("a loop with one of its two barriers",
           "threadgroup float s[64];\n  float sum = 0.0f;\n  for (int t = 0; t < 2; t++) {\n"
           f"    s[i] = a[i];\n    {BARRIER}\n    sum += s[63 - i];  // HERE\n  }}\n  o[i] = sum;",
           ["data race", "threadgroup array `s`", THREAD]),
    Kernel("two threads write one element of a threadgroup array",
           "threadgroup float s[64];\n  s[i / 2] = a[i];  // HERE\n  o[i] = 0;",
           ["data race", "threadgroup array `s`", "thread (1,0,0)"]),
    Kernel("a counter without atomics",
           f"threadgroup int n[1];\n  if (i == 0) n[0] = 0;\n  {BARRIER}\n"
           "  n[0] += 1;  // HERE\n  o[i] = 0;",
           ["data race", "threadgroup array `n`", THREAD]),
    Kernel("two threads write one output element", "o[i / 2] = a[i];  // HERE",
           ["data race", "buffer `o`", "thread (1,0,0)"]),
    Kernel("two threadgroups write one output element", "o[i % 64] = a[i % 64];  // HERE",
           ["data race", "buffer `o`", "threadgroup #0", "threadgroup (1,0,0)"], threads=128),
    Kernel("through an output without a barrier for it",
           f"o[i] = a[i];\n  {BARRIER}\n  o[63 - i] = o[63 - i] + 1.0f;  // HERE",
           ["data race", "buffer `o`", THREAD]),
    Kernel("one threadgroup reads what another wrote",
           "o[i] = a[i % 64];\n  float x = o[i % 64];  // HERE\n  o[i] = x + 1.0f;",
           ["data race", "buffer `o`", "threadgroup (1,0,0)"],
           threads=128, outputs=[("o", (128,), F32)]),
]  # fmt: skip

DIVERGENCE = [
    Kernel("simd_sum for half of the lanes",
           "float s = 0;\n  if (lane < 16) s = simd_sum(a[i]);  // HERE\n  o[i] = s;",
           ["deadlock", "simd_sum"]),
    Kernel("simd_sum after a return",
           "if (lane == 5) { o[i] = 0; return; }\n  o[i] = simd_sum(a[i]);  // HERE",
           ["divergent SIMD group", "simd_sum", "1 of 32 lanes have returned", THREAD]),
    Kernel("two simd functions in two branches",
           "float s;\n  if (lane < 16) s = simd_sum(a[i]);\n  else s = simd_max(a[i]);  // HERE\n"
           "  o[i] = s;",
           ["divergent SIMD group", "simd_max", "simd_sum", THREAD]),
    Kernel("a loop as long as the lane's number",
           "float s = 0;\n  for (uint n = 0; n < lane; n++) s += simd_sum(a[i]);  // HERE\n"
           "  o[i] = s;",
           ["divergent SIMD group", "simd_sum", THREAD]),
    Kernel("a barrier for one SIMD group",
           f"if (simd == 0) {BARRIER}  // HERE\n  o[i] = 0;",
           ["deadlock", "threadgroup_barrier"]),
    Kernel("a barrier after a return",
           f"o[i] = 0;\n  if (i >= 32) return;\n  {BARRIER}  // HERE",
           ["threadgroup_barrier"]),
    Kernel("two barriers for two SIMD groups",
           f"if (simd == 0) {{\n    {BARRIER}\n  }} else {{\n    {BARRIER}  // HERE\n  }}\n"
           "  o[i] = 0;",
           ["divergent barrier", THREAD]),
    Kernel("a barrier in a loop of different lengths",
           f"for (uint n = 0; n <= simd; n++) {BARRIER}  // HERE\n  o[i] = 0;",
           ["threadgroup_barrier"]),
    Kernel("a barrier where lanes wait for a sum",
           f"float s = 0;\n  if (lane < 16) s = simd_sum(a[i]);\n  else {BARRIER}  // HERE\n"
           "  o[i] = s;",
           ["divergent SIMD group", "threadgroup_barrier", "simd_sum", THREAD]),
    Kernel("a shuffle from a lane that is not there",
           "o[i] = simd_shuffle(a[i], ushort(20));  // HERE",
           ["a lane that does not exist", "SIMD group 1"],
           threads=48, threadgroup=48, outputs=[("o", (48,), F32)]),
    Kernel("a matrix in half a SIMD group",
           "simdgroup_matrix<float, 8, 8> x, z = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);\n"
           "  simdgroup_load(x, a, 8);\n  simdgroup_multiply_accumulate(z, x, x, z);  // HERE\n"
           "  o[i] = 0;",
           ["all 32 lanes", THREAD], threads=16, threadgroup=16, outputs=[("o", (16,), F32)]),
]  # fmt: skip

INPUTS_AND_SPACES = [
    Kernel("a store to an input", "((device float*)a)[i] = 1;  // HERE\n  o[i] = 0;",
           ["store to input `a`", "thread (0,0,0)"]),
    Kernel("a store to a const input", "a[i] = 1;  // HERE\n  o[i] = 0;", ["error"]),
    Kernel("a constant input to a device helper", "o[i] = first(b);  // HERE",
           ["error"], header=DEVICE_HELPER, b=np.zeros(3, F32)),
    Kernel("a pointer without an address space", "o[i] = g(a);",
           ["has no address space"],
           header="inline float g(const float* p) { return p[0]; }  // HERE\n"),
    Kernel("a reference without an address space", "float x = a[i];\n  add(x);\n  o[i] = x;",
           ["has no address space"], header="inline void add(float& x) { x += 1.0f; }  // HERE\n"),
    Kernel("a threadgroup pointer cast to device",
           "threadgroup float s[64];\n  s[i] = a[i];\n"
           "  device float* p = (device float*)s;  // HERE\n  o[i] = p[i];",
           ["cast between address spaces"]),
    Kernel("a device pointer cast to threadgroup",
           "threadgroup const float* p = (threadgroup const float*)a;  // HERE\n  o[i] = p[i];",
           ["cast between address spaces"]),
    Kernel("a device pointer kept as a threadgroup one",
           "threadgroup const float* p = a;  // HERE\n  o[i] = p[i];", ["error"]),
]  # fmt: skip

LIMITS_AND_LANGUAGE = [
    Kernel("33 KiB of threadgroup memory",
           "threadgroup float s[8448];  // HERE\n  s[i] = 0;\n  o[i] = s[i];",
           ["33792 bytes of threadgroup memory", "`s`", "32768"]),
    Kernel("two arrays that are too much together",
           "threadgroup float s[4096];\n  threadgroup float t[4097];  // HERE\n  s[i] = t[i] = 0;\n"
           "  o[i] = s[i];",
           ["32772 bytes of threadgroup memory", "`t`", "32768"]),
    Kernel("2,048 threads in a threadgroup", "o[i] = 0;", ["limit is 1024"],
           threads=2048, threadgroup=2048, outputs=[("o", (2048,), F32)]),
    Kernel("two arrays in one declaration",
           "threadgroup float s[64], t[64];  // HERE\n  o[i] = 0;",
           ["one threadgroup array per declaration"]),
    Kernel("a double", "double x = a[i];  // HERE\n  o[i] = float(x);", ["error", "double"]),
    Kernel("float to bfloat by itself",
           "bfloat16_t x = a[i];  // HERE\n  o[i] = float(x);", ["error"]),
    Kernel("float to a bfloat output by itself", "o[i] = a[i];  // HERE", ["error"],
           outputs=[("o", (64,), BFLOAT16)]),
    Kernel("float to half by itself",
           "half x = a[i] * 2.0f;  // HERE\n  o[i] = float(x);", ["error"]),
    Kernel("a function that forgets to return", "o[i] = sign_of(a[i]);", ["error"],
           header="inline float sign_of(float x) {\n  if (x > 0.0f) return 1.0f;\n}  // HERE\n"),
    Kernel("C++17", "if constexpr (true) o[i] = 0;  // HERE", ["error", "constexpr"]),
    Kernel("an array of variable length", "float s[i];  // HERE\n  o[i] = 0;", ["error"]),
    Kernel("an integer overflow", "int x = int(a[i]) * 100000000;  // HERE\n  o[i] = float(x);",
           ["integer overflow in *", "thread (22,0,0)"]),
    Kernel("a shift by too much", "o[i] = float(1 << int(i));  // HERE",
           ["shift out of range", THREAD]),
    Kernel("a division by zero", "o[i] = float(7 / int(a[i]));  // HERE",
           ["division by zero", "thread (0,0,0)"]),
    Kernel("a float that no int holds", "o[i] = float(int(a[i] * 1e9f));  // HERE",
           ["float to integer out of range", "thread (3,0,0)"]),
]  # fmt: skip

WRONG = [
    *BOUNDS,
    *ALIGNMENT,
    *UNWRITTEN,
    *RACES,
    *DIVERGENCE,
    *INPUTS_AND_SPACES,
    *LIMITS_AND_LANGUAGE,
]
