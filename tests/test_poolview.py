"""scripts.poolview: traces read and checked, the still picture, and the page in a real browser."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged.engine import Engine
from mlx_paged.models.config import Qwen2Config
from mlx_paged.models.qwen2 import Qwen2
from mlx_paged.sampling import SamplingParams
from mlx_paged.trace import Trace as TraceWriter
from scripts import poolview as script
from scripts.poolview import EXAMPLE, figures, page, read_trace
from tests.webdriver import Browser, browser_missing

TABLES = [
    [0, 1, 3, 6, 10, 14, 18],
    [0, 1, 4, 7, 11, 15, 19],
    [0, 1, 5, 8, 12, 16, 20],
    [0, 1, 2, 9, 13, 17, 21],
]


def run_engine(path: Path, num_blocks: int, prompts: list[list[int]], **options: Any) -> None:
    """Trace a small random model on prompts of token ids."""
    mx.random.seed(0)
    model = Qwen2(Qwen2Config(64, 2, 96, 4, 2, 1e-6, 256))
    with TraceWriter(path) as trace:
        engine = Engine(model, num_blocks=num_blocks, observer=trace)
        for prompt in prompts:
            engine.add(prompt, SamplingParams(ignore_eos=True, **options))
        while engine.has_work:
            engine.step()


@pytest.fixture(scope="module")
def four_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt of 44 tokens, four samples of 64, block size 16."""
    path = tmp_path_factory.mktemp("trace") / "samples.jsonl"
    run_engine(path, 64, [list(range(44))], n=4, max_tokens=64, temperature=1.0, seed=0)
    return path


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More requests than blocks: preemption and eviction."""
    path = tmp_path_factory.mktemp("trace") / "crowded.jsonl"
    ids = random.Random(0)
    prompts = [[ids.randrange(256) for _ in range(20)] for _ in range(6)]
    run_engine(path, 10, prompts, max_tokens=40, temperature=0.0)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    missing = browser_missing()
    if missing:
        pytest.skip(missing)
    with Browser() as opened:
        yield opened


def test_the_example_and_a_fresh_run_show_the_same_tables(four_samples: Path) -> None:
    for path in (EXAMPLE, four_samples):
        found = figures(read_trace(path))
        assert found["most_blocks_in_use"] == 22
        assert found["blocks_without_sharing"] == 28
        assert found["shared_blocks"] == 2
        assert found["copies"] == 3
        assert list(found["tables"].values()) == TABLES


def test_the_page_in_a_browser(four_samples: Path, tmp_path: Path, browser: Browser) -> None:
    html = tmp_path / "pool.html"
    assert script.main(["--data", str(four_samples), "--html", str(html)]) == 0
    browser.open(html)
    # It opens where the pool is fullest: 22 blocks, of which four sequences share the prompt's two.
    assert browser.text("#step") == "step 62 of 63"
    assert browser.text("#used") == "22"
    assert browser.run("return document.querySelectorAll('#blocks .used').length") == 22
    shared = "return [...document.querySelectorAll('#blocks .shared')].map(c => [c.dataset.block, "
    assert browser.run(shared + "c.innerText.trim().split(/\\s+/)])") == [
        ["0", ["0", "\u00d74"]],
        ["1", ["1", "\u00d74"]],
    ]
    assert browser.text("#copies") == "3"
    assert "[0, 1, 3, 6, 10, 14, 18]" in browser.text("#tables")
    # The slider moves, by its keys, and the picture with it.
    browser.press("#slider", "home")
    assert browser.text("#step") == "step 0 of 63"
    assert browser.text("#used") == "3"
    assert browser.text("#shared") == "3"
    assert browser.text("#copies") == "0"
    browser.press("#slider", "right")
    assert browser.text("#step") == "step 1 of 63"
    assert browser.text("#used") == "6"
    assert browser.run("return document.querySelectorAll('#arrows > path').length") == 3
    assert browser.run("return document.querySelectorAll('#blocks .target').length") == 3
    assert browser.text("#events").count("copied to") == 3
    browser.press("#slider", "end")
    assert browser.text("#step") == "step 63 of 63"
    assert browser.text("#used") == "0"
    assert browser.text("#events").count("finished") == 4
    cached = int(browser.text("#cached"))
    assert cached == browser.run("return document.querySelectorAll('#blocks .cached').length") > 0
    # The timeline takes the slider along.
    browser.click("#timeline")
    assert browser.text("#step") in ("step 31 of 63", "step 32 of 63")
    assert browser.run("return document.getElementById('slider').value") in ("31", "32")
    assert browser.errors() == []


def test_the_page_plays(four_samples: Path, tmp_path: Path, browser: Browser) -> None:
    html = tmp_path / "pool.html"
    html.write_text(page(read_trace(four_samples), "samples", 0), encoding="utf-8")
    browser.open(html)
    browser.click("#play")
    wait = "return new Promise(done => setTimeout(() => done(slider.value), 1500))"
    assert int(browser.run(wait)) >= 2
    browser.click("#play")
    stopped = browser.run(wait)
    assert browser.run(wait) == stopped


def test_evictions_and_preemption_are_events(
    crowded: Path, tmp_path: Path, browser: Browser
) -> None:
    trace = read_trace(crowded)
    found = figures(trace)
    assert found["evictions"] > 0
    assert found["preempted"] > 0
    index = next(i for i, step in enumerate(trace.steps) if step.preempted)
    html = tmp_path / "pool.html"
    html.write_text(page(trace, "crowded", index), encoding="utf-8")
    browser.open(html)
    assert "gave up its blocks" in browser.text("#events")
    index = next(i for i, step in enumerate(trace.steps) if step.evictions)
    html.write_text(page(trace, "crowded", index), encoding="utf-8")
    browser.open(html)
    assert "evicted from the cache" in browser.text("#events")
    marked = browser.run("return document.querySelectorAll('#blocks .evicted').length")
    assert marked == len(set(trace.steps[index].evictions))
    assert browser.errors() == []


def test_the_page_needs_nothing_else(four_samples: Path) -> None:
    text = page(read_trace(four_samples), "<script>&", 0)
    assert "&lt;script&gt;&amp;" in text
    assert "http" not in text.replace("http-equiv", "")
    assert "__T" not in text


@pytest.mark.parametrize("name", ["four_samples", "crowded"])
def test_main_draws_and_writes(
    name: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = request.getfixturevalue(name)
    argv = ["--data", str(path), "--step", "3", "--plot", str(tmp_path / "pool"), "--json"]
    assert script.main(argv) == 0
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1])["num_blocks"] == (64 if name == "four_samples" else 10)
    assert (tmp_path / "pool.png").stat().st_size > 5000
    assert (tmp_path / "pool.svg").is_file()


HEAD = '{"block_size": 16, "num_blocks": 4}\n'
STEP = {"step": 0, "tables": {"a": [0, 1]}, "computed": {"a": 20}, "cached": [2]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": {"a": [0, 4]}}, "the table of a has the block 4; there are 0 to 3"),
        ({"tables": {"b": [0]}}, "name different sequences"),
        ({"computed": {"a": 33}}, "a has 33 computed tokens in 2 blocks of 16"),
        ({"cached": [1]}, "block 1 is both in use and cached"),
        ({"cached": 2}, "'cached' must be a list of blocks"),
        ({"copies": [[0]]}, r"'copies' must be a list of \[source, target\]"),
        ({"copies": [[0, True]]}, "'copies' has the block True"),
        ({"preempted": [0]}, "'preempted' must be a list of sequences"),
        ({"step": "0"}, "the step has no number"),
        ({"tables": 3}, "must be objects"),
    ],
)
def test_a_broken_trace_names_its_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(HEAD + json.dumps(STEP) + "\n" + json.dumps(STEP | change) + "\n")
    with pytest.raises(ValueError, match=rf"trace\.jsonl:3: .*{message}"):
        read_trace(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for text, message in (
        ("", "the file is empty"),
        (HEAD, "the trace has no step"),
        ('{"block_size": 0, "num_blocks": 4}', r"jsonl:1: a trace begins"),
        (HEAD + '{"step": 0', r"jsonl:2: "),
        ("a,b\n1,2\n", r"jsonl:1: "),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trace(path)
    path.write_text(HEAD + json.dumps(STEP))
    with pytest.raises(ValueError, match="step is 9; the trace has 0 to 0"):
        script.main(["--data", str(path), "--step", "9"])
