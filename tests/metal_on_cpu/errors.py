"""What can be wrong with a kernel."""


class MetalError(Exception):
    """The kernel cannot be run, or is wrong."""


class CompileError(MetalError):
    """The compiler, or a rule of Metal that it does not know, refuses the source."""


class FaultError(MetalError):
    """A check failed while the kernel ran; the message names line, thread and buffer."""
