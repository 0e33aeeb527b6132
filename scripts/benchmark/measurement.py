"""One workload: settings tried, repetitions in turn, memory in processes of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from scripts.benchmark import agreement, capacity, processes, statistics
from scripts.benchmark.contender import Contender, Settings
from scripts.benchmark.contiguous import (
    Batch,
    CopiedCaches,
    LimitedBatch,
    PromptCache,
    Stream,
    TunedBatch,
)
from scripts.benchmark.models import Models, ModelSpec
from scripts.benchmark.ours import Ours
from scripts.benchmark.recording import OverBudgetError, Recorder, TooSlowError
from scripts.benchmark.workloads import Context, Prompts, Sizes, Workload

# Who meets ours, by workload.
RIVALS: dict[str, tuple[type[Contender], ...]] = {
    "single": (Stream,),
    "uniform": (Batch, TunedBatch),
    "skewed": (Batch, TunedBatch),
    "mixed": (Batch, TunedBatch, LimitedBatch),
    "samples": (Batch, TunedBatch, CopiedCaches),
    "chat": (PromptCache,),
}
CROWDS: tuple[type[capacity.CrowdedBatch] | type[capacity.InTurns], ...] = (
    capacity.CrowdedBatch,
    capacity.InTurns,
)
WARM_UP = 1000  # added to the seed of runs that are not counted

Told = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        model: which.
        repeat: repetitions of each side.
        tune: whether mlx-lm's best settings are looked for, too.
        memory: whether every side also runs in a process of its own.
        engine: arguments of `Engine`.
        data: request lengths.
        seed: of prompts.
    """

    model: ModelSpec
    repeat: int = 5
    tune: bool = True
    memory: bool = True
    engine: Settings = field(default_factory=dict)
    data: str = "sharegpt"
    seed: int = 0


class Bench:
    """Measures workloads on one model.

    Attributes:
        results: by workload, what is measured so far; whole after every repetition.
    """

    def __init__(self, options: Options, models: Models, told: Told = lambda _: None) -> None:
        self.options = options
        self.models = models
        self.told = told
        self.context = context(models, options.data)
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, sizes: Sizes) -> None:
        """Measure one workload into `results`."""
        workload = sizes.build(self.context, self.options.seed + WARM_UP)
        window = self.models.ours.config.max_position_embeddings
        result: dict[str, Any] = {"about": sizes.about, "sizes": vars(sizes)}
        self.results[sizes.name] = result
        if workload.window > window:
            result["skipped"] = f"needs a window of {workload.window:,}, the model has {window:,}"
        elif sizes.name == "capacity":
            self._capacity(sizes, result)
        else:
            self._speed(sizes, result)

    # Speed

    def _speed(self, sizes: Sizes, result: dict[str, Any]) -> None:
        ours = Ours(self.models, self.options.engine)
        kinds = [kind for kind in RIVALS[sizes.name] if self.options.tune or not kind.tuned]
        rivals = [kind(self.models, {}) for kind in kinds]
        sides: list[Contender] = [ours, *rivals]
        runs = {side.name: Runs(side) for side in sides}
        try:
            warm = sizes.build(self.context, self.options.seed + WARM_UP)
            known: dict[Any, float] = {}
            for side in sides:
                self._tune(runs[side.name], warm, known)
            usable = [side for side in sides if runs[side.name].settings is not None]
            for repetition in range(self.options.repeat):
                workload = sizes.build(self.context, self.options.seed + repetition)
                # Whoever began comes last next time, so that neither has the quieter half.
                turn = usable if repetition % 2 == 0 else usable[::-1]
                done = {side.name: self._time(runs[side.name], workload) for side in turn}
                self._compare(runs, done, workload)
                result.update(summarise(sizes.name, runs))
        finally:
            ours.release()
        if self.options.memory:
            for side in usable:
                self._memory(runs[side.name], sizes)
                result.update(summarise(sizes.name, runs))

    def _tune(self, runs: Runs, workload: Workload, known: dict[Any, float]) -> None:
        """Warm up, and find the fastest settings.

        Args:
            known: seconds of what other sides have tried, by how they run and their settings.
        """
        side = runs.side
        budget = side.budget(workload)
        for settings in side.candidates(workload):
            key = (type(side).run, tuple(settings.items()))
            tried: dict[str, Any] = {"settings": dict(settings), "seconds": None}
            runs.tried.append(tried)
            seconds = known.get(key) if budget is None else None
            if seconds is None:
                self.told(f"{workload.name} {side.name}: trying settings")
                recorder = Recorder(workload.streams, deadline=runs.fastest, budget=budget)
                side.prepare(workload, settings)
                _settle()
                try:
                    side.run(workload, settings, recorder)
                except (TooSlowError, OverBudgetError) as over:
                    tried["stopped"] = "slow" if isinstance(over, TooSlowError) else "memory"
                    continue
                seconds = known[key] = recorder.seconds
            tried["seconds"] = seconds
            if runs.fastest is None or seconds < runs.fastest:
                runs.fastest, runs.settings = seconds, settings

    def _time(self, runs: Runs, workload: Workload) -> Recorder:
        side = runs.side
        self.told(f"{workload.name} {side.name}")
        recorder = Recorder(workload.streams)
        _settle()
        assert runs.settings is not None
        side.run(workload, runs.settings, recorder)
        return recorder

    def _compare(
        self, runs: Mapping[str, Runs], done: Mapping[str, Recorder], workload: Workload
    ) -> None:
        """Count a whole repetition, and compare its tokens."""
        ours = done[Ours.name]
        for name, recorder in done.items():
            runs[name].figures.append(recorder.figures(workload))
            if name != Ours.name:
                found = agreement.compare(
                    workload, ours.tokens, recorder.tokens, self.models.theirs
                )
                runs[name].agreement.append(found)

    def _memory(self, runs: Runs, sizes: Sizes) -> None:
        self.told(f"{sizes.name} {runs.side.name}: memory, in a process of its own")
        runs.memory = processes.measure(
            self.options, sizes, type(runs.side).__name__, dict(runs.settings or {})
        )

    # Capacity

    def _capacity(self, sizes: Sizes, result: dict[str, Any]) -> None:
        workload = sizes.build(self.context, self.options.seed)
        result.update({"memory_bytes": workload.memory, "sides": {}, "against": {}})
        ours = capacity.measure(
            capacity.Crowd(self.models, self.options.engine), workload, self.told
        )
        our_tokens = ours.pop("tokens")
        result["sides"][Ours.name] = {"about": Ours.about, **ours}
        for kind in CROWDS:
            theirs = capacity.measure(kind(self.models, {}), workload, self.told)
            their_tokens = theirs.pop("tokens")
            count = min(len(our_tokens), len(their_tokens))
            part = Workload(workload.name, workload.requests[:count])
            result["sides"][kind.name] = {"about": kind.about, **theirs}
            value = ours["requests"] / max(1, theirs["requests"])
            ratio = {"median": value, "low": value, "high": value, "values": [value]}
            result["against"][kind.name] = {
                "measure": "requests at once",
                "ours": float(ours["requests"]),
                "theirs": float(theirs["requests"]),
                "ratio": ratio,
                "ahead": statistics.verdict(ratio),
                "agreement": agreement.compare(
                    part, our_tokens[:count], their_tokens[:count], self.models.theirs
                ),
                "peak_ratio": None,
            }


