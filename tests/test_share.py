"""scripts/share.py against bookkeeping block by block."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_paged.block_pool import BlockPool
from mlx_paged.engine import Engine
from mlx_paged.request import Output
from mlx_paged.scheduler import Schedule
from mlx_paged.sequence import Sequence
from scripts import share
from scripts.data import Requests, load_requests
from tests.models import config, random_model

LENGTHS = [(1, 1), (3, 9), (4, 4), (5, 30), (8, 1), (16, 17), (33, 20), (40, 3)]


def requests_of(*lengths: tuple[int, int]) -> Requests:
    prompt, answer = (np.array(side, np.int64) for side in zip(*lengths, strict=True))
    return Requests("made up", prompt, answer)


class Lives:
    """n sequences of one prompt, on blocks, as the engine keeps its own."""

    def __init__(self, prompt: int, n: int, block_size: int) -> None:
        self.pool = BlockPool(n * 100, block_size, prefix_caching=False)
        first = Sequence(list(range(prompt)), b"", (0, 0))
        first.reserve(self.pool, prompt)
        first.commit(self.pool, prompt)
        self.all = [first]
        self.next_age = 1
        self.choose([0] * n)

    def choose(self, parents: list[int]) -> None:
        """Let the living be followed by children of `parents`."""
        before, self.all = self.all, []
        for parent in parents:
            child = before[parent].fork((0, self.next_age))
            before[parent].share(self.pool, child)
            self.next_age += 1
            self.all.append(child)
        for seq in before:
            seq.free(self.pool, keep=False)

    def step(self) -> tuple[int, int]:
        """One more token for each; blocks of all tables, and how many of them are saved."""
        for seq in self.all:
            seq.tokens.append(0)
            seq.reserve(self.pool, 1)
            seq.commit(self.pool, 1)
        self.pool.check([seq.block_table for seq in self.all])
        total = sum(len(seq.block_table) for seq in self.all)
        return total, total - self.pool.num_used


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("n", [2, 3, 6])
def test_samples_save_what_blocks_say(n: int, block_size: int) -> None:
    found = share.samples(requests_of(*LENGTHS), n, block_size)
    for i, (prompt, answer) in enumerate(LENGTHS):
        lives = Lives(prompt, n, block_size)
        steps = [lives.step() for _ in range(answer)]
        assert found.total[i] == sum(total for total, _ in steps)
        assert found.saved[i] == sum(saved for _, saved in steps)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_beams_save_what_blocks_say(block_size: int) -> None:
    """The formula is linear in the ancestors, so it holds for means: here over random lives."""
    width, rng = 3, random.Random(block_size)
    prompt, answer, trials = 6, 23, 60
    sums = np.zeros(answer + 1)
    counts = np.zeros(answer + 1)
    saved = total = 0
    for _ in range(trials):
        lives = Lives(prompt, width, block_size)
        lineages: list[tuple[int, ...]] = [()] * width  # each beam's ancestors, by generation
        for t in range(1, answer + 1):
            if t > 1:
                parents = [rng.randrange(width) for _ in range(width)]
                lives.choose(parents)
                lineages = [(*lineages[p], p) for p in parents]
            step = lives.step()
            total += step[0]
            saved += step[1]
            for k in range(t):  # generation t - k
                own = [(*line, i) for i, line in enumerate(lineages)]
                sums[k] += len({line[t - k - 1] for line in own})
                counts[k] += 1
    assert (
        total
        == trials
        * share.beams(requests_of((prompt, answer)), width, block_size, np.array([3.0])).total[0]
    )
    # Means over steps would hide in which step a number was seen: random parents do not depend
    # on it, so the exact expectation is compared.
    expected = share.random_ancestors(width, answer)
    np.testing.assert_allclose(sums[:answer] / counts[:answer], expected[:answer], atol=0.25)
    formula = share.beams(requests_of((prompt, answer)), width, block_size, expected)
    assert saved / trials == pytest.approx(formula.saved[0], rel=0.05)


@pytest.mark.parametrize("ancestors", [1.0, 4.0])
def test_beams_that_share_everything_and_nothing(ancestors: float) -> None:
    """With one ancestor a token ago all but the last block, with four the prompt alone."""
    requests, size = requests_of(*LENGTHS), 4
    found = share.beams(requests, 4, size, np.array([4.0, ancestors]))
    for i, (prompt, answer) in enumerate(LENGTHS):
        held = range(prompt + 1, prompt + answer + 1)
        shared = [(tokens - 1) // size if ancestors == 1 else prompt // size for tokens in held]
        assert found.saved[i] == 3 * sum(shared)
        assert found.total[i] == 4 * sum(-(-tokens // size) for tokens in held)


def test_two_random_beams_meet_with_probability_a_half() -> None:
    found = share.random_ancestors(2, 10)
    np.testing.assert_allclose(found, 1 + 0.5 ** np.arange(11))
    # Six beams have 6 * (1 - (5/6) ** 6) parents on average.
    assert share.random_ancestors(6, 1)[1] == pytest.approx(6 * (1 - (5 / 6) ** 6))


def test_the_engine_saves_what_its_ancestors_say(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = random_model(config(heads=1, kv_heads=1, layers=1, vocab=64), seed=5)
    rng = np.random.default_rng(0)
    lengths, answers, size, width = [5, 16, 23], [40, 33, 7], 4, 4
    prompts = [rng.integers(0, 64, length).tolist() for length in lengths]
    expected = {"saved": 0, "total": 0}
    observe = share.Watcher.__call__

    def watch(
        self: share.Watcher, engine: Engine, schedule: Schedule, outputs: list[Output]
    ) -> None:
        observe(self, engine, schedule, outputs)
        for request, prompt in enumerate(lengths):
            texts = [s.tokens for s in engine.scheduler.running if s.age[0] == request]
            # What the beams hold in the next step, once each has written its last token.
            tokens = len(texts[0]) if texts else prompt
            if tokens > prompt:
                expected["total"] += width * -(-tokens // size)
                expected["saved"] += (width - 1) * (prompt // size)
                for end in range(size * (prompt // size + 1), tokens + 1, size):
                    expected["saved"] += width - len({tuple(text[:end]) for text in texts})

    monkeypatch.setattr(share.Watcher, "__call__", watch)
    found = share.measure(model, prompts, answers, width, size)
    assert (found.saved, found.total) == (expected["saved"], expected["total"])
    assert found.ancestors[0] == width
    assert (np.diff(found.ancestors[:8]) <= 0).all()
    assert found.ancestors.min() >= 1
    assert 0.2 < found.fraction < 0.75


def test_real_lengths_come_near_the_paper() -> None:
    """Within the points that another sample of the data and another tokenizer make."""
    for name, exact, near in (("sharegpt", 0.190308, 0.07), ("alpaca", 0.043517, 0.04)):
        figures = share.share(load_requests(name))
        assert figures["2"]["samples"] == pytest.approx(exact, abs=1e-5)
        published = share.KWON_SHARING[name]
        for kind, key in (("samples", "samples"), ("beams", "beams_random")):
            for n, percent in published[kind].items():
                assert abs(figures[str(n)][key] - percent / 100) < (
                    near if kind == "samples" else 0.14
                )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "share.json"
    argv = ["--data", "alpaca", "--requests", "50", "--json", str(target)]
    assert share.main([*argv, "--searches", "2", "--widths", "2", "3"]) == 0
    figures = json.loads(target.read_text())["alpaca"]
    assert list(figures) == ["2", "3"]
    for n in figures:
        most = 1 - 1 / int(n)
        for name in ("samples", "beams_random", "beams_measured", "beams_engine"):
            assert 0 < figures[n][name] < most
        assert figures[n]["ancestors"][0] == int(n)
    said = capsys.readouterr().out
    assert "2 beams, measured" in said
    assert "37.6" in said
    assert share.main([*argv, "--searches", "0", "--plot", str(tmp_path / "share")]) == 0
    assert sorted(path.name for path in tmp_path.glob("share.*g")) == ["share.png", "share.svg"]
    assert "measured" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "1"], "widths must be at least 2"),
        (["--block-size", "0"], "block_size is 0"),
        (["--searches", "-1"], "searches is -1"),
    ],
)
def test_bad_arguments(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share.main(["--data", "alpaca", *options])


def test_prompts_are_cut_from_a_text() -> None:
    class Letters:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [ord(letter) for letter in text]

    found = share.make_prompts(Letters(), [3, 30, 1], "abc\ndef\n", seed=0)
    assert [len(prompt) for prompt in found] == [3, 30, 1]
    assert "".join(map(chr, found[1])) in "abc\ndef\n" * 6
    with pytest.raises(ValueError, match="text is empty"):
        share.make_prompts(Letters(), [3], "", seed=0)
