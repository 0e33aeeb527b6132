"""Samples of many prompts: the iterator, the file, and the command, killed and resumed."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_paged import SamplingParams, batch_sample
from mlx_paged.batch_samples import BatchSample
from mlx_paged.cli import main
from mlx_paged.engine import Engine
from mlx_paged.sample_file import SampleFile, to_line
from mlx_paged.shared_engine import engine_of
from tests import chat_model

OPTIONS: dict[str, Any] = {"num_blocks": 300, "block_size": 4}
KILLS = 20


def samples_of(prompts: Any, **kwargs: Any) -> list[BatchSample]:
    """In the order of the prompts."""
    found = list(batch_sample(*chat_model.ours(), prompts, **(OPTIONS | kwargs)))
    return sorted(found, key=lambda one: (one.number, -1 if one.sample is None else one.sample))


def alone(prompt: Any, seed: int, **params: Any) -> tuple[list[int], str, list[float]]:
    """One sample from an engine of its own."""
    model, tokenizer = chat_model.ours()
    engine = Engine(model, tokenizer, num_blocks=100)
    engine.add(prompt, SamplingParams(seed=seed, logprobs=0, **params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return (
        [output.token for output in outputs if output.token is not None],
        "".join(output.text for output in outputs),
        [output.logprob for output in outputs if output.logprob is not None],
    )


# The iterator


def test_each_sample_is_what_its_seed_gives_alone() -> None:
    _, tokenizer = chat_model.ours()
    messages = [{"role": "user", "content": "Hello!"}]
    prompts = [
        "Some text",
        tokenizer.encode("Other text"),
        messages,
        {"prompt": "With options", "temperature": 0.7, "max_tokens": 5, "id": ["any", "thing"]},
        {"messages": messages, "n": 1, "seed": 77},
        {"token_ids": [5, 6, 7], "stop_token_ids": list(range(0, 256, 8))},
    ]
    found = samples_of(prompts, n=3, temperature=1.0, max_tokens=9, seed=5)
    assert [(one.number, one.sample) for one in found] == [
        (number, i) for number in range(6) for i in range(1 if number == 4 else 3)
    ]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for one in found:
        prompt = prompts[one.number]
        options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 9}
        if prompt is messages or "messages" in prompt:
            prompt = chat
        elif isinstance(prompt, dict):
            options |= {k: v for k, v in prompt.items() if k not in ("prompt", "token_ids", "id")}
            prompt = prompt.get("prompt") or prompt.get("token_ids")
        assert one.seed is not None
        tokens, text, _ = alone(prompt, one.seed, **options)
        ended = one.finish_reason == "stop"
        assert one.token_ids == (tokens[:-1] if ended else tokens)
        assert one.text == text
        assert one.prompt_tokens == len(tokenizer.encode(prompt) if prompt == chat else prompt)
    assert {one.seed for one in found if one.number == 4} == {77}
    assert len({one.seed for one in found}) == len(found)
    assert [one.id for one in found if one.number == 3] == [["any", "thing"]] * 3
    assert "stop" in {one.finish_reason for one in found if one.number == 5}


def test_the_seed_decides() -> None:
    first, again, other = (
        [one.token_ids for one in samples_of(["Hi", "Ho"], temperature=1.0, max_tokens=6, seed=s)]
        for s in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("width", [4, 256])
def test_best_of_gives_the_likeliest(width: int) -> None:
    """Also where more samples are wanted than the engine is wide."""
    found = samples_of(
        [{"prompt": "Hello", "n": 3, "best_of": 10, "seed": 40}],
        temperature=1.0,
        max_tokens=6,
        max_num_seqs=width,
        max_batched_tokens=256,
    )
    made = [alone("Hello", seed, temperature=1.0, max_tokens=6) for seed in range(40, 50)]
    means = {seed: sum(one[2]) / len(one[2]) for seed, one in zip(range(40, 50), made, strict=True)}
    ranked = sorted(means, key=lambda seed: -means[seed])[:3]
    assert [one.seed for one in found] == ranked
    assert [one.sample for one in found] == [0, 1, 2]
    assert [one.mean_logprob for one in found] == pytest.approx([means[s] for s in ranked])
    assert [one.token_ids for one in found] == [made[seed - 40][0] for seed in ranked]
    assert found[0].logprobs is None


def test_samples_of_a_prompt_share_its_computation() -> None:
    model, tokenizer = chat_model.ours()
    options = OPTIONS | {"prefix_caching": False}
    prompt = list(range(1, 98))
    for kwargs in ({"n": 8}, {"n": 2, "best_of": 8}):
        engine = engine_of(model, tokenizer, options).engine
        before = engine.stats
        used = 0
        for _ in batch_sample(
            model, tokenizer, [prompt], temperature=1.0, max_tokens=4, **kwargs, **options
        ):
            pass
        used = engine.stats.tokens_computed - before.tokens_computed
        assert used == 97 + 8 * 3


def test_logprobs_are_reported_if_asked_for() -> None:
    (plain,) = samples_of(["Hi"], max_tokens=4)
    (chosen,) = samples_of(["Hi"], max_tokens=4, logprobs=0)
    (top,) = samples_of([{"prompt": "Hi", "logprobs": 3}], max_tokens=4)
    assert (plain.logprobs, plain.top_logprobs, chosen.top_logprobs) == (None, None, None)
    assert chosen.logprobs == pytest.approx(alone("Hi", 0, max_tokens=4)[2])
    assert top.top_logprobs is not None
    assert [len(one) for one in top.top_logprobs] == [3] * 4
    assert [one[0] for one in top.top_logprobs] == list(
        zip(top.token_ids, top.logprobs or (), strict=True)
    )


def test_bad_prompts_do_not_stop_the_others() -> None:
    bad: list[tuple[Any, str]] = [
        ("", "at least one token"),
        ([1, 2, 999], "got 999"),
        ({"n": 2}, "got none of them"),
        ({"prompt": "a", "token_ids": [1]}, 'got "prompt" and "token_ids"'),
        ({"prompt": ["a"]}, "must be text"),
        ({"messages": []}, "must hold objects"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"token_ids": 5}, "must be a list"),
        ({"prompt": "a", "temprature": 1}, 'did you mean "temperature"'),
        ({"prompt": "a", "temperature": -1}, "temperature must be at least 0"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens must be an integer"),
        ({"prompt": "a", "max_tokens": 4000}, "window"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of must be at least n"),
        (7, "prompt must be"),
    ]
    prompts = [item for prompt, _ in bad for item in (prompt, "good")]
    found = samples_of(prompts, max_tokens=2)
    assert [one.number for one in found] == list(range(len(prompts)))
    for one, (prompt, message) in zip(found[::2], bad, strict=True):
        assert one.sample is None
        assert message in str(one.error), prompt
    assert all(one.error is None and len(one.token_ids) == 2 for one in found[1::2])


def test_a_failing_sample_is_its_own() -> None:
    calls = 0

    def sampler(logprobs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise LookupError("out of ideas")
        return 65

    found = samples_of(["a", "b", "c"], max_tokens=4, sampler=sampler)
    failed = [one for one in found if one.error is not None]
    assert len(failed) == 1
    assert (failed[0].sample, str(failed[0].error)) == (0, "out of ideas")
    assert sum(one.token_ids == [65] * 4 for one in found) == 2


def test_prompts_are_read_as_they_are_needed_and_closing_frees_all() -> None:
    read = 0

    def prompts() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield f"prompt {read}"

    model, tokenizer = chat_model.ours()
    options = OPTIONS | {"max_num_seqs": 4}
    found = batch_sample(model, tokenizer, prompts(), max_tokens=3, **options)
    for i in range(20):
        next(found)
        assert read <= i + 1 + 8 + 4  # queued, and finished in the same step
    found.close()  # type: ignore[attr-defined]
    engine = engine_of(model, tokenizer, options).engine
    assert not engine.has_work
    assert engine.stats.blocks_used == 0
    engine.check()


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"temperature": -1}, ValueError),
        ({"tempreature": 1}, TypeError),
        ({"seed": None}, TypeError),
        ({"seed": -1}, ValueError),
        ({"num_blocks": 0}, ValueError),
    ],
)
def test_bad_arguments_are_refused_at_once(kwargs: dict[str, Any], error: type) -> None:
    with pytest.raises(error):
        batch_sample(*chat_model.ours(), ["a"], **kwargs)


# The file


def numbered(line: int, sample: int | None) -> BatchSample:
    error = ValueError("bad") if sample is None else None
    return BatchSample(number=line, sample=sample, text=f"ü{line}\n", error=error)


def test_the_file_is_put_in_order_and_known_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    order = [(5, 1), (2, 0), (5, 0), (1, None), (300, 2)]
    with SampleFile(path, {"a": 1}) as file:
        for key in order:
            file.write([numbered(*key)])
            assert path.read_bytes().endswith(to_line(numbered(*key)))
        file.finish()
        file.write([numbered(3, 0)])
    expected = [(1, None), (2, 0), (5, 0), (5, 1), (300, 2), (3, 0)]
    assert path.read_bytes() == b"".join(to_line(numbered(*key)) for key in expected)
    with SampleFile(path, {"a": 1}) as file:
        assert len(file) == 6
        assert file.errors == 1
        assert all(file.is_done(*key) for key in expected)
        assert not file.is_done(1, 0)
        assert not file.is_done(2, None)
        file.finish()
    assert path.read_bytes() == b"".join(
        to_line(numbered(*key))
        for key in sorted(expected, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.run"]


def test_cut_anywhere_it_keeps_the_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [to_line(numbered(i, 0)) for i in range(3)]
    whole = b"".join(lines)
    with SampleFile(path, {}) as file:
        file.write([])
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        kept = sum(end >= len(b"".join(lines[: i + 1])) for i in range(3))
        with SampleFile(path, {}) as file:
            assert len(file) == kept
            file.write([numbered(9, 0)])
        assert path.read_bytes() == b"".join(lines[:kept]) + to_line(numbered(9, 0))


@pytest.mark.parametrize(
    "damage", [b"\0" * 50, b"\0\0\n", b"[1]\n", b'{"line": 1}x\n', b'{"line": "1"}\n', b"\xff\n"]
)
def test_what_is_no_record_is_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "out.jsonl"
    before, after = to_line(numbered(1, 0)), to_line(numbered(2, 0))
    with SampleFile(path, {}):
        pass
    tail = b"" if not damage.endswith(b"\n") else after + before  # and a record twice
    path.write_bytes(before + damage + tail)
    with SampleFile(path, {}) as file:
        assert len(file) == (2 if tail else 1)
        file.write([numbered(3, 0)])
    kept = before + after if tail else before
    assert path.read_bytes() == kept + to_line(numbered(3, 0))


def test_other_runs_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ValueError, match="no batch-sample has written it"):
        SampleFile(path, {"n": 1})
    assert path.read_text() == "mine\n"
    assert not (tmp_path / "out.jsonl.run").exists()
    with SampleFile(path, {"n": 1, "input": "a" * 64}, overwrite=True) as file:
        file.write([numbered(1, 0)])
        with pytest.raises(ValueError, match="another process"):
            SampleFile(path, {"n": 1, "input": "a" * 64})
    with pytest.raises(ValueError, match="begun with n 1, not 2; another input"):
        SampleFile(path, {"n": 2, "input": "b" * 64})
    with pytest.raises(ValueError, match="begun with top_k unset, not 5"):
        SampleFile(path, {"n": 1, "input": "a" * 64, "top_k": 5})
    assert path.read_bytes() == to_line(numbered(1, 0))
    (tmp_path / "out.jsonl.run").write_text('{"n"')
    with pytest.raises(ValueError, match="damaged"):
        SampleFile(path, {"n": 1})
    with SampleFile(path, {"n": 2}, overwrite=True) as file:
        assert len(file) == 0
    with SampleFile(path, {"n": 3}) as file:  # nothing is lost
        assert len(file) == 0


# The command


def write_prompts(path: Path, count: int) -> None:
    rng = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            line: dict[str, Any] = {"id": i, "n": rng.randint(1, 3), "max_tokens": 1 + i % 12}
            line["prompt"] = "You are helpful. " + "".join(rng.choices("abcdef ", k=1 + i % 20))
            file.write("not JSON\n" if i % 13 == 5 else json.dumps(line) + "\n" * rng.randint(1, 2))


def arguments(source: Path, target: Path, *more: str) -> list[str]:
    return [
        "batch-sample", str(source), "-o", str(target), "--model", str(chat_model.folder()),
        "--temp", "1", "--num-blocks", "200", "--max-num-seqs", "6", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    """The command finds its model in memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlx_paged.cli_batch_sample.load_model", lambda args: chat_model.ours())
        yield


