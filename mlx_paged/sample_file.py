"""A JSONL file of samples that survives whatever ends the process that writes it.

While samples are made they are appended in the order in which they finish, whole lines, each batch
of them brought to the disk before the next step. When all are there the file is put in the order of
the input, in one rename. Beside FILE lies FILE.run, which says what the samples were made from and
is locked while somebody writes. Whoever opens the two again goes on where they end.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from mlx_paged.batch_samples import BatchSample

MAX_SAMPLES = 2**24  # of a line, so that line and sample make one number


class SampleFile:
    """Opens such a file, or begins one.

    What a crash has left of lines that were being written is dropped.

    Args:
        path: the file.
        run: what the samples are made from, as JSON: the same again, or the file is refused.
        overwrite: whether to begin anew whatever there is.

    Raises:
        ValueError: the file is another run's, or none of ours, or is being written.
        OSError: it cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], run: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self.errors = 0  # failed prompts and samples in it
        self._run_path = self.path.with_name(self.path.name + ".run")
        self._keys = array("q")  # of each record: its line and sample
        self._starts = array("q")  # and where it is
        self._ends = array("q")
        if not (overwrite or self._is_empty() or self._run_path.exists()):
            raise ValueError(
                f"{self.path} is there already, and no batch-sample has written it (there is no "
                f"{self._run_path.name} beside it); name another file, or overwrite it"
            )
        self._run_file = _locked(self._run_path)
        try:
            if overwrite or self._is_empty():
                self._begin(run)
            else:
                self._compare(run)
            self._file = self.path.open("r+b")
            self._scan()
        except BaseException:
            self._run_file.close()
            raise

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._keys)

    def close(self) -> None:
        """Let others write."""
        self._file.close()
        self._run_file.close()

    def is_done(self, line: int, sample: int | None) -> bool:
        """Whether a record was there when the file was opened; None: that of a failed prompt."""
        return _key(line, sample) in self._found

    def write(self, samples: Iterable[BatchSample]) -> None:
        """Append samples; they are on the disk when this returns."""
        for sample in samples:
            line = to_line(sample)
            self._add(_key(sample.number, sample.sample), self._file.tell(), len(line))
            self._file.write(line)
            self.errors += sample.error is not None
        _sync(self._file)

    def finish(self) -> None:
        """Put the records in the order of the input."""
        order = np.argsort(np.array(self._keys, np.int64), kind="stable")
        if (order[1:] < order[:-1]).any():
            self._rewrite(order.tolist())

    def _is_empty(self) -> bool:
        return not self.path.exists() or not self.path.stat().st_size

    def _begin(self, run: Mapping[str, Any]) -> None:
        """Write down what the samples will be made from, before there are any."""
        self.path.open("wb").close()
        self._run_file.seek(0)
        self._run_file.truncate()
        self._run_file.write(json.dumps(run, indent=1).encode() + b"\n")
        _sync(self._run_file)
        _sync_folder(self.path)

    def _compare(self, run: Mapping[str, Any]) -> None:
        try:
            written = json.loads(self._run_file.read())
        except ValueError as error:
            raise ValueError(
                f"{self._run_path} is damaged; name another file, or overwrite this one"
            ) from error
        if differences := _differences(written, json.loads(json.dumps(run))):
            raise ValueError(
                f"{self.path} was begun with {differences}; repeat the command as it was, or name "
                "another file, or overwrite this one"
            )

    def _scan(self) -> None:
        """Index the records that are there, and drop what is none."""
        self._found: set[int] = set()
        end = 0
        for line in self._file:
            start, end = end, end + len(line)
            record = _read(line)
            if record is None:
                continue
            key = _key(record["line"], record.get("sample"))
            if key in self._found:
                continue
            self._add(key, start, len(line))
            self._found.add(key)
            self.errors += "error" in record
        if sum(self._ends) - sum(self._starts) == (self._ends[-1] if self._ends else 0):
            self._file.seek(self._ends[-1] if self._ends else 0)
            self._file.truncate()
        else:  # power was lost: a later part of a write is there and an earlier one is not
            self._rewrite(list(range(len(self))))

    def _add(self, key: int, start: int, length: int) -> None:
        self._keys.append(key)
        self._starts.append(start)
        self._ends.append(start + length)

    def _rewrite(self, order: list[int]) -> None:
        """Write the file anew with its records in another order, all or nothing."""
        keys, starts, ends = self._keys, self._starts, self._ends
        self._keys, self._starts, self._ends = array("q"), array("q"), array("q")
        new = self.path.with_name(self.path.name + ".new")
        with (
            mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as records,
            new.open("wb") as file,
        ):
            for i in order:
                self._add(keys[i], file.tell(), ends[i] - starts[i])
                file.write(records[starts[i] : ends[i]])
            _sync(file)
        new.replace(self.path)
        _sync_folder(self.path)
        self._file.close()
        self._file = self.path.open("r+b")
        self._file.seek(0, os.SEEK_END)


def to_line(sample: BatchSample) -> bytes:
    """The JSON line of a sample."""
    record: dict[str, Any] = {"line": sample.number}
    if sample.sample is not None:
        record["sample"] = sample.sample
    if sample.id is not None:
        record["id"] = sample.id
    if sample.sample is not None:
        record["text"] = sample.text
        record["token_ids"] = sample.token_ids
        record["prompt_tokens"] = sample.prompt_tokens
        record["seed"] = sample.seed
    record["finish_reason"] = sample.finish_reason
    if sample.logprobs is not None:
        record["logprobs"] = [_finite(value) for value in sample.logprobs]
    if sample.top_logprobs is not None:
        record["top_logprobs"] = [
            [[token, _finite(value)] for token, value in top] for top in sample.top_logprobs
        ]
    if sample.mean_logprob is not None:
        record["mean_logprob"] = _finite(sample.mean_logprob)
    if sample.error is not None:
        record["error"] = f"{sample.error}" or type(sample.error).__name__
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _finite(value: float) -> float | None:
    """JSON has no infinity, which is the log-probability of a forbidden token."""
    return value if math.isfinite(value) else None


def _read(line: bytes) -> dict[str, Any] | None:
    """A record; None if the line is none, or only a part of one."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("line"), int):
        return None
    return record if isinstance(record.get("sample"), int | None) else None


def _key(line: int, sample: int | None) -> int:
    assert sample is None or sample < MAX_SAMPLES - 1
    return line * MAX_SAMPLES + (0 if sample is None else sample + 1)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What two runs are made from that is not the same."""
    said = []
    for name in {**old, **new}:
        a, b = (json.dumps(run[name]) if name in run else "unset" for run in (old, new))
        if a != b:
            is_short = len(a) + len(b) < 80
            said.append(f"{name} {a}, not {b}" if is_short else f"another {name}")
    return "; ".join(said)


def _locked(path: Path) -> IO[bytes]:
    """The file that says what a run is made from, for this process alone."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"another process writes the file beside {path}") from error
    file.seek(0)
    return file


def _sync(file: IO[bytes]) -> None:
    """Bring what was written to the disk; on a Mac, fsync alone stops at the drive's cache."""
    file.flush()
    if hasattr(fcntl, "F_FULLFSYNC"):
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)
    else:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Only then does a new name in a folder outlive a loss of power."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
