"""What the pool's blocks are used for, step by step, written as JSON lines.

The first line has the pool: {"block_size": 16, "num_blocks": 64}. Then a line for each step, as
things are at its end:

    step        its number, from 0
    tables      the block table of every running sequence; they are called "<request>.<sample>"
    computed    how many of its tokens have keys and values, for each of these
    cached      blocks without a user that can still be found, next to be evicted first
    copies      [source, target] of the blocks copied in this step
    evictions   cached blocks handed out in this step
    preempted   sequences that gave up their blocks in this step
    finished    samples that ended in this step; their blocks are free or cached by now
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mlx_paged.block_pool import BlockPool
from mlx_paged.engine import Engine
from mlx_paged.request import Output
from mlx_paged.scheduler import Schedule


class Trace:
    """An observer of one engine that writes to a file.

        with Trace("trace.jsonl") as trace:
            engine = Engine(model, tokenizer, observer=trace)

    Args:
        path: the file; what it held is lost.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("w", encoding="utf-8")
        self._engine: Engine | None = None
        self._evictions: list[int] = []
        self._step = 0

    def __call__(self, engine: Engine, schedule: Schedule, outputs: Sequence[Output]) -> None:
        """Write the line of a step.

        Raises:
            ValueError: it is another engine's.
        """
        pool = engine.pool
        if self._engine is None:
            self._engine = engine
            self._evictions = _watch_evictions(pool)
            self._write({"block_size": pool.block_size, "num_blocks": pool.num_blocks})
        elif self._engine is not engine:
            raise ValueError(f"{self.path} traces another engine; each engine needs its own trace")
        if not schedule.rows and not outputs:
            return
        running = engine.scheduler.running
        self._write(
            {
                "step": self._step,
                "tables": {_name(seq.age): seq.block_table for seq in running},
                "computed": {_name(seq.age): seq.num_computed for seq in running},
                "cached": pool.cached_blocks(),
                "copies": schedule.copies,
                "evictions": self._evictions,
                "preempted": [_name(seq.age) for seq in schedule.preempted],
                "finished": [
                    _name((output.request_id, output.index))
                    for output in outputs
                    if output.finish_reason is not None
                ],
            }
        )
        self._evictions.clear()
        self._step += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _name(age: tuple[int, int]) -> str:
    return f"{age[0]}.{age[1]}"


def _watch_evictions(pool: BlockPool) -> list[int]:
    """A list to which every block is appended that the pool evicts from now on."""
    evicted: list[int] = []
    allocate = pool.allocate

    def watched() -> int:
        before = pool.stats.evictions
        block = allocate()
        if pool.stats.evictions > before:
            evicted.append(block)
        return block

    pool.allocate = watched  # type: ignore[method-assign]
    return evicted
