"""One engine for all calls on a model, so that each finds what the others have computed."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import mlx.core as mx

from mlx_paged.beam import BeamParams
from mlx_paged.engine import Engine
from mlx_paged.interrupts import uninterrupted
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.request import Output
from mlx_paged.responses import PoolUse
from mlx_paged.sampling import SamplingParams
from mlx_paged.scheduler import Schedule

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Observer = Callable[[Engine, Schedule, list[Output]], None]

_ENGINES: dict[int, SharedEngine] = {}  # by the id of a living model
_LOCK = threading.RLock()


def engine_of(
    model: Qwen2, tokenizer: TokenizerWrapper, options: Mapping[str, Any]
) -> SharedEngine:
    """The engine of a model: the one there is, unless the options are others.

    It is freed with the model. An engine that calls are still using when another takes its place
    is freed after them.

    Raises:
        ValueError: as `Engine`.
    """
    with _LOCK:
        shared = _ENGINES.get(id(model))
        if shared is None:
            weakref.finalize(model, _ENGINES.pop, id(model), None)
        elif shared.options == options:
            return shared
        _ENGINES.pop(id(model), None)
        del shared  # before the next one takes its memory
        shared = _ENGINES[id(model)] = SharedEngine(model, tokenizer, options)
        return shared


class Call:
    """The requests of one call, and what has come of them."""

    def __init__(self, shared: SharedEngine) -> None:
        self._shared = shared
        self._unfinished: dict[int, int] = {}  # samples, by request
        self._arrived: list[Output] = []
        self._started: set[tuple[int, int]] = set()
        self._start = shared.engine.stats
        self.peak_blocks = 0
        self.prompt_time = 0.0
        self.decode_time = 0.0
        self.decode_steps = 0

    def add(
        self,
        tokenizer: TokenizerWrapper,
        prompt: list[int],
        params: SamplingParams | BeamParams,
        **how: Any,
    ) -> int:
        """Queue a request; see `Engine.add` and `Engine.add_beam_search`."""
        return self._shared.add(self, tokenizer, prompt, params, how)

    def outputs(self) -> list[Output]:
        """The next outputs of the call's requests, stepping until there are some; [] at the end."""
        while not self._arrived and self._unfinished:
            self._shared.step(self)
        with uninterrupted():
            arrived, self._arrived = self._arrived, []
        return arrived

    def pool_use(self) -> PoolUse:
        """What happened in the pool since the call began, other calls' doings included."""
        return PoolUse.between(self._start, self._shared.engine.stats, self.peak_blocks)

    @property
    def has_news(self) -> bool:
        """Whether there are outputs that nobody has asked for yet."""
        return bool(self._arrived)

    def awaits(self, request_id: int) -> bool:
        """Whether samples of a request are unfinished."""
        return request_id in self._unfinished

    def account(self, seconds: float, step: _Step) -> None:
        """Count the time of a step, prompts and new tokens by their numbers of tokens."""
        share = step.decode_tokens / max(step.tokens, step.decode_tokens, 1)
        self.decode_time += share * seconds
        self.prompt_time += (1 - share) * seconds
        self.decode_steps += step.decode_tokens > 0
        self.peak_blocks = max(self.peak_blocks, step.blocks)

    def expect(self, request_id: int, samples: int) -> None:
        """Wait for that many samples of a request."""
        self._unfinished[request_id] = samples

    def deliver(self, output: Output) -> bool:
        """Take an output; return whether it is its sample's second or a later token."""
        self._arrived.append(output)
        key = (output.request_id, output.index)
        is_decode = key in self._started
        self._started.add(key)
        if output.finish_reason is not None:
            self._started.discard(key)
            self._unfinished[output.request_id] -= 1
            if not self._unfinished[output.request_id]:
                del self._unfinished[output.request_id]
        return is_decode

    def close(self) -> None:
        """Cancel what is unfinished."""
        with uninterrupted():
            self._shared.cancel(self._unfinished)
            self._unfinished = {}


class _Step(NamedTuple):
    """Figures of a step."""

    tokens: int  # computed
    decode_tokens: int  # of these, for a second or later token of a sample
    blocks: int  # in use after it


