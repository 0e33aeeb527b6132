"""Readers of the files that hold requests: lengths, traces, conversations; plain or gzipped.

| kind     | one request is                                                              |
|----------|-----------------------------------------------------------------------------|
| lengths  | a CSV row with the columns prompt_tokens and answer_tokens                  |
| turns    | the same, with conversation, turn and shared_prefix_tokens                  |
| azure    | a CSV row TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference trace)|
| mooncake | a JSON line with timestamp (ms), input_length, output_length, hash_ids      |
| sharegpt | a JSON record {"conversations": [{"from": ..., "value": ...}, ...]}         |
| alpaca   | a JSON record {"instruction": ..., "input": ..., "output": ...}             |

JSON is an array of records or one record a line. Whatever is wrong with a file is a ValueError
that begins with the file and the line.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Pair = tuple[str, str]

MAX_TOKENS = 10**9
MOONCAKE_BLOCK = 512  # tokens that one of its hash_ids stands for
_CHUNK = 1 << 20
_NOT_SPACE = re.compile(r"[^ \t\r\n]")


@dataclass(frozen=True)
class Lengths:
    """Token counts of requests, each array [requests], in the file's order.

    Attributes:
        arrival: seconds after the first request, where the file tells.
    """

    prompt: IntArray
    answer: IntArray
    arrival: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class Turns:
    """Turns of conversations, each array [turns].

    Attributes:
        shared: tokens at the prompt's beginning that some earlier turn's prompt and answer had.
    """

    conversation: IntArray
    turn: IntArray
    prompt: IntArray
    answer: IntArray
    shared: IntArray

    def __len__(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class Mooncake:
    """A Mooncake trace: lengths, and per request one id for each 512 tokens of its prompt."""

    lengths: Lengths
    hash_ids: list[list[int]]


def broken(path: Path, line: int, what: str) -> ValueError:
    """The error for line `line` of a file, counted from 1."""
    return ValueError(f"{path}:{line}: {what}")


def kind_of(path: Path) -> str:
    """Which of the kinds in the module's table a file is, by its beginning.

    Raises:
        ValueError: it is none of them, or empty.
        OSError: it cannot be read.
    """
    for line, text in _lines(path):
        text = text.strip()
        if not text:
            continue
        if text[0] in "[{":
            return _kind_of_record(path)
        columns = {name.strip() for name in text.split(",")}
        if {"ContextTokens", "GeneratedTokens"} <= columns:
            return "azure"
        if "shared_prefix_tokens" in columns:
            return "turns"
        if {"prompt_tokens", "answer_tokens"} <= columns:
            return "lengths"
        raise broken(
            path,
            line,
            f"{text[:60]!r} is neither JSON nor a known CSV header: "
            "prompt_tokens,answer_tokens or TIMESTAMP,ContextTokens,GeneratedTokens",
        )
    raise ValueError(f"{path}: the file is empty")


def read_lengths(path: Path, kind: str) -> Lengths:
    """Token counts (and arrivals, if any) of a file of kind lengths, turns, azure or mooncake."""
    if kind == "mooncake":
        return read_mooncake(path).lengths
    if kind != "azure":
        _, (prompt, answer) = _counts(path, ("prompt_tokens", "answer_tokens"))
        return Lengths(prompt, answer)
    lines: list[int] = []
    times: list[float] = []
    prompts: list[int] = []
    answers: list[int] = []
    for line, (time, context, generated) in _csv_rows(
        path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    ):
        lines.append(line)
        times.append(_seconds(path, line, time))
        prompts.append(_count(path, line, "ContextTokens", context))
        answers.append(_count(path, line, "GeneratedTokens", generated))
    return Lengths(_array(prompts), _array(answers), _from_first(path, lines, times))


def read_turns(path: Path) -> Turns:
    """A file of kind turns.

    Raises:
        ValueError: broken, or a turn shares more tokens than its prompt has.
    """
    names = ("conversation", "turn", "prompt_tokens", "answer_tokens", "shared_prefix_tokens")
    lines, columns = _counts(path, names)
    turns = Turns(*columns)
    too_many = np.flatnonzero(turns.shared > turns.prompt)
    if len(too_many):
        row = int(too_many[0])
        raise broken(
            path,
            lines[row],
            f"shared_prefix_tokens is {turns.shared[row]}, "
            f"more than the prompt's {turns.prompt[row]} tokens",
        )
    return turns


def read_mooncake(path: Path) -> Mooncake:
    """A file of kind mooncake.

    Raises:
        ValueError: broken, or a request has not one hash id for each 512 tokens begun.
    """
    lines: list[int] = []
    times: list[float] = []
    prompts: list[int] = []
    answers: list[int] = []
    hash_ids: list[list[int]] = []
    for line, record in records(path):
        for name in ("timestamp", "input_length", "output_length", "hash_ids"):
            if name not in record:
                raise broken(path, line, f"the record has no {name!r}")
        ids = record["hash_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise broken(path, line, "hash_ids is not a list of integers")
        prompt = _integer(path, line, "input_length", record["input_length"])
        if len(ids) != -(-prompt // MOONCAKE_BLOCK):
            raise broken(
                path,
                line,
                f"input_length {prompt} needs {-(-prompt // MOONCAKE_BLOCK)} hash_ids "
                f"(one for each {MOONCAKE_BLOCK} tokens begun), not {len(ids)}",
            )
        lines.append(line)
        times.append(_integer(path, line, "timestamp", record["timestamp"]) / 1000)
        prompts.append(prompt)
        answers.append(_integer(path, line, "output_length", record["output_length"]))
        hash_ids.append(ids)
    arrival = _from_first(path, lines, times)
    return Mooncake(Lengths(_array(prompts), _array(answers), arrival), hash_ids)


def read_pairs(path: Path, kind: str) -> list[Pair]:
    """(prompt, answer) texts of a file of kind sharegpt or alpaca, in the file's order."""
    pair = sharegpt_pair if kind == "sharegpt" else alpaca_pair
    found: list[Pair] = []
    for line, record in records(path):
        try:
            texts = pair(record)
        except ValueError as error:
            raise broken(path, line, str(error)) from None
        if texts is not None:
            found.append(texts)
    return found


