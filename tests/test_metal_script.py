"""The benchmark runs here, and its way on a Mac is the same one with a timer."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from scripts import kernel
from tests.metal_cases import METAL, kernel_factory, require_emulator

require_emulator()


class Clock:
    """A stand-in timer: every look at it is one millisecond later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def test_timed_as_on_a_mac(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel, "BLOCK_SIZES", (4, 16))
    works = {
        "unequal": kernel.Workload([9, 33]),
        "shared": kernel.Workload([40] * 3, shared=32),
    }
    monkeypatch.setattr(kernel, "workloads", lambda *_: works)
    machine = kernel.Machine(kernel_factory(mode="fast"), Clock(), calls=2, repeats=2, gpu_cores=1)
    rows, others = kernel.benchmark(machine, rows=2, tokens=20, longest=64)
    figures = kernel.report(rows, others, "a test")
    assert len(rows) == 2 + 4 * 2
    for what, _, _, result in rows:
        assert result.seconds == pytest.approx(5e-4)
        assert result.gigabytes_per_second == pytest.approx(2 * 20 * 2 * 2 * 128 * 2 / 5e-4 / 1e9)
        assert result.error is not None
        assert result.error <= (5e-4 if what == "attention" else 0.0)
    for results in others.values():
        assert set(results) == {"paged", "MLX contiguous", "gather + MLX"}
        for result in results.values():
            assert result.seconds == pytest.approx(5e-4)
            assert result.error is not None
            assert result.error <= 2e-3  # MLX's own attention rounds more
    text = capsys.readouterr().out
    assert "GB/s" in text
    assert "500.0" in text
    assert len(json.dumps(figures)) > 1000
    kernel.plot(rows, tmp_path / "times")
    assert (tmp_path / "times.svg").read_text().count("contiguous = 1") >= 1


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if METAL:
        pytest.skip("takes longer there")
    path = tmp_path / "kernel.json"
    sizes = ["--rows", "2", "--tokens", "16", "--longest", "32"]
    assert kernel.main([*sizes, "--json", str(path), "--plot", str(tmp_path / "kernel")]) == 0
    text = capsys.readouterr().out
    assert "nothing here was measured on a Mac" in text
    assert "GB/s" not in text
    figures = json.loads(path.read_text())
    assert figures["metal"] is mx.metal.is_available()
    assert {row["block_size"] for row in figures["block_sizes"]} == {None, *kernel.BLOCK_SIZES}
    for row in figures["block_sizes"]:
        assert row["loaded"] == 1.0
        assert row["error"] <= 5e-4
    shared = next(w for name, w in figures["workloads"].items() if "shared" in name)
    assert shared["paged"]["loaded"] == 1.0


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="--tokens must be at least 1"):
        kernel.main(["--tokens", "0"])
