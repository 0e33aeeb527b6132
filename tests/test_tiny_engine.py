"""The bundled model answers about facts it was not trained on: a wrong block, a wrong answer."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_paged import Engine, SamplingParams, load
from scripts.tiny_text import held_out_questions

QUESTIONS = held_out_questions(200, seed=3)
LEAST = 190  # right answers: 95 %


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    return load("tiny")


def ask_all(engine: Engine, together: int, preempt: bool = False) -> list[str]:
    """The answers to all questions, so many in the engine at a time.

    With `preempt`, every fourth step takes the blocks of the youngest.
    """
    asked: dict[int, int] = {}
    answers = [""] * len(QUESTIONS)
    waiting = list(enumerate(QUESTIONS))[::-1]
    steps = 0
    while waiting or engine.has_work:
        while waiting and len(asked) < together:
            number, question = waiting.pop()
            assert engine.tokenizer is not None
            ids = engine.tokenizer.apply_chat_template(
                question.messages, add_generation_prompt=True, tokenize=True
            )
            asked[engine.add(ids, SamplingParams(max_tokens=40))] = number
        for output in engine.step():
            answers[asked[output.request_id]] += output.text
            if output.finish_reason is not None:
                del asked[output.request_id]
        steps += 1
        if preempt and steps % 4 == 0 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        if steps % 50 == 0:
            engine.check()
    assert engine.stats.blocks_used == 0
    return answers


@pytest.fixture(scope="module")
def alone(tiny: tuple[Any, Any]) -> list[str]:
    return ask_all(Engine(*tiny, num_blocks=100), together=1)


def count_equal(answers: list[str], others: list[str]) -> int:
    return sum(a == b for a, b in zip(answers, others, strict=True))


def test_it_answers_questions_alone(alone: list[str]) -> None:
    assert count_equal(alone, [question.answer for question in QUESTIONS]) >= LEAST


def test_it_gives_the_same_answers_in_batches_with_preemption(
    tiny: tuple[Any, Any], alone: list[str]
) -> None:
    # Room for half of sixteen usual prompts.
    engine = Engine(*tiny, num_blocks=100, max_num_seqs=16, max_batched_tokens=256)
    together = ask_all(engine, together=16, preempt=True)
    assert count_equal(together, [question.answer for question in QUESTIONS]) >= LEAST
    assert count_equal(together, alone) >= 198  # two near-ties may round the other way
    assert engine.stats.preemptions >= 16
    assert engine.stats.tokens_reused > 0
