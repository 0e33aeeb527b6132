"""The command line: what it prints, and how it ends."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_paged import SamplingParams, generate
from mlx_paged.arguments import ENGINE_DEFAULTS
from mlx_paged.cli import main
from mlx_paged.options import ENGINE_OPTIONS, SAMPLING_FIELDS, parse_bytes
from tests.chat_model import folder, ours, write_folder

ROOT = Path(__file__).parents[1]
NO_METAL = pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal")
PLAIN = ["--ignore-chat-template", "--num-blocks", "64"]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `mlx-paged generate` on the test's model; returns exit code, stdout and stderr."""
    monkeypatch.setattr("mlx_paged.cli_generate.load_model", lambda args: ours())

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(["generate", *argv])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


def text_of(prompt: Any, **how: Any) -> Any:
    return generate(*ours(), prompt, num_blocks=64, **how)


def test_options_are_those_of_the_classes() -> None:
    assert set(SAMPLING_FIELDS) == {field.name for field in fields(SamplingParams)}
    assert set(ENGINE_OPTIONS) == set(ENGINE_DEFAULTS) - {"observer", "compile_steps", "look_ahead"}


def test_it_prints_the_text(cli: Any) -> None:
    code, out, err = cli("-p", "Hi there", "-m", "9", *PLAIN)
    assert (code, out, err) == (0, text_of("Hi there", max_tokens=9) + "\n", "")


def test_the_chat_template_is_the_default(cli: Any) -> None:
    messages = [{"role": "user", "content": "Hi\nthere"}]
    _, out, _ = cli("-p", r"Hi\nthere", "-m", "9", "--num-blocks", "64")
    assert out == text_of(messages, max_tokens=9) + "\n"
    full = [
        {"role": "system", "content": "Brief."},
        *messages,
        {"role": "assistant", "content": "Well"},
    ]
    _, out, _ = cli(
        *("-p", r"Hi\nthere", "-m", "9", "--num-blocks", "64"),
        *("--system-prompt", "Brief.", "--prefill-response", "Well"),
    )
    assert out == text_of(full, max_tokens=9) + "\n"


def test_messages_and_standard_input(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (tmp_path / "m.json").write_text(json.dumps(messages))
    expected = text_of(messages, max_tokens=5) + "\n"
    how = ("-m", "5", "--num-blocks", "64")
    assert cli("--messages", str(tmp_path / "m.json"), *how)[1] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(messages)))
    assert cli("--messages", "-", *how)[1] == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi"))
    assert cli("--prompt", "-", *how)[1] == expected


def test_samples_are_printed_one_after_the_other(cli: Any) -> None:
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 6}
    argv = ("-p", "Hi", "--temp", "1", "--seed", "3", "-m", "6", *PLAIN)
    texts = text_of("Hi", n=3, **how)
    assert cli(*argv, "--n", "3")[1] == "".join(
        f"[{i + 1}/3]\n{text}\n" for i, text in enumerate(texts)
    )
    best = text_of("Hi", best_of=3, **how)
    assert cli(*argv, "--best-of", "3")[1] == best + "\n"


def test_sampling_options_arrive(cli: Any) -> None:
    how: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "seed": 2,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {66: 2.0, 67: float("-inf")},
        "min_tokens": 3,
        "max_tokens": 20,
        "stop_token_ids": [12, 13],
        "ignore_eos": True,
    }
    options = (
        "--temp 0.9 --top-p 0.95 --top-k 50 --min-p 0.01 --seed 2 --repetition-penalty 1.3 "
        "--presence-penalty 0.2 --frequency-penalty 0.1 --logit-bias 66=2 --logit-bias 67=-inf "
        "--min-tokens 3 --max-tokens 20 --stop-token-id 12 --stop-token-id 13 --ignore-eos"
    )
    assert cli("-p", "Hi", *options.split(), *PLAIN)[1] == text_of("Hi", **how) + "\n"
    whole = text_of("Hi", max_tokens=20)
    assert cli("-p", "Hi", "-m", "20", "--stop", whole[5:7], *PLAIN)[1] == (
        whole[: whole.index(whole[5:7])] + "\n"
    )


