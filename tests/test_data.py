"""scripts.data and scripts.formats on small files in the data sets' own formats."""

from __future__ import annotations

import gzip
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from scripts import data, formats
from scripts.data import load_requests

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9951690,396,109"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1000, "output_length": 50, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 513, "output_length": 5, "hash_ids": [0, 2]}\n'
)
TURNS = (
    "conversation,turn,prompt_tokens,answer_tokens,shared_prefix_tokens\n"
    "0,0,63,244,0\n0,1,353,320,307\n1,0,46,71,24\n"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer that makes one token of each word."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    return str(folder)


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def words(count: int) -> str:
    return " ".join(["word"] * count)


def sharegpt(*lengths: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"r{i}",
            "conversations": [
                {"from": ("human", "gpt")[j % 2], "value": words(n)} for j, n in enumerate(record)
            ],
        }
        for i, record in enumerate(lengths)
    ]


def pairs(requests: data.Requests) -> list[tuple[int, int]]:
    return list(zip(requests.prompt.tolist(), requests.answer.tolist(), strict=True))


@pytest.mark.parametrize("name", ["sharegpt", "alpaca"])
def test_committed_lengths_are_5000_that_pass_the_filter(name: str) -> None:
    requests = load_requests(name)
    assert len(requests) == 5000
    assert requests.family == name
    assert all(data.is_served(*pair) for pair in pairs(requests))


def test_lengths_leave_out_requests_without_tokens(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "prompt_tokens,answer_tokens\n3,4\n\n5,0\n7,8\n")
    requests = load_requests(str(path))
    assert pairs(requests) == [(3, 4), (7, 8)]
    assert requests.left_out == 1
    assert pairs(load_requests(str(path), requests=1)) == [(3, 4)]


def test_azure_trace(tmp_path: Path) -> None:
    requests = load_requests(str(write(tmp_path / "azure.csv", AZURE)))
    assert pairs(requests) == [(374, 44), (396, 109)]
    assert requests.arrival is not None
    np.testing.assert_allclose(requests.arrival, [0, 4.314579], atol=1e-6)


def test_mooncake_trace_gzipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    requests = load_requests(str(path))
    assert pairs(requests) == [(1000, 50), (513, 5)]
    assert requests.arrival is not None
    assert requests.arrival.tolist() == [0, 3]
    assert formats.read_mooncake(path).hash_ids == [[0, 1], [0, 2]]


def test_turns(tmp_path: Path) -> None:
    path = write(tmp_path / "turns.csv", TURNS)
    assert formats.read_turns(path).shared.tolist() == [0, 307, 24]
    assert pairs(load_requests(str(path))) == [(63, 244), (353, 320), (46, 71)]


@pytest.mark.parametrize("layout", ["array", "indented", "lines", "gzip"])
def test_sharegpt_is_selected_by_the_rule_of_the_serving_benchmark(
    tmp_path: Path, tokenizer: str, layout: str
) -> None:
    # Kept: both at the lower bound, prompt at its upper bound, total at its upper bound.
    kept = [(4, 4), (1024, 1024), (10, 2038)]
    dropped = [(3, 9), (9, 3), (1025, 4), (11, 2038)]
    records = sharegpt(*kept, *dropped, (5,), (), (7, 8, 9))
    text = json.dumps(records, indent=2 if layout == "indented" else None)
    if layout == "lines":
        text = "\n".join(map(json.dumps, records))
    path = write(tmp_path / "sharegpt.json", text)
    if layout == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    requests = load_requests(str(path), tokenizer=tokenizer)
    assert sorted(pairs(requests)) == sorted([*kept, (7, 8)])


def test_conversations_are_shuffled_by_the_seed_and_cut(tmp_path: Path, tokenizer: str) -> None:
    lengths = [(4 + i, 5) for i in range(50)]
    path = write(tmp_path / "sharegpt.json", json.dumps(sharegpt(*lengths)))
    order = list(range(50))
    random.Random(3).shuffle(order)
    requests = load_requests(str(path), requests=20, tokenizer=tokenizer, seed=3)
    assert pairs(requests) == [lengths[i] for i in order[:20]]


def test_alpaca_joins_instruction_and_input(tmp_path: Path, tokenizer: str) -> None:
    records = [
        {"instruction": words(4), "input": words(3), "output": words(9)},
        {"instruction": words(5), "input": "", "output": words(6)},
    ]
    path = write(tmp_path / "alpaca.json", json.dumps(records))
    requests = load_requests(str(path), tokenizer=tokenizer)
    assert sorted(pairs(requests)) == [(5, 6), (7, 9)]
    assert formats.read_pairs(path, "alpaca")[0][0] == f"{words(4)}\n{words(3)}"


