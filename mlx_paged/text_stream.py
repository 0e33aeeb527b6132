"""Text as it is generated: token ids to text, ended by stop strings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class TextStream:
    """The text of one sample, piece by piece.

    A piece is given out once it is decided: whole characters, and nothing that could still
    turn out to be the beginning of a stop string. The pieces together are the whole text up
    to the stop string that begins first, whatever the tokens it is spread over; of stop
    strings that begin at the same place it does not matter which. A stop string that is
    complete waits while a longer one that began before it may still be completed.

    Args:
        tokenizer: mlx-lm's ``TokenizerWrapper``; the stream takes a detokenizer of its own from
            it, so the text is what mlx-lm's own generation prints. None: there is no text,
            every piece is empty.
        stop: stop strings, none of them empty.

    Raises:
        ValueError: stop strings without a tokenizer, or an empty one.
    """

    def __init__(self, tokenizer: Any, stop: Iterable[str] = ()) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise ValueError(
                f"stop must hold strings of at least one character, got {self._stop!r}"
            )
        if self._stop and tokenizer is None:
            raise ValueError(f"stop strings need a tokenizer, got None and stop {self._stop!r}")
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._stopped = False

    @property
    def finished_by_stop(self) -> bool:
        """Whether a stop string has ended the text. Nothing follows then."""
        return self._stopped

    def add(self, token: int) -> str:
        """Take the next token and return the text that is now decided, often empty."""
        if self._detokenizer is None or self._stopped:
            return ""
        self._detokenizer.add_token(token)
        return self._decide(self._detokenizer.last_segment)

    def finish(self) -> str:
        """No token follows: return the rest of the text, up to a stop string if it has one."""
        if self._detokenizer is None or self._stopped:
            return ""
        self._detokenizer.finalize()
        return self._decide(self._detokenizer.last_segment, last=True)

    def _decide(self, text: str, last: bool = False) -> str:
        if not self._stop:
            return text
        held = self._held + text
        end = len(held) if last else self._possible_start(held)
        found = min((at for at in map(held.find, self._stop) if at >= 0), default=len(held))
        self._stopped = found <= end and found < len(held)
        self._held = "" if self._stopped else held[end:]
        return held[: min(found, end)]

    def _possible_start(self, text: str) -> int:
        """Where the first stop string begins that the end of ``text`` leaves unfinished."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stop):
                return start
        return len(text)
