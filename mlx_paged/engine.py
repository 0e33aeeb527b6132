"""Requests in, tokens out: one step at a time, over one pool of blocks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_paged.batch import BatchBuilder
from mlx_paged.beam import BeamParams, BeamRequest
from mlx_paged.block_pool import BlockPool
from mlx_paged.chat import check_text
from mlx_paged.checks import flag, integer
from mlx_paged.interrupts import uninterrupted
from mlx_paged.kernels.paged_attention import AttentionBackend, choose_backend
from mlx_paged.kv_cache import KVCache
from mlx_paged.model_runner import ModelRunner
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.request import LogitsProcessor, Output, Request, Sample, SampleRequest
from mlx_paged.sampling import (
    Pending,
    Sampled,
    Sampler,
    SampleRow,
    SamplingParams,
    fresh_seed,
    prepare,
)
from mlx_paged.scheduler import Schedule, Scheduler
from mlx_paged.sequence import Sequence
from mlx_paged.text_stream import TextStream

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DEFAULT_MEMORY = 256 * 2**20  # bytes, where MLX has no machine to ask
MEMORY_SHARE = 0.8  # of what a Mac recommends, less what is in use already

SIZES = ("block_size", "max_batched_tokens", "max_num_seqs")
LIMITS = ("memory_limit", "num_blocks")  # sizes, or None
FLAGS = ("prefix_caching", "token_reuse", "compile_steps", "look_ahead")


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine.

    Attributes:
        num_blocks, blocks_used, blocks_cached, blocks_free: the pool; used ones have a sequence,
            cached ones can be found again, free ones hold nothing that could be found.
        block_bytes, bytes_per_token: of keys and values, in all layers.
        live_tokens: tokens whose keys and values a sequence refers to, shared ones counted once.
        steps: forward passes.
        tokens_computed: tokens that went through the model.
        tokens_generated: tokens given out.
        blocks_reused, tokens_reused: found in the prefix cache as full blocks.
        tokens_copied: found in a part of a cached block, and copied.
        blocks_missed, tokens_missed: looked for in vain.
        preemptions: sequences that gave up their blocks.
        block_copies: blocks copied, to write into a shared one or to reuse a part.
        evictions: cached blocks handed out again.
    """

    num_blocks: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    block_bytes: int
    bytes_per_token: int
    live_tokens: int
    steps: int
    tokens_computed: int
    tokens_generated: int
    blocks_reused: int
    tokens_reused: int
    tokens_copied: int
    blocks_missed: int
    tokens_missed: int
    preemptions: int
    block_copies: int
    evictions: int


class _Step(NamedTuple):
    """The graph of a step, not yet computed."""

    signature: list[tuple[int, ...]]  # of the schedule it is for
    due: list[tuple[Sequence, int]]  # sequences to sample, and where the rows of each begin
    rows: list[SampleRow]
    pending: Pending | None  # None if no sequence is due
    keys: list[mx.array]
    values: list[mx.array]


def _signature(schedule: Schedule, ahead: int = 0) -> list[tuple[int, ...]]:
    """What a step is made from; `ahead` tokens later, where only these numbers change."""
    rows = [(*seq.age, seq.table_version, seq.num_computed + ahead, n) for seq, n in schedule.rows]
    return [(get_ident(),), *rows]  # a graph is computed by the thread that built it


