"""Runs the source of an `mx.fast.metal_kernel` on a CPU and checks every load and store."""

from tests.metal_on_cpu.compiler import clang, missing_clang
from tests.metal_on_cpu.errors import CompileError, FaultError, MetalError
from tests.metal_on_cpu.kernel import EmulatedKernel, factory
from tests.metal_on_cpu.launch import BufferReport, Report

__all__ = [
    "BufferReport",
    "CompileError",
    "EmulatedKernel",
    "FaultError",
    "MetalError",
    "Report",
    "clang",
    "factory",
    "missing_clang",
]
