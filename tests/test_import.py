"""What `import mlx_paged` costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mlx_paged

ROOT = Path(__file__).parents[1]
CODE = """
import sys, time
begin = time.perf_counter()
import mlx_paged
print(time.perf_counter() - begin)
heavy = ("torch", "transformers", "mlx_lm", "mlx_paged.models", "mlx.nn", "datasets", "matplotlib")
print([name for name in sys.modules if name.startswith(heavy)])
"""


def test_import_is_quick_and_loads_no_model_code() -> None:
    seconds = []
    for _ in range(3):  # the quickest: the machine may be busy
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=ROOT
        )
        took, heavy = done.stdout.splitlines()
        assert heavy == "[]"
        seconds.append(float(took))
    assert min(seconds) < 1


def test_the_command_lines_help_loads_no_mlx() -> None:
    code = (
        "import sys; from mlx_paged.cli import make_parser; make_parser().format_help();"
        "print([name for name in sys.modules if name.startswith(('mlx.', 'transformers'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", mlx_paged.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(mlx_paged, name).__module__.startswith("mlx_paged.")
    assert name in dir(mlx_paged)
    assert mlx_paged._HOMES.keys() == set(mlx_paged.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        mlx_paged.generat  # noqa: B018