@dataclass
class Runs:
    """All that is known of one side."""

    side: Contender
    settings: Settings | None = None
    fastest: float | None = None  # seconds, of the settings tried
    tried: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    agreement: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] | None = None

    def summary(self) -> dict[str, Any]:
        """Figures of all repetitions."""
        found: dict[str, Any] = {
            "about": self.side.about,
            "settings": dict(self.settings or {}),
            "tried": self.tried,
            "memory": self.memory,
        }
        for key in ("seconds", "generation_tps", "prompt_tps"):
            found[key] = statistics.summary([one[key] for one in self.figures])
        for key in ("first_token", "per_token"):
            found[key] = statistics.percentiles([t for one in self.figures for t in one[key]])
        return found


def summarise(name: str, runs: Mapping[str, Runs]) -> dict[str, Any]:
    """Every side's figures, and ours against each other one's."""
    measured = {key: one for key, one in runs.items() if one.figures}
    against = {}
    ours = runs[Ours.name]
    for key, theirs in measured.items():
        if key != Ours.name:
            against[key] = {
                **_ratio(name, ours, theirs),
                "agreement": agreement.merge(theirs.agreement),
                "peak_ratio": _peak_ratio(ours.memory, theirs.memory),
            }
    left_out = {
        key: "no settings keep it within the limit"
        for key, one in runs.items()
        if one.settings is None
    }
    return {
        "sides": {key: one.summary() for key, one in measured.items()},
        "against": against,
        "left_out": left_out,
    }


def context(models: Models, data: str) -> Context:
    """What workloads are built with."""
    prompts = Prompts(models.ours.config.vocab_size, models.tokenizer)
    return Context(prompts, models.bytes_per_token, data)


def _ratio(name: str, ours: Runs, theirs: Runs) -> dict[str, Any]:
    if name == "chat":
        pair = [
            [statistics.percentiles(one["first_token"])["p50"] for one in side.figures]
            for side in (ours, theirs)
        ]
        ratio = statistics.ratio(pair[1], pair[0])
        measure = "ms to first token"
        pair = [[1000 * value for value in side] for side in pair]
    else:
        pair = [[one["generation_tps"] for one in side.figures] for side in (ours, theirs)]
        ratio = statistics.ratio(pair[0], pair[1])
        measure = "tokens/s"
    values = [statistics.summary(side)["median"] for side in pair]
    return {
        "measure": measure,
        "ours": values[0],
        "theirs": values[1],
        "ratio": ratio,
        "ahead": statistics.verdict(ratio),
    }


def _peak_ratio(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> float | None:
    if not ours or not theirs or "error" in ours or "error" in theirs:
        return None
    return float(ours["peak_bytes"] / theirs["peak_bytes"])


def _settle() -> None:
    """Nothing of the last run is left to be done or to be reused."""
    mx.synchronize()
    gc.collect()
    mx.clear_cache()
