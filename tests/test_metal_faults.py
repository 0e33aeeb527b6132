"""The emulator accepts kernels that are right and finds what is wrong with the others."""

import re

import numpy as np
import pytest

from tests.metal_cases import METAL, require_emulator
from tests.metal_on_cpu import MetalError
from tests.metal_on_cpu.faults import RIGHT, WRONG, Kernel

require_emulator()
if METAL:
    pytest.skip("tests of the emulator, which a Mac does not need", allow_module_level=True)


@pytest.mark.parametrize("kernel", RIGHT, ids=lambda k: k.name)
def test_right_kernels_run(kernel: Kernel) -> None:
    for order in ("forward", "backward", "random"):
        outputs = kernel.run(order=order)
        assert np.isfinite(outputs[0]).all()


@pytest.mark.parametrize("kernel", WRONG, ids=lambda k: k.name)
def test_faults_are_found(kernel: Kernel) -> None:
    with pytest.raises(MetalError) as error:
        kernel.run()
    message = str(error.value)
    assert re.search(".*".join(re.escape(part) for part in kernel.says), message, re.S), message
    if kernel.place:
        assert re.search(rf"\b{kernel.place}\b", message), message


def test_there_are_enough_of_them() -> None:
    assert len(WRONG) >= 60
    assert len({k.name for k in (*RIGHT, *WRONG)}) == len(RIGHT) + len(WRONG)
