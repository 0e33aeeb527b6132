"""The server: arrivals, a memory manager, the engine's scheduler, and a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from mlx_paged.scheduler import Schedule, Scheduler
from mlx_paged.sequence import Sequence
from scripts.simulation.arrivals import Arrival
from scripts.simulation.costs import Preset
from scripts.simulation.managers import Manager, Usage

MAX_BATCHED_TOKENS = 2048
MAX_NUM_SEQS = 256


@dataclass
class Job:
    """A request on its way through the server."""

    number: int
    request: Arrival
    sequence: Sequence
    stored: int = 0  # tokens whose keys and values exist, on the device
    swapped: int = 0  # tokens whose keys and values wait in the host's memory
    finish: float | None = None

    @property
    def generated(self) -> int:
        return len(self.sequence.tokens) - self.request.prompt


@dataclass
class Result:
    """What a run showed. Averages are over time.

    Attributes:
        in_flight: requests running, while requests still arrived.
        saturated: fractions of the memory's slots, while a request waited for memory; None if none
            ever did.
        saturated_in_flight: requests running meanwhile.
        given: real slots over slots given to requests, over the whole run.
        latency: mean of a request's seconds from arrival to end over its answer's tokens.
    """

    requests: int
    seconds: float
    steps: int
    tokens_in: int
    tokens_out: int
    tokens_computed: int
    preemptions: int
    in_flight: float
    latency: float
    given: float
    saturated: dict[str, float] | None
    saturated_in_flight: float
    jobs: list[Job] = field(repr=False, default_factory=list)


@dataclass
class _Totals:
    """Integrals over time."""

    seconds: float = 0.0
    in_flight: float = 0.0
    real: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0

    def add(self, seconds: float, in_flight: int, usage: Usage) -> None:
        self.seconds += seconds
        self.in_flight += seconds * in_flight
        self.real += seconds * usage.real
        self.reserved += seconds * usage.reserved
        self.internal += seconds * usage.internal
        self.external += seconds * usage.external


Observer = Callable[["Server", Schedule, Usage], None]


class Server:
    """Runs requests to their end.

    Args:
        manager: fresh; it belongs to one server.
        costs: how long a step takes.
        observer: called after each step is chosen, with the memory's usage at its end.
    """

    def __init__(
        self,
        manager: Manager,
        costs: Preset,
        *,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
        max_num_seqs: int = MAX_NUM_SEQS,
        observer: Observer | None = None,
    ) -> None:
        self.manager = manager
        self.costs = costs
        self.scheduler = Scheduler(
            manager.pool, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs
        )
        self.observer = observer
        self.now = 0.0
        self.queue: deque[Job] = deque()  # without memory; a paged manager leaves it empty
        self.jobs: dict[tuple[int, int], Job] = {}  # by their sequence's age, until they end

    def run(self, arrivals: SequenceOf[Arrival]) -> Result:
        """Serve all of the requests.

        Raises:
            ValueError: a request does not fit into the memory, alone.
        """
        for number, request in enumerate(arrivals):
            if not self.manager.fits(request):
                raise ValueError(
                    f"request {number} ({request.prompt} + {request.answer} tokens) does not fit "
                    f"into the {self.manager.slots} slots of {self.manager.name}"
                )
        jobs = [
            Job(number, request, Sequence([0] * request.prompt, b"", (number, 0)))
            for number, request in enumerate(arrivals)
        ]
        arriving = deque(jobs)
        last = arrivals[-1].time
        steps = computed = 0
        busy, saturated, arrival_phase = _Totals(), _Totals(), 0.0
        while arriving or self.jobs:
            self._arrive(arriving)
            step = self.scheduler.schedule()
            self._swap_out(step)
            if not step.rows:
                if not self.scheduler.waiting:
                    self.now = arriving[0].request.time
                continue
            steps += 1
            new, seconds = self._seconds(step)
            computed += new
            self.scheduler.commit(step)
            usage = self.manager.usage(sum(seq.num_computed for seq in self.scheduler.running))
            running = len(self.scheduler.running)
            busy.add(seconds, running, usage)
            if self._lacks_memory(step):
                saturated.add(seconds, running, usage)
            if self.now < last:
                arrival_phase += min(seconds, last - self.now) * running
            if self.observer is not None:
                self.observer(self, step, usage)
            self.now += seconds
            self._give_tokens(step)
        slots = self.manager.slots
        waited = saturated.seconds
        return Result(
            requests=len(jobs),
            seconds=self.now,
            steps=steps,
            tokens_in=sum(request.prompt for request in arrivals),
            tokens_out=sum(job.generated for job in jobs),
            tokens_computed=computed,
            preemptions=self.scheduler.num_preemptions,
            in_flight=arrival_phase / last if last else busy.in_flight / busy.seconds,
            latency=sum(_latency(job) for job in jobs) / len(jobs),
            given=busy.real / (busy.real + busy.reserved + busy.internal),
            saturated={
                name: getattr(saturated, name) / (waited * slots)
                for name in ("real", "reserved", "internal", "external")
            }
            if waited
            else None,
            saturated_in_flight=saturated.in_flight / waited if waited else 0.0,
            jobs=jobs,
        )

    def _arrive(self, arriving: deque[Job]) -> None:
        """Queue who has come, and let in, first come first served, who gets memory."""
        while arriving and arriving[0].request.time <= self.now:
            job = arriving.popleft()
            self.jobs[job.sequence.age] = job
            self.queue.append(job)
        while self.queue and self.manager.admit(self.queue[0].number, self.queue[0].request):
            self.scheduler.add(self.queue.popleft().sequence)

    def _lacks_memory(self, step: Schedule) -> bool:
        """Whether a request waits for memory, and not for its turn in the step."""
        return bool(self.queue) or (
            bool(self.scheduler.waiting)
            and step.num_tokens < self.scheduler.max_batched_tokens
            and len(self.scheduler.running) < self.scheduler.max_num_seqs
        )

    def _swap_out(self, step: Schedule) -> None:
        for seq in step.preempted:
            job = self.jobs[seq.age]
            if self.manager.swaps:
                job.swapped += job.stored
            job.stored = 0

    def _seconds(self, step: Schedule) -> tuple[int, float]:
        """Tokens computed, and the step's time."""
        tokens = context = 0
        moved = sum(self.jobs[seq.age].swapped for seq in step.preempted)
        for seq, n in step.rows:
            job = self.jobs[seq.age]
            back = min(n, job.swapped)
            job.swapped -= back
            moved += back
            tokens += n - back
            context += seq.num_computed + n
            job.stored = seq.num_computed + n
        return tokens, self.costs.step_seconds(tokens, context, moved)

    def _give_tokens(self, step: Schedule) -> None:
        for seq, _ in step.rows:
            if seq.num_uncomputed:
                continue
            seq.tokens.append(0)
            job = self.jobs[seq.age]
            if job.generated == job.request.answer:
                assert job.finish is None, f"request {job.number} finished twice"
                job.finish = self.now
                self.scheduler.remove(seq)
                self.manager.release(job.number)
                del self.jobs[seq.age]


def _latency(job: Job) -> float:
    assert job.finish is not None, f"request {job.number} never finished"
    return (job.finish - job.request.time) / job.request.answer
