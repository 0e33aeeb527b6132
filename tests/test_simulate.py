"""scripts.simulate: conservation at random loads, allocators, the cost model, the paper's order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_paged.scheduler import Schedule
from scripts import simulate as script
from scripts.data import Requests, load_requests
from scripts.published import KWON_LENGTHS, KWON_WASTE
from scripts.simulation.allocators import ALLOCATORS, Buddy, FirstFit
from scripts.simulation.arrivals import Arrival, at_once, from_trace, poisson, stretched
from scripts.simulation.costs import PRESETS
from scripts.simulation.managers import (
    Contiguous,
    Manager,
    Paged,
    Usage,
    make_managers,
    page_tokens,
)
from scripts.simulation.server import Server
from scripts.simulation.study import Study

A100 = PRESETS["a100-opt13b"]
NAMES = list(make_managers(A100))


@pytest.fixture(scope="module")
def requests() -> Requests:
    return load_requests("sharegpt")


class Watcher:
    """Checks a server after every step."""

    def __init__(self) -> None:
        self.steps = 0
        self.preempted = 0

    def __call__(self, server: Server, step: Schedule, usage: Usage) -> None:
        self.steps += 1
        self.preempted += len(step.preempted)
        manager, running = server.manager, server.scheduler.running
        if self.steps % 20 == 0:
            manager.pool.check(seq.block_table for seq in running)
        assert sum(usage) == manager.slots
        assert min(usage) >= 0, usage
        assert usage.real == sum(seq.num_computed for seq in running)
        if isinstance(manager, Contiguous):
            assert usage.real + usage.reserved + usage.internal <= manager.slots


# 20 random loads: seed, requests a second, share of the A100's memory.
LOADS = [
    (seed, float(rate), float(share))
    for seed, (rate, share) in enumerate(
        zip(
            np.random.default_rng(6).uniform(0.3, 12, 20),
            np.random.default_rng(7).uniform(0.15, 1, 20),
            strict=True,
        )
    )
]


@pytest.mark.parametrize(("seed", "rate", "share"), LOADS)
def test_conservation(requests: Requests, seed: int, rate: float, share: float) -> None:
    """Every request arrives and finishes once, tokens in = tokens out, memory within its limit."""
    preset = replace(A100, memory=int(A100.memory * share))
    arrivals = poisson(requests, 25, rate, seed)
    allocator = ("buddy", "first-fit")[seed % 2]
    for name, manager in make_managers(preset, allocator).items():
        watcher = Watcher()
        server = Server(manager, preset, max_batched_tokens=512, observer=watcher)
        result = server.run(arrivals)
        assert [job.number for job in result.jobs] == list(range(25))
        for job, arrival in zip(result.jobs, arrivals, strict=True):
            assert job.request is arrival
            assert job.finish is not None
            assert job.finish > arrival.time
            assert job.generated == arrival.answer
            assert job.sequence.num_computed == job.swapped == 0
        assert result.tokens_in == sum(arrival.prompt for arrival in arrivals)
        assert result.tokens_out == sum(arrival.answer for arrival in arrivals)
        assert result.steps == watcher.steps
        assert result.preemptions == watcher.preempted
        # Every token but the last of each answer is computed, some again after a preemption.
        once = result.tokens_in + result.tokens_out - 25
        recomputes = name in ("paged, recompute", "vAttention") and result.preemptions
        assert result.tokens_computed > once if recomputes else result.tokens_computed == once
        assert manager.pool.num_used == 0
        if isinstance(manager, Contiguous):
            assert manager.memory.allocate(manager.memory.largest()) == 0


def test_the_small_loads_preempt(requests: Requests) -> None:
    preset = replace(A100, memory=A100.memory // 6)
    for name in ("paged, recompute", "paged, swap", "vAttention"):
        manager = make_managers(preset)[name]
        assert Server(manager, preset).run(at_once(requests, 25)).preemptions > 0


def test_the_managers_come_in_the_order_of_the_paper(requests: Requests) -> None:
    limit = 5 * A100.step_seconds(1, 1000)
    study = Study(A100, requests, "buddy", 2 * 2**20, 250, limit, trace=False, seed=0)
    runs = {name: study.saturated(name) for name in NAMES}
    order = ["max", "pow2", "oracle", "paged, recompute"]
    real = [runs[name]["saturated"]["real"] for name in order]
    assert real == sorted(real)
    assert real[-1] >= 0.95
    assert runs["paged, recompute"]["given"] >= 0.95
    in_flight = [runs[name]["saturated_in_flight"] for name in order]
    assert in_flight == sorted(in_flight)
    assert real[2] < runs["vAttention"]["saturated"]["real"] < real[3]
    assert runs["max"]["saturated_in_flight"] == pytest.approx(7, abs=0.05)
    latency = [study.at_rate(name, 3.0)["latency"] for name in order]
    assert latency == sorted(latency, reverse=True)
    assert latency[2] > limit > latency[3]


def test_the_highest_rate_is_found_by_bisection(requests: Requests) -> None:
    study = Study(A100, requests, "buddy", 2 * 2**20, 80, 0.15, trace=False, seed=0)
    sweep = study.sweep("max", (0.25, 0.5, 4.0))
    assert 0.5 <= sweep["sustained"] < 4
    assert study.at_rate("max", sweep["sustained"])["latency"] <= 0.15
    assert study.at_rate("max", sweep["sustained"] + 3.5 / 16)["latency"] > 0.15
    assert study.sweep("max", (0.25,))["sustained"] is None
    assert study.sweep("max", (4.0,))["sustained"] == 0


def test_with_the_papers_lengths_the_papers_waste(requests: Requests) -> None:
    longer = stretched(requests, KWON_LENGTHS["prompt"], KWON_LENGTHS["answer"], A100.window)
    assert longer.prompt.mean() == pytest.approx(KWON_LENGTHS["prompt"], abs=0.2)
    assert longer.answer.mean() == pytest.approx(KWON_LENGTHS["answer"], abs=0.2)
    assert (longer.prompt + longer.answer).max() <= A100.window
    study = Study(A100, longer, "buddy", 2 * 2**20, 200, 0.2, trace=False, seed=0)
    for name, paper, points in (
        ("max", "max", 3),
        ("oracle", "oracle", 6),
        ("paged, recompute", "paged", 1.5),
    ):
        ours = 100 * study.saturated(name)["saturated"]["real"]
        assert abs(ours - KWON_WASTE[paper][0]) <= points


def test_a_request_alone_takes_what_the_cost_model_says() -> None:
    manager = make_managers(A100)["paged, recompute"]
    result = Server(manager, A100, max_batched_tokens=256).run([Arrival(5.0, 300, 3)])
    steps = [(256, 256), (44, 300), (1, 301), (1, 302)]
    seconds = sum(A100.step_seconds(*step) for step in steps)
    assert result.jobs[0].finish == pytest.approx(5 + seconds)
    assert result.latency == pytest.approx(seconds / 3)
    assert A100.step_seconds(1, 0) == pytest.approx(0.005 + 26e9 / (0.6 * 1555e9))
    assert A100.step_seconds(10**4, 0) == pytest.approx(0.005 + 26e13 / (0.6 * 312e12))
    assert A100.step_seconds(0, 0, 100) - A100.step_seconds(0, 0) == pytest.approx(81.92e6 / 32e9)


def test_swapped_tokens_are_moved_and_not_computed_again() -> None:
    # 10 blocks; two requests of 4 blocks each that grow to 6: the younger is swapped out.
    preset = replace(A100, memory=160 * A100.bytes_per_token)
    arrivals = [Arrival(0.0, 64, 32), Arrival(0.0, 64, 32)]
    runs = {}
    for name, swaps in (("paged, recompute", False), ("paged, swap", True)):
        runs[name] = Server(Paged(preset.slots, swaps), preset).run(arrivals)
        assert runs[name].preemptions == 1
    assert runs["paged, swap"].tokens_computed == 2 * (64 + 31)
    # Both have 80 tokens when the last block is gone.
    assert runs["paged, recompute"].tokens_computed == 2 * (64 + 31) + 80


def test_presets_hold_what_their_sources_say() -> None:
    assert (A100.bytes_per_token, A100.slots, page_tokens(A100)) == (800 * 1024, 15_700, 204)
    assert PRESETS["m1-max-qwen7b"].bytes_per_token == 56 * 1024
    assert PRESETS["m1-qwen1.5b"].bytes_per_token == 28 * 1024
    for preset in PRESETS.values():
        assert "Not measured on a Mac" in preset.source or preset is A100
    with pytest.raises(ValueError, match="page is 1024 bytes"):
        page_tokens(A100, 1024)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(ALLOCATORS)),
    st.integers(1, 300),
    st.lists(st.tuples(st.booleans(), st.integers(1, 80)), max_size=60),
)
def test_allocators_never_give_a_slot_twice(
    name: str, slots: int, actions: list[tuple[bool, int]]
) -> None:
    memory = ALLOCATORS[name](slots)
    pieces: dict[int, int] = {}
    for give, number in actions:
        if give:
            start = memory.allocate(number)
            if start is not None:
                taken = {s for a, n in pieces.items() for s in range(a, a + n)}
                size = 1 << (number - 1).bit_length() if name == "buddy" else number
                assert start >= 0
                assert start + size <= slots
                assert not taken & set(range(start, start + size))
                pieces[start] = size
            elif not pieces:
                assert number > memory.largest()
        elif pieces:
            start = sorted(pieces)[number % len(pieces)]
            memory.free(start)
            del pieces[start]
    for start in pieces:
        memory.free(start)
    assert memory.allocate(memory.largest()) == 0


def test_first_fit_takes_the_lowest_hole_and_joins_holes() -> None:
    memory = FirstFit(100)
    assert [memory.allocate(size) for size in (10, 20, 30, 40)] == [0, 10, 30, 60]
    assert memory.allocate(1) is None
    memory.free(10)
    memory.free(60)
    assert memory.allocate(25) == 60
    memory.free(30)
    assert memory.allocate(50) == 10


def test_buddy_rounds_up_and_joins_halves() -> None:
    memory = Buddy(15_700)
    starts = [memory.allocate(2048) for _ in range(7)]
    assert None not in starts
    assert memory.allocate(1025) is None
    assert memory.allocate(1024) == 14 * 1024
    for start in starts:
        assert start is not None
        memory.free(start)
    assert memory.allocate(8000) == 0
    assert memory.allocate(4097) is None


def test_arrivals() -> None:
    three = Requests("t", np.array([5, 6, 7]), np.array([1, 2, 3]), 0, np.array([0.0, 1.0, 4.0]))
    assert [one.time for one in from_trace(three, 3)] == [0, 1, 4]
    assert [one.time for one in from_trace(three, 3, rate=1.5)] == [0, 0.5, 2]
    slow, fast = poisson(three, 50, 1.0, seed=1), poisson(three, 50, 4.0, seed=1)
    assert [one.prompt for one in slow] == [one.prompt for one in fast]
    assert [one.time / 4 for one in slow] == pytest.approx([one.time for one in fast])
    assert 30 < slow[-1].time < 75
    with pytest.raises(ValueError, match="no arrival times"):
        from_trace(replace(three, arrival=None), 3)
    with pytest.raises(ValueError, match="rate is 0"):
        poisson(three, 3, 0)
    with pytest.raises(ValueError, match="count is 0"):
        at_once(three, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_request_larger_than_the_memory_is_refused(name: str) -> None:
    preset = replace(A100, memory=1000 * A100.bytes_per_token)
    manager: Manager = make_managers(preset)[name]
    with pytest.raises(ValueError, match=r"request 0 \(900 \+ 200 tokens\) does not fit"):
        Server(manager, preset).run([Arrival(0.0, 900, 200)])


def test_main_prints_the_tables_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--count", "12", "--rates", "1", "4", "--processes", "1", "--json", "--limit", "0.05"]
    assert script.main([*argv, "--plot", str(tmp_path / "plot")]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(printed.splitlines()[-1])
    assert set(figures["saturated"]) == set(NAMES)
    assert figures["slots"] == 15_700
    assert "20.4 / 13.3 / 57.3 / 8.9" in printed
    assert "What differs from the paper" in printed
    assert (tmp_path / "plot.png").is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--managers", "orca"], "manager is 'orca'"),
        (["--count", "0"], "count is 0"),
        (["--rates", "-1"], "rates are"),
        (["--limit", "0"], "limit is 0"),
        (["--memory", "0"], "memory is 0"),
        (["--memory", "0.1"], "memory is 131 slots, less than one block of vAttention"),
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script.main(argv)
