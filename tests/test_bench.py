"""scripts/bench.py on small models: both sides' tokens, figures, tables, comparison."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scripts import bench
from scripts.benchmark import (
    agreement,
    capacity,
    comparison,
    machine,
    processes,
    profiling,
    statistics,
    tables,
)
from scripts.benchmark.contender import Contender
from scripts.benchmark.contiguous import (
    Batch,
    CopiedCaches,
    LimitedBatch,
    PromptCache,
    Stream,
    TunedBatch,
)
from scripts.benchmark.measurement import RIVALS, Bench, Options, Runs, context
from scripts.benchmark.models import Models, ModelSpec, load_models
from scripts.benchmark.ours import Ours, pool_blocks
from scripts.benchmark.recording import OverBudgetError, Recorder, TooSlowError
from scripts.benchmark.workloads import (
    NAMES,
    PRESETS,
    Context,
    Prompts,
    Request,
    Workload,
    chosen_sizes,
)

SPEC = ModelSpec(random="1x32", heads=2, kv_heads=1, vocab=128, dtype="float32", window=512)
SMOKE = {sizes.name: sizes for sizes in PRESETS["smoke"]}


@pytest.fixture(scope="module")
def models() -> Models:
    return load_models(SPEC)


@pytest.fixture(scope="module")
def made(models: Models) -> Context:
    return context(models, "sharegpt")


def run(side: Contender, workload: Workload, **recording: Any) -> Recorder:
    recorder = Recorder(workload.streams, **recording)
    settings = side.candidates(workload)[0]
    side.prepare(workload, settings)
    side.run(workload, settings, recorder)
    return recorder


# Workloads


def test_every_workload_has_the_sizes_that_it_was_given(made: Context) -> None:
    changes = ["single.new=3", "skewed.long=70", "chat.system=9", "mixed.memory=64KiB"]
    sizes = chosen_sizes("smoke", [], changes)
    assert [one.name for one in sizes] == list(NAMES)
    single, _, skewed, mixed, samples, chat, _ = (one.build(made, 0) for one in sizes)
    assert single.requests[0].new == 3
    assert skewed.lengths == [70, 8, 8, 8]
    assert mixed.memory == 64 * 1024
    assert (samples.streams, len(samples.requests)) == (3, 1)
    assert chat.lengths == [13, 13, 21, 21]  # 9 + 4, then an answer of 4 and a turn of 4
    assert chat.window == 25
    assert chat.distinct_tokens == 9 + 4 * 8
    assert Workload("chat", ()).distinct_tokens == 0
    assert Workload("chat", (Request([], 3),)).distinct_tokens == 3


def test_prompts_differ_between_repetitions_but_not_between_sides(made: Context) -> None:
    sizes = SMOKE["uniform"]
    assert sizes.build(made, 1) == sizes.build(made, 1)
    assert sizes.build(made, 1) != sizes.build(made, 2)


def test_text_prompts_have_the_length_that_was_asked_for() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    prompts = Prompts(128, Letters())
    for length in (1, 100, Prompts.CORPUS + 10):
        assert len(prompts.make(random.Random(length), length)) == length


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("single.news=3", "single has no size 'news'; it has prompt, new"),
        ("solo.new=3", "size is 'solo.new=3'"),
        ("single.new", "size is 'single.new'"),
        ("single.new=x", "single.new is 'x'; it must be a number"),
        ("single.new=0", "single.new is 0; it must be more than 0"),
    ],
)
def test_a_wrong_size_is_refused(change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen_sizes("full", [], [change])


@pytest.mark.parametrize("shape", ["4", "x", "0x64", "4x65"])
def test_a_wrong_shape_is_refused(shape: str) -> None:
    with pytest.raises(ValueError, match="must"):
        ModelSpec(random=shape, heads=2).config()


# Both sides


@pytest.mark.parametrize("name", [name for name in NAMES if name != "capacity"])
def test_both_sides_give_the_same_tokens(name: str, models: Models, made: Context) -> None:
    workload = SMOKE[name].build(made, 0)
    ours = run(Ours(models, {}), workload, watch=True)
    assert [len(tokens) for tokens in ours.tokens] == [
        request.new for request in workload.requests for _ in range(workload.samples)
    ]
    assert 0 < ours.live <= ours.held <= ours.reserved
    for kind in RIVALS[name]:
        theirs = run(kind(models, {}), workload, watch=True)
        assert theirs.tokens == ours.tokens
        assert 0 < theirs.live <= theirs.held
        figures = theirs.figures(workload)
        assert figures["seconds"] >= max(figures["first_token"])
        assert figures["generation_tps"] == sum(map(len, ours.tokens)) / figures["seconds"]


def test_the_pool_is_no_larger_than_needed(models: Models, made: Context) -> None:
    for name in ("single", "uniform", "skewed", "samples"):
        workload = SMOKE[name].build(made, 0)
        side = Ours(models, {"block_size": 4})
        recorder = run(side, workload, watch=True)
        engine = side._engine
        assert engine is not None
        assert engine.stats.preemptions == 0
        assert recorder.held >= (pool_blocks(workload, 4) - 4) * engine.block_bytes * 0.9


def test_the_prompt_cache_is_used(models: Models, made: Context) -> None:
    """All but the new turn comes from it, so that the comparison is with what it can do."""
    workload = SMOKE["chat"].build(made, 0)
    seen = []

    class Spy(PromptCache):
        def _stream(self, index: int, prompt: list[int], *rest: Any) -> None:
            seen.append(len(prompt))
            super()._stream(index, prompt, *rest)

    run(Spy(models, {}), workload)
    assert seen == [44, 4, 4, 4]


def test_copied_caches_prefill_once(models: Models, made: Context) -> None:
    workload = SMOKE["samples"].build(made, 0)
    copied = run(CopiedCaches(models, {}), workload, watch=True)
    copies = run(Batch(models, {}), workload, watch=True)
    # The prompt once, and five tokens of each: rows are gone when their sixth is there.
    assert copied.live == copies.live == (40 + 3 * 5) * models.bytes_per_token


def test_tuning_keeps_the_fastest_that_fits(models: Models, made: Context) -> None:
    class Slow(LimitedBatch):
        def run(self, workload: Workload, settings: Any, recorder: Recorder) -> None:
            size = settings["completion_batch_size"]
            recorder._origin -= {6: 1.0, 4: 50.0, 3: 20.0, 2: 30.0, 1: 40.0}[size]
            recorder.tokens, recorder.times = [[1]], [[0.0]]
            recorder.add([(0, 1)])
            recorder.hold(100 if size > 5 else 10, 1)

        def budget(self, workload: Workload) -> int | None:
            return 50

    runs = Runs(Slow(models, {}))
    Bench(Options(SPEC), models)._tune(runs, SMOKE["mixed"].build(made, 0), {})
    assert runs.settings is not None
    assert runs.settings["completion_batch_size"] == 3
    stops = {one["settings"]["completion_batch_size"]: one.get("stopped") for one in runs.tried}
    assert stops == {6: "memory", 4: None, 3: None, 2: "slow", 1: "slow"}


def test_tuning_does_not_try_again_what_is_known(models: Models, made: Context) -> None:
    class Never(TunedBatch):
        pass

    workload = SMOKE["uniform"].build(made, 0)
    runs = Runs(Never(models, {}))
    candidates = runs.side.candidates(workload)
    known = {(Never.run, tuple(one.items())): 9.0 - i for i, one in enumerate(candidates)}
    Bench(Options(SPEC), models)._tune(runs, workload, known)
    assert runs.settings == candidates[-1]
    assert [one["seconds"] for one in runs.tried] == [9.0 - i for i in range(len(candidates))]


def test_candidates_hold_the_defaults_and_no_foolish_padding() -> None:
    requests = tuple(Request([1] * length, 4) for length in (4096, *[64] * 31))
    found = TunedBatch.candidates(None, Workload("skewed", requests))  # type: ignore[arg-type]
    sizes = [tuple(one.values()) for one in found]
    assert sizes[0] == (32, 32, 64)
    assert (32, 8, 2048) in sizes
    assert (32, 32, 2048) not in sizes
    assert len(set(sizes)) == len(sizes)


def test_a_recorder_stops_a_run() -> None:
    with pytest.raises(TooSlowError):
        Recorder(1, deadline=0.0).add([(0, 1)])
    recorder = Recorder(1, budget=10)
    recorder.hold(10, 5)
    with pytest.raises(OverBudgetError):
        recorder.hold(11, 5)


# Capacity


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 39, 40])
@pytest.mark.parametrize("guess", [0, 1, 7, 300])
def test_search_finds_the_limit(limit: int, guess: int) -> None:
    tried: list[int] = []

    def fits(count: int) -> bool:
        tried.append(count)
        return count <= limit

    found = capacity.search(fits, guess, 40)
    assert limit - max(1, 0.03 * limit) <= found <= limit
    assert (found in tried) == (found > 0)
    assert len(tried) == len(set(tried))


def test_capacity_counts_all_memory_unless_told_otherwise(made: Context) -> None:
    (full,) = chosen_sizes("full", ["capacity"], [])
    assert full.build(made, 0).whole
    (only,) = chosen_sizes("full", ["capacity"], ["capacity.whole=0"])
    assert not only.build(made, 0).whole


def test_capacity_is_what_runs(models: Models) -> None:
    requests = tuple(Request([7, n], 30) for n in range(20))  # two blocks each, at the end
    workload = Workload("capacity", requests, memory=21 * 16 * models.bytes_per_token)
    ours = capacity.measure(capacity.Crowd(models, {}), workload)
    assert ours["requests"] == 10
    turns = capacity.measure(capacity.InTurns(models, {}), workload)
    assert turns["requests"] == 1  # 256 tokens each
    assert turns["tokens"] == ours["tokens"][:1]
    assert capacity.measure(capacity.CrowdedBatch(models, {}), workload)["requests"] == 1


def test_capacity_of_all_memory(models: Models) -> None:
    """Working memory counts, too: fewer fit, and all of it stays within the bytes."""
    requests = tuple(Request([7, n], 30) for n in range(40))
    limit = 40 * 16 * models.bytes_per_token
    workload = Workload("capacity", requests, memory=limit, whole=True)
    mx.clear_cache()
    base = mx.get_active_memory()
    ours = capacity.measure(capacity.Crowd(models, {}), workload)
    assert 0 < ours["requests"] < 20
    assert ours["peak_bytes"] - base <= limit + 4096  # this test's own arrays
    theirs = capacity.measure(capacity.CrowdedBatch(models, {}), workload)
    assert theirs["requests"] < ours["requests"]
    assert theirs["tokens"] == ours["tokens"][: theirs["requests"]]


# Figures


def test_agreement_tells_a_tie_from_a_mistake(models: Models) -> None:
    workload = Workload("single", (Request([1, 2, 3], 4), Request([4, 5], 4)))
    right = run(Stream(models, {}), workload).tokens
    assert agreement.compare(workload, right, right, models.theirs)["different"] == 0
    wrong = [right[0], [*right[1][:2], (right[1][2] + 1) % 128, 0]]
    found = agreement.compare(workload, wrong, right, models.theirs)
    assert (found["answers"], found["different"], found["first"]) == (2, 1, 2)
    assert found["gap"] > 1e-4


def test_a_ratio_and_its_interval() -> None:
    found = statistics.ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found["median"], found["low"], found["high"]) == (2.0, 2.0, 2.0)
    assert statistics.verdict(found) == "ours"
    wide = statistics.ratio([1.0, 1.0, 3.0, 1.0, 0.5], [1.0, 2.0, 1.0, 1.0, 1.0])
    assert wide["low"] < 1 < wide["high"]
    assert statistics.verdict(wide) == "even"
    assert statistics.verdict(statistics.ratio([1.0], [2.0])) == "mlx-lm"


def test_memory_comes_from_a_process_of_its_own() -> None:
    found = processes.measure(Options(SPEC), SMOKE["samples"], "Ours", {})
    assert found["peak_bytes"] > found["weight_bytes"] + found["kv_reserved_bytes"]
    assert found["rss_bytes"] > found["peak_bytes"]
    assert 0 < found["kv_live_bytes"] <= found["kv_held_bytes"] <= found["kv_reserved_bytes"]


def test_a_process_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    found = processes.measure(Options(SPEC), SMOKE["single"], "Ours", {})
    assert found == {"error": "exit code 1: no message"}


def test_the_blas_is_named() -> None:
    described = machine.describe()
    assert described["blas"]
    assert (described["blas_kernels"] is not None) == ("openblas" in described["blas"])
    good = {**described, "blas": "libopenblas.so.0", "blas_kernels": "Haswell", "cores": 2}
    assert machine.warnings(good, 0.1) == []
    assert "busy" in machine.warnings(good, 9.0)[0]
    assert "reference BLAS" in machine.warnings({**good, "blas": "reference BLAS"}, 0.1)[0]
    old = machine.warnings({**good, "blas_kernels": "Prescott"}, 0.1)
    assert "OPENBLAS_CORETYPE=" in old[0]


# The script


SMALL = ["--random", "1x32", "--heads", "2", "--vocab", "128", "--preset", "smoke"]


def test_measure_and_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        processes,
        "measure",
        lambda options, sizes, side, settings: {
            "peak_bytes": 2**20 if side == "Ours" else 2**22,
            "rss_bytes": 2**23,
            "kv_reserved_bytes": 3,
            "kv_held_bytes": 2,
            "kv_live_bytes": 1,
        },
    )
    path = tmp_path / "a.json"
    assert bench.main([*SMALL, "single", "mixed", "--repeat", "2", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "ours is ahead" in out
    figures = json.loads(path.read_text())
    assert (figures["benchmark"], figures["schema"], figures["interrupted"]) == (
        "mlx_paged",
        1,
        False,
    )
    assert {"blas", "cores", "processor", "versions"} <= set(figures["machine"])
    assert figures["model"]["dtype"] == "float32"
    mixed = figures["workloads"]["mixed"]
    assert set(mixed["sides"]) == {"ours", "mlx-lm, defaults", "mlx-lm, tuned"}
    assert "mlx-lm, limited" in mixed["left_out"]  # its caches grow by 256 tokens
    for side in mixed["sides"].values():
        assert len(side["generation_tps"]["values"]) == 2
        assert {"p50", "p90", "p99"} == set(side["per_token"]) == set(side["first_token"])
    for found in mixed["against"].values():
        assert found["agreement"]["different"] == 0
        assert found["agreement"]["answers"] == 2 * 6
        assert found["peak_ratio"] == 0.25
        assert found["ratio"]["low"] <= found["ratio"]["median"] <= found["ratio"]["high"]

    faster = json.loads(path.read_text())
    for found in faster["workloads"]["mixed"]["against"].values():
        for key in ("median", "low", "high"):
            found["ratio"][key] *= 100
    faster["machine"]["blas"] = "other"
    del faster["workloads"]["single"]
    (tmp_path / "b.json").write_text(json.dumps(faster))
    assert bench.main(["--compare", str(path), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "machine blas" in out
    assert "single is in A only" in out
    assert out.count("better") == 2


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("{", "[]", "{}", '{"benchmark": "mlx_paged", "schema": 0}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"a\.json"):
            comparison.read(path)


def test_ctrl_c_keeps_what_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    serve = Ours.run

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:  # a warm-up and two repetitions are done
            raise KeyboardInterrupt
        serve(*args)

    monkeypatch.setattr(Ours, "run", interrupted)
    path = tmp_path / "a.json"
    arguments = [*SMALL, "single", "uniform", "--repeat", "5", "--json", str(path)]
    assert bench.main(arguments) == 130
    figures = json.loads(path.read_text())
    assert figures["interrupted"]
    single = figures["workloads"]["single"]
    assert len(single["against"]["mlx-lm"]["ratio"]["values"]) == 2
    assert "single" in capsys.readouterr().out


def test_a_model_without_the_window_is_left_out(models: Models) -> None:
    measured = Bench(Options(SPEC), models)
    measured.run(PRESETS["full"][2])
    result = measured.results["skewed"]
    assert result["skipped"] == "needs a window of 4,160, the model has 512"
    assert "skewed: left out" in tables.notes(measured.results)[0]
    assert "skewed" not in tables.main_table(measured.results, 1)


def test_profile(models: Models, made: Context) -> None:
    found = profiling.profile(models, made, profiling.Case(2, 20), 5)
    spent = found["microseconds"]
    assert all(spent[phase] > 0 for phase in (*profiling.PHASES, "mlx"))
    assert 0 < found["share"] < 1
    # Nothing stays wrapped, and what the phases do not add up to is small.
    assert profiling.mx.eval.__name__ == "eval"
    engine = profiling.decoding(models, made, profiling.Case(1, 20), 40)
    for _ in range(profiling.WARM_UP):  # until the graph is compiled
        engine.step()
    measured = profiling.steps(engine, 5)
    assert sum(one["replay"] > 0 for one in measured) > 2  # not where a block begins
    for one in measured:
        parts = sum(value for phase, value in one.items() if phase not in ("total", "hidden"))
        assert parts == pytest.approx(one["total"], rel=0.2)


def test_shares_of_a_profile(
    models: Models, made: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = dict.fromkeys(profiling.PHASES, 1.0) | {
        "replay": 4.0,
        "mlx": 10.0,
        "hidden": 5.0,
        "total": 20.0,
    }
    monkeypatch.setattr(profiling, "steps", lambda engine, count: [one])
    found = profiling.profile(models, made, profiling.Case(1, 20), 1)
    assert found["share"] == pytest.approx(6 / 20)  # neither computing nor replaying
    assert found["share_not_hidden"] == pytest.approx(5 / 20)


def test_profile_and_scaling_as_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from scripts.benchmark import scaling

    monkeypatch.setattr(scaling, "POOLS", (2**20, 2**22))
    monkeypatch.setattr(scaling, "ROW_CONTEXT", 16)
    monkeypatch.setattr(scaling, "POOL_CASE", profiling.Case(2, 16))
    path = tmp_path / "s.json"
    arguments = [*SMALL, "--steps", "3", "--json", str(path), "--scaling"]
    assert bench.main([*arguments, "--plot", str(tmp_path / "s")]) == 0
    assert "the largest pool over the smallest" in capsys.readouterr().out
    panels = json.loads(path.read_text())["scaling"]
    assert [point["size"] for point in panels["context"]["points"]] == [64, 128]
    assert all({"ours", "mlx-lm"} < set(point) for point in panels["rows"]["points"])
    assert (tmp_path / "s.png").exists()

    with pytest.raises(ValueError, match="memory-limit is not for the benchmark"):
        bench.main([*SMALL, "--memory-limit", "1MiB"])
    with pytest.raises(ValueError, match="--repeat is 0"):
        bench.main([*SMALL, "--repeat", "0"])