class _Router:
    """Brings each output to its call. The engine refers to it, so it refers to no engine."""

    def __init__(self, observer: Observer | None) -> None:
        self.observer = observer
        self.calls: dict[int, Call] = {}  # by request
        self.last = _Step(0, 0, 0)

    def __call__(self, engine: Engine, schedule: Schedule, outputs: list[Output]) -> None:
        decode_tokens = 0
        for output in outputs:
            call = self.calls.get(output.request_id)
            if call is not None:
                decode_tokens += call.deliver(output)
                if not call.awaits(output.request_id):
                    del self.calls[output.request_id]
        self.last = _Step(schedule.num_tokens, decode_tokens, engine.pool.num_used)
        if self.observer is not None:
            self.observer(engine, schedule, outputs)


class SharedEngine:
    """An engine that several calls step in turn.

    A step serves the requests of all calls; what it brings for others waits until they ask. Calls
    may come from different threads, one of which steps at a time.

    Args:
        model: referred to weakly; whoever uses the engine holds it.
        tokenizer: to begin with.
        options: of `Engine`.
    """

    def __init__(
        self, model: Qwen2, tokenizer: TokenizerWrapper, options: Mapping[str, Any]
    ) -> None:
        self.options = dict(options)
        self._router = _Router(options.get("observer"))
        self._lock = threading.RLock()
        self._stepping: int | None = None  # the thread that is in a step
        self._cancelled: list[int] = []
        proxy = cast("Qwen2", weakref.proxy(model))
        self.engine = Engine(proxy, tokenizer, **(self.options | {"observer": self._router}))

    @contextmanager
    def call(self) -> Iterator[Call]:
        """A call on the engine; at its end, however it ends, nothing of it is left."""
        if self._stepping == threading.get_ident():
            raise RuntimeError("a sampler or logits processor must not generate on its own model")
        call = Call(self)
        try:
            with _wired():
                yield call
        finally:
            call.close()

    def add(
        self,
        call: Call,
        tokenizer: TokenizerWrapper,
        prompt: list[int],
        params: SamplingParams | BeamParams,
        how: Mapping[str, Any],
    ) -> int:
        """Queue a request of a call."""
        with self._lock, uninterrupted():
            self.engine.tokenizer = tokenizer
            if isinstance(params, BeamParams):
                request_id = self.engine.add_beam_search(prompt, params, **how)
            else:
                request_id = self.engine.add(prompt, params, **how)
            self._router.calls[request_id] = call
            call.expect(request_id, params.num_samples)
            return request_id

    def step(self, call: Call) -> None:
        """Step once; its time is the given call's."""
        with self._lock:
            self._drop_cancelled()
            if call.has_news:  # while we waited for another thread's step
                return
            begin = time.perf_counter()
            self._stepping = threading.get_ident()
            try:
                self.engine.step()
            finally:
                self._stepping = None
            call.account(time.perf_counter() - begin, self._router.last)

    def cancel(self, request_ids: Mapping[int, int]) -> None:
        """Cancel requests now or, within a step, before the next one."""
        with self._lock:
            for request_id in request_ids:
                self._router.calls.pop(request_id, None)
            self._cancelled += request_ids
            if self._stepping is None:
                self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            self.engine.cancel(self._cancelled[-1])
            self._cancelled.pop()


_wired_users = 0
_wired_before = 0


@contextmanager
def _wired() -> Iterator[None]:
    """Let MLX keep what a Mac recommends resident while any call goes on."""
    global _wired_users, _wired_before
    recommended = _recommended_memory()
    if recommended is None:
        yield
        return
    with _LOCK:
        if not _wired_users:
            _wired_before = mx.set_wired_limit(recommended)
        _wired_users += 1
    try:
        yield
    finally:
        with _LOCK:
            _wired_users -= 1
            if not _wired_users:
                mx.synchronize()
                mx.set_wired_limit(_wired_before)


def _recommended_memory() -> int | None:
    """Bytes that a Mac recommends to keep resident; None elsewhere."""
    if not mx.metal.is_available():
        return None
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return None if recommended is None else int(recommended)
