"""scripts.blocksize against exact sums and the published table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import blocksize as script
from scripts.blocksize import SIZES, block_size
from scripts.data import load_requests
from scripts.published import BLOCK_SIZE

SHAREGPT_RESERVED = {
    1: 351033923,
    4: 352522644,
    8: 354507792,
    16: 358475632,
    32: 366393152,
    64: 382311616,
    128: 414817024,
    256: 484134400,
}


def test_the_committed_sample_exactly() -> None:
    requests = load_requests("sharegpt")
    for size, reserved in SHAREGPT_RESERVED.items():
        assert block_size(requests, size)["reserved"] == reserved
    assert block_size(requests, 16)["blocks_per_request"] == 26.712
    assert block_size(requests, 256)["real_fraction"] == 0.725075


@pytest.mark.parametrize(
    ("name", "points", "share"), [("sharegpt", 0.7, 0.02), ("alpaca", 0.5, 0.02)]
)
def test_the_committed_samples_lie_near_the_published_table(
    name: str, points: float, share: float
) -> None:
    requests = load_requests(name)
    for size in SIZES:
        real, blocks = BLOCK_SIZE[name][size]
        ours = block_size(requests, size)
        assert abs(100 * ours["real_fraction"] - real) <= points
        assert abs(ours["blocks_per_request"] - blocks) <= share * blocks + 0.05


def test_reused_of_85() -> None:
    requests = load_requests("alpaca", requests=1)
    reused = [block_size(requests, size)["shared_tokens_reused"] for size in SIZES]
    assert reused == [85, 84, 80, 80, 64, 64, 0, 0]


def test_sizes_are_checked() -> None:
    requests = load_requests("alpaca", requests=1)
    with pytest.raises(ValueError, match="size is 0"):
        block_size(requests, 0)
    with pytest.raises(ValueError, match="shared is -1"):
        block_size(requests, 16, shared=-1)


def test_main_prints_the_table_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--data", "alpaca", "--sizes", "8", "16", "--json", "--plot", str(tmp_path / "plot")]
    assert script.main(argv) == 0
    rows = capsys.readouterr().out.splitlines()
    assert json.loads(rows[-1])["alpaca"]["16"]["reserved"] == 23242224
    assert rows[5].split() == ["16", "90.5", "90.4", "5.2", "5.2", "80", "94", "%"]
    assert (tmp_path / "plot.svg").is_file()
