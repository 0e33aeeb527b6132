"""mlx-lm's side: its contiguous caches, by its own functions at their best settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream, wired_limit
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

from scripts.benchmark.contender import Contender, Settings
from scripts.benchmark.recording import Recorder
from scripts.benchmark.workloads import Tokens, Workload

STEPS = (64, 128, 512, 2048)
MOST_PADDED = 2**14
DEFAULTS = {  # BatchGenerator's own
    "completion_batch_size": 32,
    "prefill_batch_size": 8,
    "prefill_step_size": 2048,
}


class Stream(Contender):
    """One request at a time, by what `stream_generate` runs on; text is left out on both sides."""

    name = "mlx-lm"
    about = "stream_generate (without text)"

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Serve one request after the other."""
        recorder.begin()
        with _wired(self.models.theirs):
            for index, request in enumerate(workload.requests):
                cache = make_prompt_cache(self.models.theirs)
                recorder.start(index)
                self._stream(index, request.prompt, request.new, cache, recorder)

    def _stream(
        self, index: int, prompt: Tokens, new: int, cache: list[Any], recorder: Recorder
    ) -> None:
        for token in stream(self.models.theirs, prompt, new, cache):
            recorder.add([(index, token)])
            if recorder.watch:
                recorder.hold(nbytes(cache), cache[0].offset * self.models.bytes_per_token)


class PromptCache(Stream):
    """One request at a time, each from the nearest cache that `LRUPromptCache` has."""

    about = "stream_generate with LRUPromptCache"

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Fetch, generate, insert, as mlx-lm's server does."""
        conversations = sum(request.follows is None for request in workload.requests)
        kept = LRUPromptCache(max_size=max(10, conversations + 1))
        live = 0
        recorder.begin()
        with _wired(self.models.theirs):
            for index, request in enumerate(workload.requests):
                prompt = workload.prompt(index, dict(enumerate(recorder.tokens)))
                recorder.start(index)
                cache, rest = kept.fetch_nearest_cache("model", prompt)
                if cache is None:
                    cache = make_prompt_cache(self.models.theirs)
                self._stream(index, rest, request.new, cache, recorder)
                # What is in the cache, which is a token more than what was needed.
                tokens = (prompt + recorder.tokens[index])[: cache[0].offset]
                kept.insert_cache("model", tokens, cache)
                if recorder.watch:
                    live += len(request.prompt) + request.new
                    recorder.hold(kept.nbytes, live * self.models.bytes_per_token)