def test_verbose_prints_figures(cli: Any) -> None:
    code, out, _ = cli("-p", "Hi there", "-m", "5", "--verbose", *PLAIN)
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "=" * 10
    assert lines[-5] == "=" * 10
    assert lines[-4].startswith("Prompt: 8 tokens, ")
    assert lines[-3].startswith("Generation: 5 tokens, ")
    assert lines[-2].startswith("Peak memory: ")
    assert lines[-1].startswith("Pool: 1 of 64 blocks of 16 tokens (32 KiB each) in use at most")
    quiet = cli("-p", "Hi there", "-m", "5", "--verbose", "False", *PLAIN)[1]
    assert "Prompt:" not in quiet


def test_json(cli: Any) -> None:
    argv = ("-p", "Hi", "-m", "4", "--n", "2", "--json", "--logprobs", "2", *PLAIN)
    said = json.loads(cli(*argv, "--logit-bias", "66=-inf")[1])
    assert said["model"] == "tiny"
    assert len(said["samples"]) == 2
    sample = said["samples"][1]
    assert sample["index"] == 1
    assert sample["finish_reason"] == "length"
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["top_logprobs"]) == 4
    assert sample["top_logprobs"][0][0] == [sample["token_ids"][0], sample["logprobs"][0]]
    assert said["stats"]["generation_tokens"] == 8
    assert said["stats"]["pool"]["num_blocks"] == 64
    assert "interrupted" not in said


def test_logprobs_are_listed(cli: Any) -> None:
    out = cli("-p", "Hi", "-m", "3", "--logprobs", "2", *PLAIN)[1]
    assert len(re.findall(r'^ *-\d\.\d{3}  ".*"  of  ".*" -\d\.\d{3}  ', out, re.MULTILINE)) == 3


