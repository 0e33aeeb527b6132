"""scripts/same.py on a random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts import same
from tests.chat_model import folder, ours


def taken_in_turn(sizes: list[int], steps: int, block: int) -> list[list[int]]:
    """Block tables of sequences that each store a token per step after their prompts."""
    tables: list[list[int]] = [[] for _ in sizes]
    taken = 0
    for step in range(steps):
        for table, size in zip(tables, sizes, strict=True):
            while len(table) * block < size + step:
                table.append(taken)
                taken += 1
    return tables


def test_the_expectation_gives_the_known_tables() -> None:
    assert taken_in_turn([4, 11], 100, 16) == [
        [0, 3, 5, 7, 9, 11, 13],
        [1, 2, 4, 6, 8, 10, 12],
    ]


def test_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same, "TOKENS", 40)
    assert same.main(["--model", str(folder()), "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    sizes = [len(ours()[1].encode(prompt)) for prompt in same.PROMPTS]
    tables = taken_in_turn(sizes, 40, 16)
    assert out[0] == "block: 16 tokens, 32,768 bytes (2 layers, keys and values)"
    assert out[1:3] == [f"table: {table}" for table in tables]
    assert out[3:5] == ["same 40 tokens as the contiguous cache: True"] * 2
    free = 64 - sum(map(len, tables))
    assert out[5] == f"{free} of 64 blocks free"
    figures = json.loads(out[6])
    assert (figures["tables"], figures["same"]) == (tables, [True, True])


def test_a_difference_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(model: Any, prompt: list[int], count: int) -> Iterator[int]:
        yield from [*real(model, prompt, count - 1), -1]

    real = same.contiguous
    monkeypatch.setattr(same, "TOKENS", 3)
    monkeypatch.setattr(same, "contiguous", other)
    assert same.main(["--model", str(folder())]) == 1
    assert "same 3 tokens as the contiguous cache: False" in capsys.readouterr().out
