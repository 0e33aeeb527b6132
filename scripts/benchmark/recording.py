"""When each token of a run came, what memory was held, and the figures that follow."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np

from scripts.benchmark.workloads import Workload


class TooSlowError(Exception):
    """The run took longer than it was given."""


class OverBudgetError(Exception):
    """Keys and values took more bytes than they were given."""


class Recorder:
    """What a contender tells while it runs.

    Args:
        streams: answers of the workload.
        watch: whether the contender also tells what memory it holds, which takes time.
        deadline: seconds after which the run is given up.
        budget: bytes of keys and values over which it is given up.
        whole: whether the budget is for MLX's peak, above what it has now, instead.
    """

    def __init__(
        self,
        streams: int,
        *,
        watch: bool = False,
        deadline: float | None = None,
        budget: int | None = None,
        whole: bool = False,
    ) -> None:
        self.watch = watch or budget is not None
        self.tokens: list[list[int]] = [[] for _ in range(streams)]
        self.times: list[list[float]] = [[] for _ in range(streams)]
        self.starts = [0.0] * streams
        self.held = self.live = self.reserved = 0
        self._deadline = deadline
        self._budget = budget
        self._base = mx.get_active_memory() if whole else None
        self._origin = perf_counter()

    def clear(self) -> None:
        """Forget the tokens: the run starts again."""
        for lists in (self.tokens, self.times):
            for one in lists:
                one.clear()
        self.held = self.live = self.reserved = 0

    def begin(self) -> None:
        """The clock starts."""
        self._origin = perf_counter()

    def start(self, stream: int) -> None:
        """A stream's request arrives now; without this, when the clock starts."""
        self.starts[stream] = perf_counter() - self._origin

    def add(self, tokens: Iterable[tuple[int, int]]) -> None:
        """(stream, token) pairs that are there now.

        Raises:
            TooSlowError: the deadline is over.
        """
        now = perf_counter() - self._origin
        for stream, token in tokens:
            self.tokens[stream].append(token)
            self.times[stream].append(now)
        if self._deadline is not None and now > self._deadline:
            raise TooSlowError

    def hold(self, held: int, live: int, reserved: int | None = None) -> None:
        """Bytes of keys and values.

        Args:
            held: of all that is kept, whether anything is in it or not.
            live: of the tokens that are in use, shared ones counted once.
            reserved: of memory that is set aside whether it is held or not.

        Raises:
            OverBudgetError: more is held than allowed.
        """
        if (held, live) > (self.held, self.live):
            self.held, self.live = held, live
        self.reserved = max(self.reserved, held if reserved is None else reserved)
        if self._budget is not None:
            spent = held if self._base is None else mx.get_peak_memory() - self._base
            if spent > self._budget:
                raise OverBudgetError

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(times[-1] for times in self.times if times)

    def figures(self, workload: Workload) -> dict[str, Any]:
        """Speeds in tokens per second, times in seconds.

        Prompt tokens are divided by the time to the last first token (all first tokens' times,
        where requests come one by one); generated tokens by all of the time. In a batch others
        are decoded while prompts are computed, on both sides.
        """
        generated = sum(map(len, self.tokens))
        firsts = [
            times[0] - start for times, start in zip(self.times, self.starts, strict=True) if times
        ]
        gaps = [gap for times in self.times for gap in np.diff(times).tolist()]
        return {
            "seconds": self.seconds,
            "generation_tps": generated / self.seconds,
            "prompt_tps": sum(workload.lengths)
            / (sum(firsts) if workload.sequential else max(firsts)),
            "first_token": firsts,
            "per_token": gaps or [0.0],
        }