def test_trace(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    code, _, _ = cli("-p", "Hi", "-m", "3", "--trace", str(path), *PLAIN)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert code == 0
    assert lines[0] == {"block_size": 16, "num_blocks": 64}
    assert lines[1]["tables"] == {"0.0": [0]}
    assert lines[-1]["finished"] == ["0.0"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give --prompt or --messages, and not both; for example"),
        (["-p", "a", "--messages", "b"], "give --prompt or --messages, and not both"),
        (["-p", ""], "prompt must have at least one token"),
        (["-p", "a", "--temprature", "1"], "unknown argument --temprature; did you mean --temper"),
        (["-p", "a", "--tem", "1"], "unknown argument --tem; did you mean --temp?"),
        (["-p", "a", "--temp", "hot"], "argument --temp/--temperature: invalid float value: 'hot'"),
        (["-p", "a", "--temp", "-1"], "temperature must be at least 0, got -1"),
        (["-p", "a", "--n", "0"], "n must be at least 1, got 0"),
        (["-p", "a", "-m", "9999"], "max_tokens must be at most 511"),
        (["-p", "a", "--memory-limit", "5 bananas"], "'5 bananas' is not a size"),
        (["-p", "a", "--memory-limit", "10"], "memory_limit must be at least one block"),
        (["-p", "a", "--block-size", "300"], "block_size must be from 1 to 256, got 300"),
        (["-p", "a", "--logit-bias", "x"], "'x' is not ID=NUMBER"),
        (["-p", "a", "--logit-bias", "9999=1"], "logit_bias must name token ids from 0 to 258"),
        (["-p", "a", "--verbose", "maybe"], "'maybe' is not True or False"),
        (["--messages", "/nowhere.json"], "No such file or directory: '/nowhere.json'"),
        (["-p", "a", "--trace", "/nowhere/t"], "No such file or directory: '/nowhere/t'"),
        (["-p", "a", "--system-prompt", "b"], "need the chat template, which is ignored"),
        pytest.param(["-p", "a", "--backend", "metal"], "etal", marks=NO_METAL),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(cli: Any, argv: list[str], message: str) -> None:
    plain = [option for option in PLAIN if "--memory-limit" not in argv or "num" not in option]
    if "--memory-limit" in argv:
        plain = ["--ignore-chat-template"]
    if not argv or "--messages" in argv:
        plain = []
    code, out, err = cli(*argv, *plain)
    assert code == 2, err
    assert out == ""
    assert message in err
    assert err.splitlines()[-1].startswith("mlx-paged generate: error: ")
    assert "Traceback" not in err


def test_bad_messages(cli: Any, tmp_path: Path) -> None:
    for text, message in (
        ("[", "is not JSON"),
        ("[]", "must hold a list of messages, got []"),
        ('{"role": 1}', "must hold a list of messages"),
        ('[{"role": "user"}]', "messages[0] must have a text as 'content', got None"),
    ):
        (tmp_path / "m.json").write_text(text)
        code, _, err = cli("--messages", str(tmp_path / "m.json"))
        assert code == 2
        assert message in err


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-p", "a", "--model", "/nowhere/at/all"]) == 2
    assert "there is no folder '/nowhere/at/all'" in capsys.readouterr().err


def test_a_failure_while_it_runs_is_exit_code_1(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 9 bytes.")

    monkeypatch.setattr("mlx_paged.engine.Engine._run", fail)
    code, _, err = cli("-p", "a", *PLAIN)
    assert code == 1
    assert err == "mlx-paged generate: failed: [malloc] Unable to allocate 9 bytes.\n"


def test_a_model_without_a_template_gets_the_bare_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, chat=False)
    argv = ["generate", "-p", "Hi", "-m", "5", "--num-blocks", "64", "--model", str(tmp_path)]
    assert main(argv) == 0
    assert capsys.readouterr().out == text_of("Hi", max_tokens=5) + "\n"
    assert main([*argv, "--system-prompt", "b"]) == 2
    assert "which is not in this model" in capsys.readouterr().err


def test_ctrl_c_prints_what_there_is(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_paged.engine import Engine

    step, steps = Engine.step, [0]

    def interrupted(self: Engine) -> Any:
        steps[0] += 1
        if steps[0] % 6 == 0:
            raise KeyboardInterrupt
        return step(self)

    expected = text_of("Hi", n=2, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
    monkeypatch.setattr(Engine, "step", interrupted)
    argv = ("-p", "Hi", "--temp", "1", "--seed", "3", "--n", "2", "-m", "50", *PLAIN)
    argv += ("--ignore-eos",)
    code, out, err = cli(*argv)
    assert (code, err) == (130, "")
    # What is not decided yet of the text, such as half a character, is not printed.
    first, second = re.fullmatch(r"\[1/2\]\n(.*)\n\[2/2\]\n(.*)\n", out, re.DOTALL).groups()  # type: ignore[union-attr]
    assert first
    assert expected[0].startswith(first)
    assert expected[1].startswith(second)
    code, out, _ = cli(*argv, "--json")
    assert code == 130
    said = json.loads(out)
    assert said["interrupted"] is True
    assert [len(sample["token_ids"]) for sample in said["samples"]] == [5, 5]
    assert said["samples"][0]["finish_reason"] is None


def test_a_real_ctrl_c_ends_cleanly() -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlx_paged.cli", "generate", "--model", str(folder())),
            *("-p", "Hi", "-m", "-1", "--ignore-eos", *PLAIN),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""


def test_a_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m mlx_paged.cli generate --model {folder()} -p Hi -m 60 "
        f"{' '.join(PLAIN)} | head -c 1",
        shell=True,
        capture_output=True,
        cwd=ROOT,
        timeout=120,
    )
    assert len(done.stdout) == 1
    assert done.stderr == b""


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, words in (
        (["--help"], ["COMMAND", "generate", "examples:"]),
        (
            ["generate", "--help"],
            ["tiny", "Hugging Face Hub", "examples:", "exit codes", "--trace"],
        ),
    ):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("512MB", 512 * 10**6), ("1.5 GiB", 3 * 2**29), ("2g", 2 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_text_that_is_no_utf8_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        raise SystemExit(main(["generate", "--prompt", "\udcff"]))
    assert end.value.code == 2
    assert "UTF-8" in capsys.readouterr().err