def sharegpt_pair(record: dict[str, Any]) -> Pair | None:
    """The first two messages, whatever their roles, as vLLM's serving benchmark takes them.

    Returns None for a record of fewer messages.

    Raises:
        ValueError: the record has not ShareGPT's shape.
    """
    messages = record.get("conversations")
    if not isinstance(messages, list):
        raise ValueError("the record has no list 'conversations'")
    if len(messages) < 2:
        return None
    texts = [m.get("value") if isinstance(m, dict) else None for m in messages[:2]]
    if not (isinstance(texts[0], str) and isinstance(texts[1], str)):
        raise ValueError("a message of the record has no text 'value'")
    return texts[0], texts[1]


def alpaca_pair(record: dict[str, Any]) -> Pair:
    """The instruction, with its input on the next line if it has one, and the output.

    Raises:
        ValueError: the record has not Alpaca's shape.
    """
    instruction, output = record.get("instruction"), record.get("output")
    extra = record.get("input") or ""
    if not (isinstance(instruction, str) and isinstance(output, str) and isinstance(extra, str)):
        raise ValueError("the record has no texts 'instruction', 'input' and 'output'")
    return (f"{instruction}\n{extra}" if extra else instruction), output


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON array or of JSON lines, each with the line it begins on.

    Reads a piece at a time, so that a file of many gigabytes needs no more memory than its records.
    """
    text = _Text(path)
    decode = json.JSONDecoder().raw_decode
    in_array = text.peek() == "["
    if in_array:
        text.position += 1
    first = True
    while (character := text.peek()) != "":
        if in_array and character == "]":
            text.position += 1
            if text.peek():
                raise broken(path, text.line(), "text after the end of the array")
            return
        if in_array and not first:
            if character != ",":
                raise broken(path, text.line(), f"expected ',' or ']', not {character!r}")
            text.position += 1
            text.peek()
        first = False
        line = text.line()
        while True:
            try:
                record, end = decode(text.buffer, text.position)
                break
            except json.JSONDecodeError as error:  # perhaps only cut off: try with more of the file
                broken_line = text.line(error.pos)
                if not text.more():
                    raise broken(path, broken_line, error.msg) from None
            except RecursionError:
                raise broken(path, line, "the record is nested too deeply") from None
        if not isinstance(record, dict):
            shown = text.buffer[text.position : min(end, text.position + 40)]
            raise broken(path, line, f"{shown!r} is not a JSON object")
        text.position = end
        yield line, record
    if in_array:
        raise broken(path, text.line(), "the file ends inside the array")


class _Text:
    """A window on a file's text that grows at its end, and knows its lines."""

    def __init__(self, path: Path) -> None:
        self.buffer = ""
        self.position = 0
        self._pieces = _lines(path)
        self._counted = (0, 1)  # a position in the buffer, and the line it is on
        self._size = _CHUNK

    def line(self, position: int | None = None) -> int:
        """The line of a position of the buffer, by default the current one."""
        start, line = self._counted
        if position is not None:
            return line + self.buffer.count("\n", start, position)
        self._counted = self.position, line + self.buffer.count("\n", start, self.position)
        return self._counted[1]

    def peek(self) -> str:
        """Skip white space; the character there, or nothing at the file's end."""
        while True:
            match = _NOT_SPACE.search(self.buffer, self.position)
            if match:
                self.position = match.start()
                self._size = _CHUNK
                return match.group()
            self.position = len(self.buffer)
            if not self.more():
                return ""

    def more(self) -> bool:
        """Forget what is behind the position and read on, twice as much each time in a row."""
        self.line()
        self.buffer, read = self.buffer[self.position :], [self.buffer[self.position :]]
        self.position, self._counted = 0, (0, self._counted[1])
        wanted = self._size
        self._size *= 2
        for _, piece in self._pieces:
            read.append(piece)
            wanted -= len(piece)
            if wanted <= 0:
                break
        self.buffer = "".join(read)
        return len(read) > 1


