"""The README's code runs, and its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mlx_paged.cli import parse
from mlx_paged.loader import TINY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not (TINY / "config.json").exists(), reason="no bundled checkpoint")
def test_the_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    out = capsys.readouterr().out
    assert "EngineStats(num_blocks=256, blocks_used=0" in out


def test_the_commands_parse() -> None:
    commands = [
        line
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("mlx-paged ")
    ]
    assert len(commands) >= 4
    for command in commands:
        parse(shlex.split(command)[1:])


def test_the_first_two_blocks_are_one_command_each() -> None:
    for name, block in zip(("try", "test"), blocks("sh"), strict=False):
        assert f"<!-- ci: {name} -->\n```sh\n{block}```" in README
        assert block.count("\n") == 1


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(targets) > 20
    assert [target for target in targets if not (ROOT / target).exists()] == []
