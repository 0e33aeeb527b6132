"""The bundled checkpoint `tiny`, its text and its training script, without the engine."""

from __future__ import annotations

import json
import random
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import load
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from scripts import tiny_text, train_tiny

TINY = Path(__file__).parents[1] / "models" / "tiny"
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_folder_holds_a_small_float32_checkpoint() -> None:
    config = json.loads((TINY / "config.json").read_text())
    weights = mx.load(str(TINY / "model.safetensors"))
    assert isinstance(weights, dict)
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 4_000_000
    assert config["model_type"] == "qwen2"
    assert config["hidden_size"] // config["num_attention_heads"] == 64
    assert config["num_attention_heads"] == 2 * config["num_key_value_heads"] == 4
    assert config["tie_word_embeddings"]
    assert "lm_head.weight" not in weights
    assert all(weight.dtype == mx.float32 for weight in weights.values())
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], 256)
    assert weights["model.layers.1.self_attn.k_proj.bias"].shape == (128,)
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]


def test_config_is_the_one_the_script_writes() -> None:
    assert json.loads((TINY / "config.json").read_text()) == train_tiny.CONFIG


@given(st.text(max_size=60))
@settings(deadline=None)
def test_any_text_comes_back_from_its_tokens(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_template_writes_the_chat_the_model_was_trained_on() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    assert tokenizer.eos_token == "<|im_end|>"
    assert [tokenizer.convert_tokens_to_ids(name) for name in train_tiny.SPECIAL] == [0, 1, 2]
    own_system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    for messages in (own_system, tiny_text.held_out_questions(1)[0].messages, own_system[1:]):
        for answer_next in (False, True):
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer_next
            )
            assert text == tiny_text.chat_text(messages, answer_next)
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=answer_next, return_dict=False
            )
            assert ids == TOKENIZER.encode(text).ids


@pytest.mark.parametrize("held_out", [False, True])
@given(seed=st.integers(0, 2**32), count=st.integers(2, 16))
@settings(max_examples=20, deadline=None)
def test_facts_are_of_one_kind_and_do_not_contradict(held_out: bool, seed: int, count: int) -> None:
    facts = tiny_text.make_facts(random.Random(seed), count, held_out)
    assert len(facts) == count
    assert {fact.held_out for fact in facts} == {held_out}
    for facts_of in ("subject", "object"):
        names = [(fact.relation.name, getattr(fact, facts_of)) for fact in facts]
        assert len(set(names)) == count


def test_training_text_states_no_held_out_fact() -> None:
    rng = random.Random(3)
    text = "".join(train_tiny.make_passage(rng, 256).text for _ in range(500))
    stated = [q.answer in text for q in tiny_text.held_out_questions(300, 4)]
    assert not any(stated)
    # The same search finds facts of the other kind: the text is long enough to say something.
    facts = tiny_text.make_facts(random.Random(4), 16, held_out=False)
    assert any(fact.state() in text for fact in facts)


def test_marked_ranges_of_a_passage_are_its_answers() -> None:
    passage = tiny_text.chat_passage(random.Random(0), facts=4, questions=3)
    marked = [passage.text[start:end] for start, end in passage.answers]
    assert len(marked) == 3
    assert all(part.endswith("<|im_end|>\n") and "im_start" not in part for part in marked)
    plain = tiny_text.plain_passage(random.Random(0), facts=3, sentences=12)
    assert all(plain.text[end - 1] in ".!?" for _, end in plain.answers)


def test_held_out_questions_repeat_with_their_seed() -> None:
    first = tiny_text.held_out_questions(20, 7)
    assert first == tiny_text.held_out_questions(20, 7)
    assert first != tiny_text.held_out_questions(20, 8)
    assert all(question.messages[-1]["role"] == "user" for question in first)


def test_held_out_questions_refuse_what_they_cannot_make() -> None:
    with pytest.raises(ValueError, match="count is -1"):
        tiny_text.held_out_questions(-1)
    with pytest.raises(ValueError, match="max_facts is 1"):
        tiny_text.held_out_questions(1, max_facts=1)


def test_tiny_answers_held_out_questions_under_mlx_lm() -> None:
    model = load(str(TINY))[0]
    assert train_tiny.examine(model, TOKENIZER, 20, seed=11) >= 0.95


def test_answer_follows_the_fact_in_the_prompt() -> None:
    model = load(str(TINY))[0]
    for city in ("Oslo", "Cairo", "Denver"):
        content = f"Tom likes rice. Anna lives in {city}. Where does Anna live?"
        messages = [{"role": "user", "content": content}]
        ids = TOKENIZER.encode(tiny_text.chat_text(messages, answer_next=True)).ids
        prompt = len(ids)
        while ids[-1] != 2 and len(ids) < prompt + 20:
            ids.append(int(model(mx.array([ids]))[0, -1].argmax().item()))
        assert TOKENIZER.decode(ids[prompt:]) == f"Anna lives in {city}."


def test_script_trains_a_folder_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_tiny, "TOKENS_PER_STEP", 128)
    arguments = ["--steps", "1", "--questions", "1", "--out", str(tmp_path / "made")]
    assert train_tiny.main(arguments) == 0
    assert "of 1 held-out questions" in capsys.readouterr().out
    model, tokenizer = load(str(tmp_path / "made"))[:2]
    assert model(mx.array([[1, 2]])).shape == (1, 2, train_tiny.VOCAB)
    # The seed decides the tokenizer: it is the bundled one again.
    assert (tmp_path / "made/tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert tokenizer.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--rate", "0"], ["--rate", "nan"], ["--questions", "0"]]
)
def test_script_refuses_arguments_that_make_no_sense(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_tiny.main(arguments)
    assert arguments[0] in capsys.readouterr().err
