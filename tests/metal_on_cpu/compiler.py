"""Finds clang, compiles kernels, keeps what it compiled."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.metal_on_cpu.errors import CompileError

HERE = Path(__file__).parent
OLDEST_CLANG = 17  # the first with bfloat arithmetic, which older ones and g++ lack

_COMMON = [
    "-std=c++14",
    "-nostdinc++",
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-Wno-everything",
    # What Metal refuses or leaves undefined.
    "-Werror=c++17-extensions",
    "-Werror=return-type",
    "-Werror=uninitialized",
    "-Werror=sometimes-uninitialized",
    "-Werror=conditional-uninitialized",
    "-Werror=implicit-float-conversion",
    "-Werror=vla-cxx-extension",
    "-ftrivial-auto-var-init=pattern",
    # half and bfloat round after each operation; 1.0 is a float.
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    *("-Xclang", "-cl-single-precision-constant"),
    "-gline-tables-only",
    "-gdwarf-4",
    *("-isystem", str(HERE / "include")),
]
if os.uname().machine == "x86_64":
    _COMMON.append("-mf16c")

MODES = {
    "fast": ["-O2"],
    "check": [
        "-O1",
        "-fno-vectorize",
        "-fno-slp-vectorize",
        # Alignment is checked by the runtime, at a third of the compile time.
        "-fsanitize=thread,bounds,shift,integer-divide-by-zero,signed-integer-overflow,"
        "float-cast-overflow,return",
        *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
        *("-mllvm", "-tsan-instrument-atomics=0"),
        *("-mllvm", "-tsan-instrument-read-before-write=1"),
    ],
}


@functools.cache
def clang() -> str | None:
    """The path of a clang++ that is new enough, or None."""
    names = [os.environ.get("METAL_ON_CPU_CLANG", "")]
    names += [f"clang++-{v}" for v in range(24, OLDEST_CLANG - 1, -1)] + ["clang++"]
    for name in names:
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        number = re.search(r"clang version (\d+)", version)
        if number and int(number.group(1)) >= OLDEST_CLANG:
            return path
    return None


def missing_clang() -> str | None:
    """None if kernels can be compiled, else one line that says what to install."""
    if sys.platform != "linux":
        return "the Metal kernels run on a CPU only on Linux"
    if clang() and shutil.which("addr2line"):
        return None
    return (
        f"the Metal kernels run on a CPU only with clang {OLDEST_CLANG} or newer and binutils "
        "(Debian: apt-get install --no-install-recommends clang-19 binutils)"
    )


@functools.cache
def cache_folder() -> Path:
    """Compiled kernels, by a hash of all that went into them."""
    root = os.environ.get("METAL_ON_CPU_CACHE") or Path(tempfile.gettempdir()) / (
        f"metal-on-cpu-{os.getuid()}"
    )
    folder = Path(root)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _clang() -> str:
    path = clang()
    if path is None:
        raise CompileError(missing_clang())
    return path


@functools.cache
def runtime() -> ctypes.CDLL:
    """runtime.cpp, compiled and loaded; compiled kernels find its functions by name."""
    source = HERE / "runtime.cpp"
    flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-ftls-model=initial-exec"]
    target = cache_folder() / f"runtime-{_digest(source.read_text(), _clang(), *flags)}.so"
    if not target.exists():
        scratch = target.with_suffix(f".{os.getpid()}")
        _run([_clang(), str(source), "-o", str(scratch), *flags, "-lpthread"])
        scratch.replace(target)
    library = ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)
    library.emu_allocate.restype = ctypes.c_void_p
    library.emu_allocate.argtypes = [ctypes.c_uint64]
    library.emu_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    library.emu_run.restype = ctypes.c_uint32
    library.emu_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64]
    return library


@functools.cache
def _shim() -> str:
    return (HERE / "include" / "metal_stdlib").read_text()


def arrays_in_memory(cpp: str) -> list[str]:
    """Local arrays that clang, with everything inlined, cannot keep in registers.

    On a GPU they would lie in device memory.
    """
    flags = [*_COMMON, "-O2", "-DEMU_INLINE_ALL", "-ftrivial-auto-var-init=uninitialized"]
    result = subprocess.run(
        [_clang(), *flags, "-x", "c++", "-", "-S", "-emit-llvm", "-o", "-"],
        input=cpp,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise CompileError(result.stderr)
    lines = [line.strip() for line in result.stdout.splitlines() if "alloca" in line]
    return [line for line in lines if re.search(r"alloca (\[|%struct)", line)]


_CAST = re.compile(r"[*&]\s*\)|_cast\s*<")
_searched: set[str] = set()  # sources whose casts have been looked at
_locks: dict[Path, threading.Lock] = {}
_locks_lock = threading.Lock()


def compile_kernel(cpp: str, mode: str, text: str) -> Path:
    """Compile a translated kernel to a shared object.

    Args:
        cpp: the file to compile.
        mode: "check" or "fast".
        text: the source as its author wrote it; one search for bad casts serves all its
            instantiations.

    Raises:
        CompileError: clang's messages, or a cast between address spaces.
    """
    flags = [*_COMMON, *MODES[mode]]
    stem = cache_folder() / f"kernel-{_digest(cpp, _shim(), _clang(), *flags)}"
    target = stem.with_suffix(".so")
    with _one_at_a_time(target):
        if not target.exists():
            _compile(cpp, text, flags, target)
    return target


@contextlib.contextmanager
def _one_at_a_time(target: Path) -> Iterator[None]:
    with _locks_lock:
        lock = _locks.setdefault(target, threading.Lock())
    with lock:
        yield


def _compile(cpp: str, text: str, flags: list[str], target: Path) -> None:
    scratch = target.with_suffix(f".{os.getpid()}")
    source, objects = Path(f"{scratch}.cpp"), Path(f"{scratch}.o")
    source.write_text(cpp)
    try:
        _run([_clang(), *flags, "-c", str(source), "-o", str(objects)])
        if text not in _searched and _CAST.search(text):
            _refuse_casts_between_spaces([*flags, str(source)])
        _searched.add(text)
        # No -fsanitize here: it would bring the sanitizers' own runtimes.
        _run([_clang(), "-shared", "-nostdlib", str(objects), "-o", str(scratch), "-lm"])
        scratch.replace(target)
    finally:
        for file in (source, objects):
            file.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise CompileError(result.stderr)


def _refuse_casts_between_spaces(arguments: list[str]) -> None:
    dump = subprocess.run(
        [_clang(), *arguments, "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics"],
        capture_output=True,
        text=True,
    ).stdout
    file, line = "?", "?"
    for text in dump.splitlines():
        # A location is file:line:column, line:line:column or col:column: only what has changed.
        begin = None
        for where, number in re.findall(r"([^\s<>,:]+):(\d+)(?::\d+)?", text.split("'")[0]):
            if where not in ("col", "line"):
                file = where
            if where != "col":
                line = number
            begin = begin or f"{file}:{line}"
        if "AddressSpaceConversion" in text and "emu_" not in text:
            kind = text.split("'")[1]
            raise CompileError(f"error: cast between address spaces at {begin}, to {kind}")


def lines_of(library: Path, address: int) -> str:
    """Source lines, innermost first, of an address in a compiled kernel."""
    output = subprocess.run(
        ["addr2line", "-i", "-e", str(library), hex(address)], capture_output=True, text=True
    ).stdout
    places = [line.rsplit("/", 1)[-1].split(" ")[0] for line in output.splitlines()]
    places = [p for p in places if p.startswith(("header:", "body:"))]
    return " <- ".join(places) if places else "an unknown line"