def _kind_of_record(path: Path) -> str:
    for line, record in records(path):
        if "conversations" in record:
            return "sharegpt"
        if "instruction" in record:
            return "alpaca"
        if "input_length" in record:
            return "mooncake"
        raise broken(
            path,
            line,
            "a record of no known shape: 'conversations' (ShareGPT), 'instruction' (Alpaca) or "
            "'input_length' (Mooncake) expected",
        )
    raise ValueError(f"{path}: no record in the file")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The file's lines with their numbers, decoded one by one so that a bad one can be named."""
    number = 0
    with path.open("rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if gzipped else raw
        try:
            for number, data in enumerate(stream, 1):
                yield number, data.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise broken(path, number, f"not UTF-8: {error.reason}") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise broken(path, number + 1, f"damaged gzip data: {error}") from None


def _csv_rows(path: Path, names: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """The cells of the named columns, row by row, with the row's line."""
    columns: list[int] | None = None
    width = 0
    for line, text in _lines(path):
        if not text.strip():
            continue
        cells = [cell.strip() for cell in text.split(",")]
        if columns is None:
            missing = [name for name in names if name not in cells]
            if missing:
                raise broken(path, line, f"the header has no column {missing[0]!r}")
            columns, width = [cells.index(name) for name in names], len(cells)
        elif len(cells) != width:
            raise broken(path, line, f"{len(cells)} cells where the header has {width}")
        else:
            yield line, [cells[i] for i in columns]


def _counts(path: Path, names: tuple[str, ...]) -> tuple[list[int], list[IntArray]]:
    """The rows' lines, and one array for each named column."""
    lines: list[int] = []
    rows: list[list[int]] = []
    for line, cells in _csv_rows(path, names):
        lines.append(line)
        rows.append([_count(path, line, *pair) for pair in zip(names, cells, strict=True)])
    if not rows:
        raise ValueError(f"{path}: no request in the file")
    return lines, list(np.array(rows, dtype=np.int64).T.copy())


def _count(path: Path, line: int, name: str, cell: str) -> int:
    if not (cell.isascii() and cell.isdigit()) or int(cell[:10]) > MAX_TOKENS or len(cell) > 10:
        raise broken(path, line, f"{name} is {cell[:40]!r}, not a whole number from 0 to 10^9")
    return int(cell)


def _integer(path: Path, line: int, name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_TOKENS:
        raise broken(path, line, f"{name} is {value!r}, not a whole number from 0 to 10^9")
    return value


def _seconds(path: Path, line: int, cell: str) -> float:
    """Azure's times have seven digits after the point; datetime takes six."""
    whole, _, fraction = cell.partition(".")
    try:
        time = datetime.fromisoformat(whole + "+00:00").timestamp()
        return time + (float("0." + fraction) if fraction else 0.0)
    except ValueError:
        raise broken(path, line, f"TIMESTAMP is {cell[:40]!r}, not a date and time") from None


def _from_first(path: Path, lines: list[int], times: list[float]) -> FloatArray:
    if not times:
        raise ValueError(f"{path}: no request in the file")
    arrival: FloatArray = np.array(times) - times[0]
    late = np.flatnonzero(np.diff(arrival) < 0)
    if len(late):
        raise broken(path, lines[int(late[0]) + 1], "arrives before the request ahead of it")
    return arrival


def _array(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