class Engine:
    """Continuous batching of requests for one model. One thread owns an engine.

    Args:
        model: what `load` returned.
        tokenizer: gives text; without one, prompts and answers are token ids.
        block_size: tokens in a block, 1 to 256.
        memory_limit: bytes for keys and values; the pool never takes more.
        num_blocks: the same in blocks; at most one of the two. By default, on a Mac, a share of
            the memory it recommends, less what is in use; elsewhere 256 MiB.
        max_batched_tokens: tokens in one step.
        max_num_seqs: sequences running at once.
        prefix_caching: whether requests reuse the blocks of earlier ones.
        token_reuse: whether they also reuse a part of a block, by a copy.
        backend: "metal" or "reference" attention, or an object that plans it; by default
            whichever fits the device and the model.
        compile_steps: whether the graph of a step whose shape repeats is compiled and replayed,
            where the backend allows it.
        look_ahead: whether the graph of the next step is built while one is computed.
        observer: called at the end of every step with the engine, the step's schedule (its
            tokens are computed by then) and its outputs. It must not call `step` or `cancel`, nor
            change the outputs.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: an argument is out of its range, or not even one block fits the limit.
    """

    def __init__(
        self,
        model: Qwen2,
        tokenizer: TokenizerWrapper | None = None,
        *,
        block_size: int = 16,
        memory_limit: int | None = None,
        num_blocks: int | None = None,
        max_batched_tokens: int = 512,
        max_num_seqs: int = 256,
        prefix_caching: bool = True,
        token_reuse: bool = True,
        backend: str | AttentionBackend | None = None,
        compile_steps: bool = True,
        look_ahead: bool = True,
        observer: Callable[[Engine, Schedule, list[Output]], None] | None = None,
    ) -> None:
        sizes = check_options(
            {
                "block_size": block_size,
                "max_batched_tokens": max_batched_tokens,
                "max_num_seqs": max_num_seqs,
                "memory_limit": memory_limit,
                "num_blocks": num_blocks,
                "prefix_caching": prefix_caching,
                "token_reuse": token_reuse,
                "compile_steps": compile_steps,
                "look_ahead": look_ahead,
                "observer": observer,
            }
        )
        block_size, max_batched_tokens, max_num_seqs = (sizes[name] for name in SIZES)
        memory_limit, num_blocks = (sizes[name] for name in LIMITS)
        config = model.config
        dtype = model.model.norm.weight.dtype
        chosen = choose_backend(
            backend,
            dtype=dtype,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        geometry: dict[str, Any] = {
            "num_layers": config.num_hidden_layers,
            "num_kv_heads": config.num_key_value_heads,
            "block_size": block_size,
            "head_dim": config.head_dim,
            "dtype": dtype,
        }
        self.block_bytes = KVCache.block_bytes(**geometry)
        blocks = _pool_blocks(self.block_bytes, memory_limit, num_blocks)
        _check_machine(self.block_bytes, memory_limit, num_blocks)
        if num_blocks is None:
            blocks = min(blocks, KVCache.most_blocks(**geometry))
        if num_blocks is None and memory_limit is None:  # no more than all that could run
            window = -(-config.max_position_embeddings // block_size)
            blocks = min(blocks, max_num_seqs * window)
        self.model = model
        self.tokenizer = tokenizer
        self.pool = BlockPool(blocks, block_size, prefix_caching, token_reuse)
        self.scheduler = Scheduler(
            self.pool, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs
        )
        self.cache = KVCache(num_blocks=blocks, **geometry)
        self._builder = BatchBuilder(block_size, config.num_key_value_heads, chosen)
        self._runner = ModelRunner(model, enabled=compile_steps and chosen.compiles)
        self._requests: dict[int, Request] = {}  # unfinished
        self._outputs: list[Output] = []
        self._foreseen: _Step | None = None
        self._looks_ahead = look_ahead
        self._next_id = 0
        self._observer = observer
        self._stepping = False
        self._steps = 0
        self._tokens_computed = 0
        self._tokens_generated = 0
        self._block_copies = 0

    # Requests

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._outputs)

    def add(
        self,
        prompt: str | SequenceOf[int] | np.ndarray | mx.array,
        params: SamplingParams | None = None,
        *,
        sampler: Sampler | None = None,
        logits_processors: SequenceOf[LogitsProcessor] = (),
        full_logprobs: bool = False,
        cache_salt: str = "",
    ) -> int:
        """Queue a request.

        Args:
            prompt: text (with a tokenizer) or token ids.
            params: how to sample; by default greedily.
            sampler: mlx-lm's: log-probabilities [1, vocab] to a token; replaces temperature etc.
            logits_processors: mlx-lm's: (tokens, logits [1, vocab]) to logits.
            full_logprobs: whether outputs carry all log-probabilities.
            cache_salt: requests share cached blocks only under the same salt.

        Returns:
            The request's id, which its outputs carry.

        Raises:
            ValueError: the prompt is empty, has ids outside the vocabulary, or can never fit the
                model's window or the pool; or `params` do not fit the model.
        """
        params = SamplingParams() if params is None else params
        config = self.model.config
        params.check(config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got stop={params.stop!r} without one")
        ids = self.encode(prompt)
        self._check_length(len(ids), params.max_tokens)
        seq = self._new_sequence(ids, params.num_samples, cache_salt)
        seed = fresh_seed() if params.seed is None else params.seed
        eos = self._eos_token_ids()
        ends = self._ends(params)
        samples = [
            Sample(
                index,
                seq,
                SampleRow(
                    params=params,
                    seed=seed + index,
                    tokens=seq.tokens,
                    prompt_len=len(ids),
                    eos_token_ids=eos,
                    sampler=sampler,
                    logits_processors=tuple(logits_processors),
                    want_full_logprobs=full_logprobs,
                ),
                ends,
                None if self.tokenizer is None else TextStream(self.tokenizer, params.stop),
            )
            for index in range(params.num_samples)
        ]
        return self._submit(SampleRequest(seq.age[0], samples), seq)

    def add_beam_search(
        self,
        prompt: str | SequenceOf[int] | np.ndarray | mx.array,
        params: BeamParams | None = None,
        *,
        cache_salt: str = "",
    ) -> int:
        """Queue a beam search. It has one output, at its end, which carries all hypotheses.

        Args:
            prompt: text (with a tokenizer) or token ids.
            params: how to search.
            cache_salt: requests share cached blocks only under the same salt.

        Returns:
            The request's id.

        Raises:
            ValueError: as `add`; or the pool cannot hold all beams at once, none of them sharing
                a block with another, as after a preemption they may have to.
        """
        params = BeamParams() if params is None else params
        ends = self._ends(params)
        params.check(self.model.config.vocab_size, len(ends))
        ids = self.encode(prompt)
        self._check_length(len(ids), params.max_tokens, params.width)
        seq = self._new_sequence(ids, params.width, cache_salt)
        return self._submit(BeamRequest(seq.age[0], seq, params, ends, self._decode), seq)

    def _new_sequence(self, ids: list[int], width: int, cache_salt: str) -> Sequence:
        if not isinstance(cache_salt, str):
            raise ValueError(f"cache_salt must be a text, got {cache_salt!r}")
        check_text("cache_salt", cache_salt)
        root = hashlib.sha256(self.model.fingerprint + cache_salt.encode()).digest()
        return Sequence(ids, root, (self._next_id, 0), width=width)

    def _submit(self, request: Request, seq: Sequence) -> int:
        with uninterrupted():
            self.scheduler.add(seq)
            self._requests[request.request_id] = request
            self._next_id += 1
        return request.request_id

    def cancel(self, request_id: int) -> bool:
        """End a request now, without further outputs.

        Returns:
            Whether it was still going on.
        """
        self._check_idle("cancel")
        with uninterrupted():
            request = self._requests.pop(request_id, None)
            if request is not None:
                request.cancel(self.scheduler)
            self._outputs = [o for o in self._outputs if o.request_id != request_id]
        return request is not None

    def encode(self, prompt: str | SequenceOf[int] | np.ndarray | mx.array) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ValueError, TypeError: it is empty, not text or ids, or has ids that do not exist.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompt must be token ids, as the engine has no tokenizer")
            check_text("prompt", prompt)
            bos = self.tokenizer.bos_token
            special = bos is None or not prompt.startswith(bos)
            ids = self.tokenizer.encode(prompt, add_special_tokens=special)
        else:
            ids = prompt.tolist() if isinstance(prompt, mx.array | np.ndarray) else prompt
            if not isinstance(ids, SequenceOf) or isinstance(ids, bytes | bytearray):
                raise TypeError(f"prompt must be text or integer token ids, got {prompt!r}")
        if len(ids) == 0:
            raise ValueError("prompt must have at least one token, got none")
        vocab = self.model.config.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise TypeError(f"prompt must be text or integer token ids, got {token!r} in it")
            if not 0 <= token < vocab:
                raise ValueError(f"prompt must have token ids from 0 to {vocab - 1}, got {token}")
        return [int(token) for token in ids]

    # Steps

    def step(self) -> list[Output]:
        """Schedule, compute and sample once.

        An exception in a request's own sampler or logits processor ends that request, with an
        output that carries it. Any other exception leaves the pool whole and every request as it
        was, so that stepping can go on.

        Returns:
            The new tokens, at most one for each sample.
        """
        self._check_idle("step")
        with uninterrupted():
            self._advance()
        # Here, and not before: an exception on the way out leaves them for the next step.
        outputs, self._outputs = self._outputs, []
        return outputs

    def _advance(self) -> None:
        self._stepping = True
        schedule = Schedule()
        try:
            with uninterrupted(firm=True):
                schedule = self.scheduler.schedule()
            if schedule.rows:
                self._run(schedule)
            if self._observer:
                self._observer(self, schedule, self._outputs)
        except BaseException:
            with uninterrupted(firm=True):
                self._recover(schedule)
            raise
        finally:
            self._stepping = False

    def _run(self, schedule: Schedule) -> None:
        step, self._foreseen = self._foreseen, None
        if step and (schedule.copies or step.signature != _signature(schedule)):
            step = None  # let go of its graph, which holds on to the pools
        if step is None:
            step = self._prepare(schedule)
        self.cache.adopt(step.keys, step.values)
        sampled = None
        if step.pending is None:
            mx.eval(self.cache.keys, self.cache.values)
        else:
            if self._can_foresee(schedule, step):
                step.pending.launch()
                self._foreseen = self._foresee(schedule, step)
                mx.eval(self.cache.keys, self.cache.values)  # for any thread to use
            sampled = step.pending.collect()
        with uninterrupted(firm=True):
            self._update(schedule, step.due, sampled)

    def _prepare(self, schedule: Schedule) -> _Step:
        """Build the graph of a step."""
        due: list[tuple[Sequence, int]] = []
        rows: list[SampleRow] = []
        row_of: list[int] = []  # in the batch, of each sampled row
        for i, (seq, n) in enumerate(schedule.rows):
            if seq.num_uncomputed == n:
                due.append((seq, len(rows)))
                rows += self._requests[seq.age[0]].rows(seq)
                row_of += [i] * (len(rows) - len(row_of))
        batch = self._builder.build(schedule, row_of)
        self.cache.copy_blocks(schedule.copies)
        if batch.opened_blocks is not None:
            self.cache.open_blocks(batch.opened_blocks)
        logits, keys, values = self._runner(batch, self.cache)
        pending = prepare(logits, rows) if rows else None
        return _Step(_signature(schedule), due, rows, pending, keys, values)

    def _can_foresee(self, schedule: Schedule, step: _Step) -> bool:
        """Whether the next step is known but for its tokens: the same rows, in the same blocks."""
        if not self._looks_ahead or self.scheduler.waiting or len(step.rows) != len(schedule.rows):
            return False
        size = self.pool.block_size
        return all(
            n == seq.width == seq.num_uncomputed == 1
            and seq.num_computed + 1 < len(seq.block_table) * size
            and row.forgets
            and seq.num_generated + 1 < row.params.max_tokens
            and self._requests[seq.age[0]].steady
            for (seq, n), row in zip(schedule.rows, step.rows, strict=True)
        )

    def _foresee(self, schedule: Schedule, step: _Step) -> _Step | None:
        """Build the graph of the step after `step`, while that one is computed.

        It must not be launched before: an update of a pool that is still being read copies it.
        """
        assert step.pending is not None
        tokens = step.pending.tokens
        if tokens is None:
            return None
        batch = self._builder.build_next(schedule, tokens)
        logits, keys, values = self._runner(batch, self.cache)
        pending = prepare(logits, step.rows, ahead=1)
        return _Step(_signature(schedule, 1), step.due, step.rows, pending, keys, values)

    def _update(
        self, schedule: Schedule, due: list[tuple[Sequence, int]], sampled: Sampled | None
    ) -> None:
        """Count a completed step, and let each request make of its sampled rows what it will."""
        self.scheduler.commit(schedule)
        self._steps += 1
        self._tokens_computed += schedule.num_tokens
        self._block_copies += len(schedule.copies)
        if sampled is None:
            return
        for seq, first in due:
            request = self._requests.get(seq.age[0])
            if request is None:
                continue  # it ended with an error of another row in this step
            try:
                outputs = request.take(seq, sampled, first, self.scheduler)
            except Exception as error:  # of the tokenizer, at the end of a beam search
                request.cancel(self.scheduler)
                outputs = [Output(request.request_id, 0, None, finish_reason="error", error=error)]
            self._tokens_generated += sum(output.num_tokens for output in outputs)
            self._outputs += outputs
            if not request.sequences:
                del self._requests[request.request_id]
                self._foreseen = None

    def _recover(self, schedule: Schedule) -> None:
        """After a step that failed: nothing is computed twice wrongly, nothing is lost."""
        self._foreseen = None
        self.scheduler.abandon(schedule)
        try:
            mx.eval(self.cache.keys, self.cache.values)
        except Exception:
            for seq in list(self.scheduler.running):
                self.scheduler.preempt(seq, keep=False)
            self.pool.clear_cache()
            self.cache.reset()

    # Figures

    @property
    def stats(self) -> EngineStats:
        """Figures at this moment."""
        pool, size = self.pool, self.pool.block_size
        tails: dict[int, int] = {}
        for seq in self.scheduler.running:
            for i, block in enumerate(seq.block_table):
                tokens = min(size, seq.num_computed - i * size)
                tails[block] = max(tails.get(block, 0), tokens)
        return EngineStats(
            num_blocks=pool.num_blocks,
            blocks_used=pool.num_used,
            blocks_cached=pool.num_cached,
            blocks_free=pool.num_free - pool.num_cached,
            block_bytes=self.block_bytes,
            bytes_per_token=self.block_bytes // size,
            live_tokens=sum(tails.values()),
            steps=self._steps,
            tokens_computed=self._tokens_computed,
            tokens_generated=self._tokens_generated,
            blocks_reused=pool.stats.hit_blocks,
            tokens_reused=pool.stats.hit_tokens,
            tokens_copied=pool.stats.partial_hit_tokens,
            blocks_missed=pool.stats.miss_blocks,
            tokens_missed=pool.stats.miss_tokens,
            preemptions=self.scheduler.num_preemptions,
            block_copies=self._block_copies,
            evictions=pool.stats.evictions,
        )

    def block_tables(self) -> dict[tuple[int, int], list[int]]:
        """The block table of every running sequence, by (request id, sample index)."""
        return {seq.age: list(seq.block_table) for seq in self.scheduler.running}

    def clear_cache(self) -> None:
        """Forget all cached blocks; to be called if the model's weights change."""
        self.pool.clear_cache()
        self._runner.reset()
        self._foreseen = None

    def check(self) -> None:
        """Assert all invariants of pool, sequences and scheduler."""
        scheduler = self.scheduler
        self.pool.check([seq.block_table for seq in scheduler.running])
        assert all(not seq.block_table for seq in scheduler.waiting)
        for queue in (scheduler.running, scheduler.waiting):
            assert [seq.age for seq in queue] == sorted(seq.age for seq in queue)
        for seq in scheduler.running:
            assert seq.num_computed <= len(seq.tokens)
            assert len(seq.block_table) * self.pool.block_size >= seq.num_computed

    # Checks

    def _check_length(self, prompt_len: int, max_tokens: int, beams: int = 1) -> None:
        total = prompt_len + max_tokens
        window = self.model.config.max_position_embeddings
        if total > window:
            raise ValueError(
                f"max_tokens must be at most {window - prompt_len} after a prompt of {prompt_len} "
                f"tokens in a window of {window}, got {max_tokens}"
            )
        # The last token's keys and values are never needed.
        blocks = beams * -(-(total - 1) // self.pool.block_size)
        fitting = self.pool.num_blocks
        if beams > 1:  # the last of them is admitted while the others run
            fitting -= self.scheduler.spare_blocks
        if blocks > fitting:
            times = f"times {beams} beams " if beams > 1 else ""
            raise ValueError(
                f"prompt ({prompt_len} tokens) plus max_tokens ({max_tokens}) {times}need {blocks} "
                f"blocks of {self.pool.block_size}, but the pool has {fitting}; "
                f"raise memory_limit or num_blocks, or lower max_tokens{' or width' * (beams > 1)}"
            )

    def _check_idle(self, what: str) -> None:
        if self._stepping:
            raise RuntimeError(f"{what} must not be called while a step runs")

    def _decode(self, tokens: SequenceOf[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(list(tokens))

    def _ends(self, params: SamplingParams | BeamParams) -> frozenset[int]:
        eos = frozenset() if params.ignore_eos else self._eos_token_ids()
        return eos | frozenset(params.stop_token_ids)

    def _eos_token_ids(self) -> frozenset[int]:
        if self.tokenizer is not None:
            return frozenset(self.tokenizer.eos_token_ids)
        return frozenset(self.model.config.eos_token_ids)


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Some options of `Engine`, each looked at by itself; numbers of any kind become ints.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: a size is below 1.
    """
    checked = dict(options)
    for name, value in options.items():
        if name in SIZES or (name in LIMITS and value is not None):
            checked[name] = integer(name, value, 1)
        elif name in FLAGS:
            flag(name, value)
        elif name == "observer" and value is not None and not callable(value):
            raise TypeError(f"observer must be a function or None, got {value!r}")
    return checked


def _pool_blocks(block_bytes: int, memory_limit: int | None, num_blocks: int | None) -> int:
    """How many blocks the pool has."""
    if num_blocks is not None:
        if memory_limit is not None:
            raise ValueError(
                f"give memory_limit or num_blocks, not both: got {memory_limit} and {num_blocks}"
            )
        return num_blocks
    limit = _default_memory() if memory_limit is None else memory_limit
    if limit < block_bytes:
        raise ValueError(
            f"memory_limit must be at least one block ({block_bytes} bytes), got {limit}"
        )
    return limit // block_bytes


def _check_machine(block_bytes: int, memory_limit: int | None, num_blocks: int | None) -> None:
    """Refuse a pool that the machine cannot hold, before it is asked for."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if memory_limit is not None and memory_limit > machine:
        raise ValueError(
            f"memory_limit must be at most the machine's {machine} bytes, got {memory_limit}"
        )
    if num_blocks is not None and num_blocks * block_bytes > machine:
        raise ValueError(
            f"num_blocks must be at most {machine // block_bytes} blocks of {block_bytes} bytes, "
            f"the machine's memory, got {num_blocks}"
        )


def _default_memory() -> int:
    if not mx.metal.is_available():
        return DEFAULT_MEMORY
    recommended = int(mx.device_info()["max_recommended_working_set_size"])
    return int(MEMORY_SHARE * max(0, recommended - mx.get_active_memory()))