def test_counts_are_cached_until_the_file_changes(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "sharegpt.json", json.dumps(sharegpt((5, 6))))
    assert pairs(load_requests(str(path), tokenizer=tokenizer)) == [(5, 6)]

    def fail(_: str) -> data.Counter:
        raise AssertionError("counted again")

    with monkeypatch.context() as patch:
        patch.setattr(data, "token_counter", fail)
        assert pairs(load_requests(str(path), tokenizer=tokenizer)) == [(5, 6)]
        with pytest.raises(AssertionError):
            load_requests(str(path), tokenizer=tokenizer, seed=1)
    write(path, json.dumps(sharegpt((7, 8))))
    assert pairs(load_requests(str(path), tokenizer=tokenizer)) == [(7, 8)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("prompt_tokens,answer_tokens\n3,4\n5\n", 3),
        ("prompt_tokens,answer_tokens\n3,4\n\n5,six\n", 4),
        ("prompt_tokens,answer_tokens\n3,4\n-5,6\n", 3),
        ("prompt_tokens,answer_tokens\n3,99999999999\n", 2),
        ("what,is,this\n1,2,3\n", 1),
        (AZURE.replace("2023-11-16 18:15:50", "yesterday"), 3),
        (AZURE.replace("18:15:50", "18:15:40"), 3),
        (MOONCAKE.replace("[0, 2]", "[0]"), 2),
        (MOONCAKE.replace('"output_length": 5,', ""), 2),
        (MOONCAKE[:-10], 2),
        (TURNS.replace("307", "354"), 3),
        ('[\n{"conversations": []},\n{"conversations": 5}\n]', 3),
        ('[\n{"conversations": []},\n{"conversations": [}\n]', 3),
        ('[\n{"conversations": []}\n{"conversations": []}\n]', 3),
        ('[\n{"conversations": []}\n', 3),
        ('[{"conversations": []}]\n\n{}', 3),
        ('[\n{"conversations": [{"value": "a"}, {"value": 3}]}\n]', 2),
        ('[\n{"instruction": "a", "output": "b"},\n{"instruction": "a"}\n]', 3),
        ("[\n5\n]", 2),
        ('{"something": "else"}', 1),
    ],
)
def test_a_broken_file_names_its_line(tmp_path: Path, tokenizer: str, text: str, line: int) -> None:
    path = write(tmp_path / "broken", text)
    with pytest.raises(ValueError, match=r"broken:\d+: ") as caught:
        _read(path, tokenizer)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def _read(path: Path, tokenizer: str) -> None:
    if formats.kind_of(path) == "turns":
        formats.read_turns(path)
    load_requests(str(path), tokenizer=tokenizer)


def test_damaged_bytes_name_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"prompt_tokens,answer_tokens\n3,4\n\xff,5\n")
    with pytest.raises(ValueError, match=r"bytes.csv:3: not UTF-8"):
        load_requests(str(path))
    whole = gzip.compress(b"prompt_tokens,answer_tokens\n" + b"31,41\n" * 50_000, mtime=0)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"bytes.csv:\d+: damaged gzip"):
        load_requests(str(path))


@pytest.mark.parametrize("text", ["", "\n\n", "[]", "prompt_tokens,answer_tokens\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "empty", text)
    with pytest.raises(ValueError, match="empty"):
        load_requests(str(path))


def test_a_record_longer_than_a_piece_of_the_file(tmp_path: Path) -> None:
    long = "x" * (3 << 20)
    text = json.dumps([{"conversations": [{"value": long}, {"value": "y"}]}] * 2, indent=1)
    path = write(tmp_path / "long.json", text)
    assert [line for line, _ in formats.records(path)] == [2, 12]
    assert formats.read_pairs(path, "sharegpt") == [(long, "y")] * 2


def test_unknown_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file and none of sharegpt"):
        load_requests("sharegtp")
    with pytest.raises(ValueError, match="hub:sharegpt and hub:alpaca"):
        load_requests("hub:dolly")
    with pytest.raises(ValueError, match="requests is -1"):
        load_requests("sharegpt", requests=-1)
    path = write(tmp_path / "s.json", json.dumps(sharegpt((5, 6))))
    with pytest.raises(ValueError, match=r"without a tokenizer\.json"):
        load_requests(str(path), tokenizer=str(tmp_path))


def test_hub_sharegpt_asks_for_the_pinned_file(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "hub.json", json.dumps(sharegpt((5, 6))))
    asked: list[Any] = []

    def download(*args: str, **kwargs: str) -> str:
        asked.append((args, kwargs))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert pairs(load_requests("hub:sharegpt", tokenizer=tokenizer)) == [(5, 6)]
    assert asked == [
        (
            (
                "anon8231489123/ShareGPT_Vicuna_unfiltered",
                "ShareGPT_V3_unfiltered_cleaned_split.json",
            ),
            {
                "repo_type": "dataset",
                "revision": "192ab2185289094fc556ec8ce5ce1e8e587154ca",
            },
        )
    ]


def test_hub_alpaca_asks_for_the_pinned_revision(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(*args: str, **kwargs: str) -> list[dict[str, str]]:
        asked.append((args, kwargs))
        return [{"instruction": words(5), "input": "", "output": words(6), "text": "-"}]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert pairs(load_requests("hub:alpaca", tokenizer=tokenizer)) == [(5, 6)]
    assert asked == [
        (
            ("tatsu-lab/alpaca",),
            {"split": "train", "revision": "dce01c9b08f87459cf36a430d809084718273017"},
        )
    ]


def test_what_the_hub_does_not_give_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str, **__: str) -> str:
        raise RuntimeError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(OSError, match=r"cannot fetch anon.* \(no network\); name a local file"):
        load_requests("hub:sharegpt")


def test_main_prints_and_writes(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "s.json", json.dumps(sharegpt((5, 6), (9, 10))))
    out = tmp_path / "out.csv"
    argv = ["--data", str(path), "--tokenizer", tokenizer, "--csv", str(out), "--json"]
    assert data.main([*argv, "--plot", str(tmp_path / "plot")]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1])["s.json"]["prompt_mean"] == 7
    assert sorted(pairs(load_requests(str(out)))) == [(5, 6), (9, 10)]
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