class Batch(Contender):
    """All requests in one BatchGenerator, as `batch_generate` has them, with its own defaults."""

    name = "mlx-lm, defaults"
    about = "batch_generate with its defaults"

    def candidates(self, workload: Workload) -> list[Settings]:
        """The defaults."""
        return [DEFAULTS]

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Insert all, take tokens until there are none."""
        recorder.begin()
        generator = BatchGenerator(self.models.theirs, **{**DEFAULTS, **settings})
        requests = [r for r in workload.requests for _ in range(workload.samples)]
        uids = generator.insert([r.prompt for r in requests], [r.new for r in requests])
        self._serve(generator, uids, workload, recorder)

    def _serve(
        self, generator: Any, uids: list[int], workload: Workload, recorder: Recorder
    ) -> None:
        streams = {uid: stream for stream, uid in enumerate(uids)}
        try:
            while True:
                prompts, responses = generator.next()
                if not prompts and not responses:
                    return
                recorder.add((streams[r.uid], r.token) for r in responses)
                if recorder.watch:
                    recorder.hold(*self._held(generator, workload))
        finally:
            generator.close()

    def _held(self, generator: Any, workload: Workload) -> tuple[int, int]:
        batches = (generator._prompt_batch, generator._generation_batch)
        waiting = [sequence[3] for sequence in generator._unprocessed_sequences]
        held = nbytes(*waiting, *(batch.prompt_cache for batch in batches))
        lengths = [len(tokens) for batch in batches for tokens in batch.tokens]
        live = sum(lengths)
        if workload.samples > 1:  # what the samples have in common counts once
            prompt = len(workload.requests[0].prompt)
            live -= sum(sorted(min(n, prompt) for n in lengths)[:-1])
        return held, live * self.models.bytes_per_token


class TunedBatch(Batch):
    """The same, with the settings that are fastest for this very workload."""

    name = "mlx-lm, tuned"
    about = "batch_generate with the fastest settings that were found"
    tuned = True

    def candidates(self, workload: Workload) -> list[Settings]:
        """All in one batch; smaller batches; smaller steps of long prompts; the defaults.

        Small steps are the better the more the prompts differ: short ones then go on to decode,
        unpadded, while long ones are still computed. Steps that pad prompts to more than
        `MOST_PADDED` tokens are left out, as they only take long.
        """
        rows = workload.streams
        shortest, longest = min(workload.lengths), max(workload.lengths)
        steps = [step for step in STEPS if step < longest] or [STEPS[-1]]
        found: list[Settings] = []
        for completion in sorted({rows, *(b for b in (32, 16, 8) if b < rows)}, reverse=True):
            for prefill in sorted({min(8, completion), completion}, reverse=True):
                for step in steps:
                    settings = {
                        "completion_batch_size": completion,
                        "prefill_batch_size": prefill,
                        "prefill_step_size": step,
                    }
                    padded = prefill * min(step, longest)
                    if settings not in found and (shortest == longest or padded <= MOST_PADDED):
                        found.append(settings)
        return found if DEFAULTS in found else [*found, DEFAULTS]


class LimitedBatch(Batch):
    """The same, with no more rows than keep its caches within the workload's limit."""

    name = "mlx-lm, limited"
    about = "batch_generate, the batch small enough for the limit"

    def candidates(self, workload: Workload) -> list[Settings]:
        """Batch sizes down to 1."""
        sizes = [n for n in (48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1) if n <= workload.streams]
        return [
            {
                "completion_batch_size": size,
                "prefill_batch_size": min(8, size),
                "prefill_step_size": 2048,
            }
            for size in sizes
        ]

    def budget(self, workload: Workload) -> int | None:
        """The workload's limit."""
        return workload.memory


class CopiedCaches(Batch):
    """The prompt computed once, its cache copied for every sample."""

    name = "mlx-lm, copied caches"
    about = "one prefill, then BatchGenerator on copies of its cache"

    def candidates(self, workload: Workload) -> list[Settings]:
        """Steps of the one prefill; the samples always make one batch."""
        longest = max(workload.lengths)
        return [{"prefill_step_size": s} for s in (2048, 512, 128) if s < longest or s == 2048]

    def run(self, workload: Workload, settings: Settings, recorder: Recorder) -> None:
        """Compute the prompt, hand its cache to every sample."""
        (request,) = workload.requests
        rows, step = workload.samples, settings.get("prefill_step_size", 2048)
        recorder.begin()
        generator = BatchGenerator(
            self.models.theirs,
            completion_batch_size=rows,
            prefill_batch_size=rows,
            prefill_step_size=step,
        )
        cache = make_prompt_cache(self.models.theirs)
        body = request.prompt[:-1]
        with mx.stream(generator.stream):
            for start in range(0, len(body), step):
                self.models.theirs(mx.array([body[start : start + step]]), cache=cache)
                mx.eval([c.state for c in cache])
                mx.clear_cache()
        # The generator copies it for each row, so that all may be given the same one.
        uids = generator.insert(
            [request.prompt[-1:]] * rows,
            [request.new] * rows,
            caches=[cache] * rows,
            all_tokens=[list(body) for _ in range(rows)],
        )
        del cache
        self._serve(generator, uids, workload, recorder)


def stream(model: Any, prompt: Tokens, new: int, cache: list[Any]) -> Iterator[int]:
    """mlx-lm's greedy tokens."""
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=new, prompt_cache=cache):
        yield int(token)


def _wired(model: Any) -> AbstractContextManager[Any]:
    """Model and caches stay in a Mac's memory, as `stream_generate` has it."""
    streams: list[Any] = [generation_stream]
    return wired_limit(model, streams)


def nbytes(*caches: Iterable[Any]) -> int:
    """Bytes of all layers of all caches, each counted once."""
    layers = {id(layer): layer.nbytes for cache in caches for layer in cache}
    return sum(layers.values())
