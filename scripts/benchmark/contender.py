"""What every side of the comparison can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from scripts.benchmark.models import Models
from scripts.benchmark.recording import Recorder
from scripts.benchmark.workloads import Workload

Settings = Mapping[str, Any]


class Contender(ABC):
    """One way to serve workloads.

    Attributes:
        name: in tables and JSON.
        about: how it serves them.
        tuned: whether it is there to be tried with many settings.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    tuned: ClassVar[bool] = False

    def __init__(self, models: Models, options: Settings) -> None:
        self.models = models
        self.options = options

    def candidates(self, workload: Workload) -> list[Settings]:
        """Settings worth trying, those first that are likely to be fast."""
        return [{}]

    def budget(self, workload: Workload) -> int | None:
        """Bytes of keys and values that a try must not exceed."""
        return None

    def prepare(self, workload: Workload, settings: Settings) -> None:
        """What a server does once, before any request."""
        return

    @abstractmethod
    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve the workload, greedily and without an end token, and tell the recorder."""

    def release(self) -> None:
        """Give back what `prepare` took."""
        return
