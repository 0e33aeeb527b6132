"""What the paper measures of a server: waste, requests in flight, latency by rate, highest rate."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from scripts.data import Requests
from scripts.report import progress
from scripts.simulation.arrivals import Arrival, at_once, from_trace, poisson
from scripts.simulation.costs import Preset
from scripts.simulation.managers import make_managers
from scripts.simulation.server import Result, Server

BISECTIONS = 4
HOPELESS = 10  # times the limit: higher rates are not tried


@dataclass(frozen=True)
class Study:
    """One machine and one set of requests.

    Attributes:
        count: requests in each run.
        limit: seconds a token of latency that a sustained rate may reach.
        trace: whether requests arrive at the data's own times, scaled to the rate.
    """

    preset: Preset
    requests: Requests
    allocator: str
    page_bytes: int
    count: int
    limit: float
    trace: bool
    seed: int

    def run(self, manager: str, arrivals: list[Arrival]) -> Result:
        """One run of one manager."""
        made = make_managers(self.preset, self.allocator, self.page_bytes)[manager]
        return Server(made, self.preset).run(arrivals)

    def saturated(self, manager: str) -> dict[str, Any]:
        """All requests at once: how memory is used while requests wait for it."""
        return summary(self.run(manager, at_once(self.requests, self.count, self.seed)))

    def at_rate(self, manager: str, rate: float) -> dict[str, Any]:
        """Requests arriving at a rate."""
        if self.trace:
            arrivals = from_trace(self.requests, self.count, rate)
        else:
            arrivals = poisson(self.requests, self.count, rate, self.seed)
        return summary(self.run(manager, arrivals))

    def sweep(self, manager: str, rates: tuple[float, ...]) -> dict[str, Any]:
        """Latency at each of the rates (ascending), and the highest rate within the limit.

        The latter is found by bisection between the rates; 0 if even the lowest is too high, None
        if the highest is not.
        """
        runs: dict[float, dict[str, Any]] = {}
        for rate in rates:
            runs[rate] = self.at_rate(manager, rate)
            if runs[rate]["latency"] > HOPELESS * self.limit:
                break
        within = [rate for rate, run in runs.items() if run["latency"] <= self.limit]
        above = [rate for rate, run in runs.items() if run["latency"] > self.limit]
        sustained = None if within else 0.0
        if within and above:
            low, high = max(within), min(above)
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                if self.at_rate(manager, middle)["latency"] <= self.limit:
                    low = middle
                else:
                    high = middle
            sustained = round(low, 3)
        return {"rates": runs, "sustained": sustained}


def summary(result: Result) -> dict[str, Any]:
    """A result without its jobs."""
    result.jobs = []
    figures = asdict(result)
    del figures["jobs"]
    return figures


def capacity(preset: Preset, requests: Requests) -> float:
    """About how many requests a second a server reaches whose memory holds nothing but tokens."""
    context = float(requests.prompt.mean() + requests.answer.mean() / 2)
    running = max(1.0, min(256.0, preset.slots / context))
    prompts = running * float(requests.prompt.mean() / requests.answer.mean())
    seconds = preset.step_seconds(int(running + prompts), int(running * context))
    return running / (seconds * float(requests.answer.mean()))


def run_all(
    tasks: list[tuple[str, Study, str, tuple[Any, ...]]], processes: int
) -> dict[tuple[str, str], dict[str, Any]]:
    """Run (key, study, method, arguments whose first is the manager), in as many processes.

    Returns:
        Each task's result by its key and manager.
    """
    results: dict[tuple[str, str], dict[str, Any]] = {}
    for key, manager, result in progress(_each(tasks, processes), "simulating", len(tasks)):
        results[key, manager] = result
    return results


def _each(
    tasks: list[tuple[str, Study, str, tuple[Any, ...]]], processes: int
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if processes == 1:
        for key, study, method, arguments in tasks:
            yield key, arguments[0], getattr(study, method)(*arguments)
        return
    with ProcessPoolExecutor(processes) as pool:
        futures = [
            (key, arguments[0], pool.submit(getattr(study, method), *arguments))
            for key, study, method, arguments in tasks
        ]
        try:
            for key, manager, future in futures:
                yield key, manager, future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