@pytest.fixture(scope="module")
def finished(loaded: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An input, and the file of an undisturbed run."""
    folder = tmp_path_factory.mktemp("batch")
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    write_prompts(source, 40)
    assert main(arguments(source, target)) == 1
    return source, target


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_the_command_writes_what_python_gives(finished: tuple[Path, Path]) -> None:
    source, target = finished
    lines = source.read_text().split("\n")
    found = records(target)
    keys = [(one["line"], one.get("sample", -1)) for one in found]
    assert keys == sorted(keys)
    for number, line in enumerate(lines, start=1):
        mine = [one for one in found if one["line"] == number]
        if line == "not JSON":
            assert [one["finish_reason"] for one in mine] == ["error"]
            assert "not JSON" in mine[0]["error"]
        elif not line:
            assert not mine
        else:
            asked = json.loads(line)
            assert [one["sample"] for one in mine] == list(range(asked["n"]))
            assert {one["id"] for one in mine} == {asked["id"]}
    one = next(one for one in found if one.get("sample") == 1)
    asked = json.loads(lines[one["line"] - 1])
    tokens, text, _ = alone(
        asked["prompt"], one["seed"], temperature=1.0, max_tokens=asked["max_tokens"]
    )
    assert (one["token_ids"], one["text"], one["finish_reason"]) == (tokens, text, "length")


def test_from_any_part_it_makes_the_same_file(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, expected = finished
    lines = expected.read_bytes().splitlines(keepends=True)
    target = tmp_path / "out.jsonl"
    run = expected.with_name("out.jsonl.run").read_bytes()
    rng = random.Random(1)
    for share in (0.0, 0.5, 1.0):
        part = rng.sample(lines, int(share * len(lines)))
        target.write_bytes(b"".join(part) + rng.choice(lines)[:9])
        target.with_name("out.jsonl.run").write_bytes(run)
        capsys.readouterr()
        # The engine's options are free, and an option may be spelt otherwise.
        assert main(arguments(source, target, "--temp", "1.0", "--block-size", "8")) == 1
        assert target.read_bytes() == expected.read_bytes()
        said = capsys.readouterr().err
        assert (f"{len(part):,} samples already" in said) == bool(part)
        assert f"{len(lines):,} samples" in said or "errors in" in said


def test_other_arguments_are_refused(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = finished
    before = target.read_bytes()
    other = tmp_path / "in.jsonl"
    other.write_bytes(source.read_bytes() + b'{"prompt": "one more"}\n')
    for argv, message in (
        (arguments(source, target, "--seed", "1"), "begun with seed 0, not 1"),
        (arguments(source, target, "--temp", "0.5"), "begun with temperature 1.0, not 0.5"),
        (arguments(source, target, "--top-k", "5"), "begun with top_k unset, not 5"),
        (arguments(other, target), "begun with another input"),
        (arguments(source, source), "the same file"),
        (arguments(tmp_path / "none.jsonl", target), "none.jsonl"),
        (arguments(source, target, "--temp", "-1"), "temperature must be at least 0"),
        (arguments(source, target, "--block-size", "0"), "block_size must be"),
    ):
        assert main(argv) == 2
        assert message in capsys.readouterr().err
        assert target.read_bytes() == before
    copy = tmp_path / "out.jsonl"
    copy.write_bytes(before)
    assert main(arguments(source, copy)) == 2
    assert "no batch-sample has written it" in capsys.readouterr().err
    assert main(arguments(source, copy, "--temp", "0.5", "--overwrite")) == 1
    assert copy.read_bytes() != before


def test_best_of_and_logprobs_survive_an_interruption(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "Hello", "n": 3, "best_of": 5, "logprobs": 2}\n'
        '{"token_ids": [1, 2, 3], "n": 2, "logit_bias": {"7": 9.5}, "min_tokens": 3}\n'
        '{"messages": [{"role": "user", "content": "Hi"}], "logprobs": 0}\n'
    )
    argv = arguments(source, target, "--max-tokens", "6")
    assert main(argv) == 0
    expected = records(target)
    assert [len(one.get("logprobs", ())) for one in expected] == [6, 6, 6, 0, 0, 6]
    means = [one["mean_logprob"] for one in expected[:3]]
    assert means == sorted(means, reverse=True)
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(lines[1] + lines[5] + lines[0][:30])
    assert main(argv) == 0
    again = records(target)
    for one, other in zip(again, expected, strict=True):
        for name in ("logprobs", "mean_logprob"):
            assert one.pop(name, None) == pytest.approx(other.pop(name, None), abs=1e-4)
        tops = [one.pop("top_logprobs", []), other.pop("top_logprobs", [])]
        assert [[t for t, _ in top] for top in tops[0]] == [[t for t, _ in top] for top in tops[1]]
        assert one == other


def test_ctrl_c_keeps_what_is_there(
    finished: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, expected = finished
    target = tmp_path / "out.jsonl"
    write, calls = SampleFile.write, 0

    def interrupted(file: SampleFile, samples: list[BatchSample]) -> None:
        nonlocal calls
        calls += 1
        if calls % 12 == 0:
            raise KeyboardInterrupt
        write(file, samples)

    monkeypatch.setattr(SampleFile, "write", interrupted)
    codes = []
    for _ in range(100):
        codes.append(main(arguments(source, target)))
        said = capsys.readouterr().err
        if codes[-1] != 130:
            break
        assert "the same command goes on from there" in said
    assert codes[-1] == 1
    assert len(codes) > 3
    assert target.read_bytes() == expected.read_bytes()


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_shows_speed_and_pool(
    finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_paged.cli_batch_sample.REFRESH", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(arguments(finished[0], tmp_path / "out.jsonl")) == 1
    said = terminal.getvalue()
    assert "tokens/s" in said
    assert "/200 blocks" in said
    assert "40/40" in said
    assert said.count("the line is not JSON") == finished[0].read_text().count("not JSON")


# Killed


def command(argv: list[str], log: str) -> None:
    """The command in a process of its own, which says nothing here."""
    sys.stdout = sys.stderr = open(log, "w")  # noqa: SIM115
    os._exit(main(argv))


def test_killed_twenty_times_it_makes_the_same_file(tmp_path: Path) -> None:
    """Each time resumed; whenever a run gets to its end before it is killed, another begins."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    expected, log = tmp_path / "expected.jsonl", tmp_path / "log"
    write_prompts(source, 120)
    if sys.platform == "linux":  # imports happen once, in a process that computes nothing
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [__name__, "mlx_paged.cli_batch_sample", "mlx_paged.loader", "mlx_lm.tokenizer_utils"]
        )
    else:
        context = multiprocessing.get_context("spawn")

    def start(path: Path) -> Any:
        process = context.Process(target=command, args=(arguments(source, path), str(log)))
        process.start()
        return process

    process = start(expected)
    process.join(120)
    assert process.exitcode == 1, log.read_text()
    rng = random.Random()
    kills = inside = runs = 0
    size = expected.stat().st_size
    while kills < KILLS or process.exitcode != 1:
        process = start(target)
        begun = target.stat().st_size if target.exists() else 0
        if kills < KILLS:
            if rng.random() < 0.8:  # not only while it starts
                while process.is_alive() and (
                    not target.exists() or target.stat().st_size == begun
                ):
                    time.sleep(0.005)
            process.join(rng.uniform(0, 0.3))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        process.join(120)
        assert process.exitcode in (1, -signal.SIGKILL), log.read_text()
        inside += 0 < target.stat().st_size < size if target.exists() else 0
        if process.exitcode == 1:
            runs += 1
            assert target.read_bytes() == expected.read_bytes()
            if kills < KILLS:
                target.unlink()
                target.with_name("out.jsonl.run").unlink()
    assert inside > KILLS // 4
