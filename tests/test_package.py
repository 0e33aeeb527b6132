"""What an installation is made of, and what importing it costs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_importing_is_light() -> None:
    code = """
import sys, time
start = time.perf_counter()
import mlx_paged
seconds = time.perf_counter() - start
heavy = {"mlx", "mlx_lm", "transformers", "torch", "datasets", "matplotlib"} & set(sys.modules)
heavy |= {name for name in sys.modules if name.startswith("mlx_paged.models")}
assert not heavy, heavy
assert seconds < 1, seconds
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_no_module_of_the_package_imports_an_extra() -> None:
    extras = re.compile(r"^(?:import|from) (?:torch|datasets|matplotlib)\b", re.MULTILINE)
    for folder in "mlx_paged", "models", "kernels":
        for path in (ROOT / folder).glob("*.py"):
            assert not extras.search(path.read_text()), path


def test_every_python_file_is_packaged() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {name.replace(".", "/") for name in setuptools["packages"]}
    found = {
        str(path.parent.relative_to(ROOT))
        for top in ("mlx_paged", "mlx_paged/models", "mlx_paged/kernels")
        for path in (ROOT / top).glob("*.py")
    }
    assert found == packaged
    assert not [*ROOT.glob("models/*/*.py"), *ROOT.glob("kernels/*/*.py")]
