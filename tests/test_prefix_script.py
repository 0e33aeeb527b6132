"""scripts.prefix and scripts.reuse: closed forms, replays through the pool, prompts A, B and C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_paged.models.config import Qwen2Config
from mlx_paged.models.qwen2 import Qwen2
from scripts import prefix as script
from scripts.formats import Lengths, Mooncake, Turns, read_turns
from scripts.prefix import TURNS, first_conversations, make_prompts, through_engine
from scripts.reuse import interleave, replay, trace_of_mooncake, trace_of_turns, unlimited

# Block size: tokens reused, reused of first and of later turns in %.
SHAREGPT = {
    1: (23628203, 0.163638, 0.941995),
    4: (23572152, 0.158775, 0.940387),
    8: (23511696, 0.156295, 0.938265),
    16: (23323008, 0.132127, 0.93394),
    32: (22947072, 0.084049, 0.925313),
    64: (22490752, 0.074893, 0.907959),
    128: (21622144, 0.069436, 0.873251),
    256: (19933184, 0.062635, 0.805232),
    512: (16544768, 0.054861, 0.66795),
}


@pytest.fixture(scope="module")
def turns() -> Turns:
    return read_turns(TURNS)


@pytest.fixture(scope="module")
def model() -> Qwen2:
    mx.random.seed(0)
    model = Qwen2(Qwen2Config(64, 2, 96, 4, 2, 1e-6, 256))
    mx.eval(model.parameters())
    return model


def conversations(*lengths: list[tuple[int, int]]) -> Turns:
    """Conversations given as (tokens the user adds, answer tokens) a turn; nothing else shared."""
    rows = []
    for number, one in enumerate(lengths):
        history = 0
        for turn, (added, answer) in enumerate(one):
            rows.append((number, turn, history + added, answer, history))
            history += added + answer
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Turns(*columns)


CONVERSATIONS = st.lists(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5),
    min_size=1,
    max_size=6,
).map(lambda lengths: conversations(*lengths))


def test_sharegpt_turns_exactly(turns: Turns) -> None:
    for size, (tokens, first, later) in SHAREGPT.items():
        figures = unlimited(turns, size)
        assert figures["reused_tokens"] == tokens
        assert (figures["first_turn_fraction"], figures["later_turn_fraction"]) == (first, later)


def test_a_pool_that_keeps_everything_reuses_what_the_closed_form_says(turns: Turns) -> None:
    trace = trace_of_turns(turns, 512)
    assert len(trace.requests) == len(turns)
    assert replay(trace)["reused_tokens"] == SHAREGPT[512][0]
    assert replay(trace, to_the_token=True)["reused_tokens"] == SHAREGPT[1][0]


@given(CONVERSATIONS, st.integers(1, 20), st.integers(1, 4))
def test_replays_of_conversations(turns: Turns, block_size: int, number: int) -> None:
    trace = trace_of_turns(turns, block_size, number)
    everything = replay(trace)
    assert everything["reused_tokens"] == unlimited(turns, block_size)["reused_tokens"]
    to_the_token = replay(trace, to_the_token=True)
    assert to_the_token["reused_tokens"] == unlimited(turns, 1)["reused_tokens"]
    largest = max(len(request.blocks) for request in trace.requests)
    for blocks in (1, largest, 2 * largest):
        limited = replay(trace, blocks)
        assert limited["reused_tokens"] <= everything["reused_tokens"]
        assert limited["too_large"] == sum(len(r.blocks) > blocks for r in trace.requests)


def test_the_least_recently_used_conversation_is_forgotten() -> None:
    # Two conversations of three turns; a turn adds one block of 4 tokens, half of it the answer.
    turns = conversations([(2, 2)] * 3, [(2, 2)] * 3)
    in_turn = trace_of_turns(turns, 4, conversations=2)
    assert replay(in_turn, 6)["reused_tokens"] == 2 * (4 + 8)
    # Room for one conversation: its second turn still finds the first, its third only that.
    assert replay(in_turn, 3)["reused_tokens"] == 4 + 4 + 4 + 0
    one_by_one = trace_of_turns(turns, 4)
    assert replay(one_by_one, 3)["reused_tokens"] == 2 * (4 + 8)
    assert replay(one_by_one, 3)["evictions"] == 3


@given(CONVERSATIONS, st.integers(1, 8))
def test_interleaving_keeps_every_turn_and_its_order(turns: Turns, number: int) -> None:
    order = interleave(turns, number)
    assert sorted(order) == list(range(len(turns)))
    for conversation in set(turns.conversation.tolist()):
        rows = [row for row in order if turns.conversation[row] == conversation]
        assert rows == sorted(rows)


def test_mooncake_blocks_can_be_joined() -> None:
    lengths = Lengths(np.array([2048, 1537, 1024]), np.array([5, 5, 5]))
    mooncake = Mooncake(lengths, [[0, 1, 2, 3], [0, 1, 2, 7], [0, 1]])
    # Of the third prompt only one block: its last token is computed.
    assert replay(trace_of_mooncake(mooncake))["reused_tokens"] == 1536 + 512
    assert replay(trace_of_mooncake(mooncake, 1024))["reused_tokens"] == 1024
    with pytest.raises(ValueError, match="block size is 100"):
        trace_of_mooncake(mooncake, 100)


def test_the_first_conversations() -> None:
    turns = conversations([(5, 5)] * 2, [(5, 5)], [(5, 5)] * 3)
    assert len(first_conversations(turns, 2)) == 3
    assert len(first_conversations(turns, 0)) == 6
    assert len(first_conversations(turns, 9)) == 6
    with pytest.raises(ValueError, match="sample is -1"):
        first_conversations(turns, -1)


def test_prompts_share_85_tokens_and_none() -> None:
    prompts = make_prompts(256)
    assert [len(prompt) for prompt in prompts.values()] == [103, 105, 90]
    assert prompts["A"][:85] == prompts["B"][:85]
    assert not set(prompts["A"][85:]) & set(prompts["B"][85:])
    assert not set(prompts["A"]) & set(prompts["C"])


@pytest.mark.parametrize(
    ("block_size", "blocks", "tokens"),
    [(1, 102 + 85, [0, 102, 85, 0]), (16, 6 + 5, [0, 96, 80, 0]), (64, 1 + 1, [0, 64, 64, 0])],
)
def test_prompts_through_the_engine(
    model: Qwen2, block_size: int, blocks: int, tokens: list[int]
) -> None:
    rows = through_engine(model, block_size)
    assert [row["tokens_not_computed"] for row in rows] == tokens
    assert sum(row["blocks_found"] for row in rows) == blocks
    assert [row["tokens_not_computed_to_the_token"] for row in rows] == [0, 102, 85, 0]
    assert [row["shared_with_a"] for row in rows] == [0, 103, 85, 0]
    assert all(row["same"] for row in rows)


def test_main_on_small_files(
    tmp_path: Path,
    model: Qwen2,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("mlx_paged.loader.load", lambda _: (model, None))
    turns = tmp_path / "turns.csv"
    turns.write_text(
        "conversation,turn,prompt_tokens,answer_tokens,shared_prefix_tokens\n"
        "0,0,63,244,0\n0,1,353,320,307\n1,0,46,71,24\n"
    )
    trace = tmp_path / "trace.jsonl"
    line: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 5}
    trace.write_text("".join(json.dumps(line | {"hash_ids": [0, n]}) + "\n" for n in (1, 2)))
    argv = ["--data", str(turns), str(trace), "--plot", str(tmp_path / "plot"), "--json"]
    assert script.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = json.loads(lines[-1])
    assert [row["tokens_not_computed"] for row in figures["engine"]] == [0, 96, 80, 0]
    assert figures["turns.csv"]["unlimited"]["16"]["reused_tokens"] == 304 + 16
    assert figures["turns.csv"]["lru"][0]["open"]["reused_tokens"] == 304 + 16
    assert figures["trace.jsonl"]["unlimited"]["512"]["reused_tokens"] == 512
    assert (tmp_path / "plot.png").is_file()


def test_files_without_prefixes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sharegpt_5000\.csv: holds no prefixes"):
        script.main(["--data", str(TURNS.parent / "sharegpt_5000.csv"), "--model", "none"])
