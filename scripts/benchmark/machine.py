"""The machine, the versions, the BLAS, and the memory of this process."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

_STATUS = Path("/proc/self/status")
OLDEST_KERNELS = ("Prescott", "Core2")  # what OpenBLAS takes for processors newer than itself


def describe() -> dict[str, Any]:
    """What a figure depends on beside the code."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if _LINUX else os.cpu_count(),
        "cores_of_machine": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": str(mx.default_device()),
        "blas": blas(),
        "blas_kernels": blas_kernels(),
        "threads": {
            name: os.environ[name]
            for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
            if name in os.environ
        },
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("mlx", "mlx-lm", "mlx-paged", "numpy") if _has(name)
        },
    }


def load_average() -> float | None:
    """Processes that want to run, of the last minute; None where nobody counts."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def blas() -> str:
    """The library that computes MLX's products on the CPU."""
    if not _LINUX:
        return "Accelerate" if sys.platform == "darwin" else "unknown"
    path = _fast_blas()
    return path.rsplit("/", 1)[-1] if path else "reference BLAS"


def blas_kernels() -> str | None:
    """The processor that OpenBLAS has chosen its kernels for; None for another BLAS."""
    path = _fast_blas() if _LINUX else None
    try:
        name = ctypes.CDLL(path).openblas_get_corename if path else None
    except (OSError, AttributeError):
        return None
    if name is None:
        return None
    name.restype = ctypes.c_char_p
    return str(name().decode("ascii"))


def _fast_blas() -> str | None:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = {line[line.index("/") :] for line in maps.splitlines() if "/" in line}
    fast = sorted(
        path
        for path in paths
        # numpy and scipy bring an OpenBLAS of their own, which MLX does not use.
        if re.search(r"openblas[^/]*$|libmkl|libblis", path) and not re.search(r"numpy|scipy", path)
    )
    return fast[0] if fast else None


def warnings(figures: dict[str, Any], load: float | None) -> list[str]:
    """What makes the figures less than they could be."""
    found = []
    if figures["blas"] == "reference BLAS":
        found.append(
            "MLX uses the reference BLAS here, some twenty times slower than OpenBLAS: "
            "LD_PRELOAD=.../libopenblas.so.0 (Debian: libopenblas0-pthread)"
        )
    if figures["blas_kernels"] in OLDEST_KERNELS:
        found.append(
            f"OpenBLAS does not know this processor and uses its {figures['blas_kernels']} "
            "kernels, several times slower than the right ones: OPENBLAS_CORETYPE=Haswell (with "
            "AVX-512: SkylakeX), or a newer OpenBLAS"
        )
    if load is not None and load > 0.5 * (figures["cores"] or 1):
        found.append(f"the machine is busy (load average {load}); measure on a quiet one")
    return found


def reset_peak() -> None:
    """Forget the peak of this process's memory so far, where the system can."""
    mx.reset_peak_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak_rss() -> int:
    """The most bytes that this process had in memory since `reset_peak`, or since its start."""
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_memory() -> int | None:
    """Bytes that could be had now; None where the system does not tell."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


_LINUX = sys.platform.startswith("linux")


def _has(name: str) -> bool:
    try:
        version(name)
    except ImportError:
        return False
    return True


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
