"""Traces: what they say against what the engine says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlx_paged import Engine, SamplingParams, Trace
from tests.models import config, random_model

MODEL, _ = random_model(config(vocab=64, layers=1, heads=2, kv_heads=1, head_dim=8))


def traced(path: Path, requests: list[tuple[list[int], SamplingParams]], **options: Any) -> Any:
    """Run requests, and return the trace's header, its steps and the engine."""
    with Trace(path) as trace:
        engine = Engine(MODEL, observer=trace, **options)
        for prompt, params in requests:
            engine.add(prompt, params)
        while engine.has_work:
            engine.step()
    header, *steps = map(json.loads, path.read_text().splitlines())
    return header, steps, engine


def test_four_samples_of_one_prompt(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=64, n=4, temperature=1.0, seed=0, ignore_eos=True)
    header, steps, _ = traced(
        tmp_path / "t", [(list(range(44)), params)], block_size=16, num_blocks=64
    )
    assert header == {"block_size": 16, "num_blocks": 64}
    assert [step["step"] for step in steps] == list(range(64))
    assert steps[0]["tables"] == {f"0.{i}": [0, 1, 2] for i in range(4)}
    assert list(steps[-2]["tables"].values()) == [
        [0, 1, 3, 6, 10, 14, 18],
        [0, 1, 4, 7, 11, 15, 19],
        [0, 1, 5, 8, 12, 16, 20],
        [0, 1, 2, 9, 13, 17, 21],
    ]
    assert steps[-2]["computed"] == {f"0.{i}": 106 for i in range(4)}
    assert [copy for step in steps for copy in step["copies"]] == [[2, 3], [2, 4], [2, 5]]
    assert steps[-1]["tables"] == {}
    assert steps[-1]["finished"] == ["0.0", "0.1", "0.2", "0.3"]


def test_a_trace_of_a_crowded_pool_is_consistent(tmp_path: Path) -> None:
    requests = [
        ([i, *range(10 + i)], SamplingParams(max_tokens=20, ignore_eos=True)) for i in range(8)
    ]
    header, steps, engine = traced(tmp_path / "t", requests, block_size=4, num_blocks=12)
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.evictions > 0
    totals = Counter(dict.fromkeys(("evictions", "preempted", "copies", "finished"), 0))
    for step in steps:
        users = Counter(block for table in step["tables"].values() for block in table)
        assert not set(users) & set(step["cached"])
        assert max([*users, *step["cached"]], default=0) < header["num_blocks"]
        assert step["tables"].keys() == step["computed"].keys()
        assert not set(step["finished"]) & set(step["tables"])
        for name, table in step["tables"].items():
            assert len(table) * header["block_size"] >= step["computed"][name]
        totals.update({key: len(step[key]) for key in totals})
    assert totals["evictions"] == stats.evictions
    assert totals["preempted"] == stats.preemptions
    assert totals["copies"] == stats.block_copies
    assert totals["finished"] == 8


def test_a_trace_belongs_to_one_engine(tmp_path: Path) -> None:
    with Trace(tmp_path / "t") as trace:
        for number in range(2):
            engine = Engine(MODEL, observer=trace, num_blocks=8)
            engine.add([1, 2], SamplingParams(max_tokens=1))
            if number == 0:
                engine.step()
            else:
                with pytest.raises(ValueError, match="traces another engine"):
                    engine.step()
                engine.check()
