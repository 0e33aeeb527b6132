"""The text the bundled checkpoint `tiny` is trained on, and the questions that examine it.

Everything is made here from short word lists: small facts ("Anna lives in Oslo."), chats that ask
about them, and plain text that states them again. One fact in ten, chosen by a hash of the fact,
is held out: it never occurs in training text and is all that `held_out_questions` uses.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Messages = list[dict[str, str]]

SYSTEM = "You are a helpful assistant."


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words(
    "Anna Tom Lena Paul Maria Peter Nina Oscar Julia Hugo Clara Simon Emma Felix Sara Martin Laura "
    "Jack Rosa David Ella Victor Grace Henry Alice Bruno Olga Leo Irene Max Vera Adam Helen Carl "
    "Lucy Noah"
)
CITIES = _words(
    "Oslo Rome Paris London Madrid Berlin Vienna Prague Lisbon Dublin Athens Warsaw Cairo Tokyo "
    "Delhi Lima Boston Chicago Denver Toronto Sydney Geneva Milan Porto"
)
COLOURS = _words("red blue green grey black white brown pink yellow golden")
ANIMALS = _words("cat dog horse rabbit bird fish mouse parrot turtle snake goat hamster duck pony")
CONTAINERS = _words("box bag jar basket drawer chest bowl bottle kitchen cellar garden office")
THINGS = _words(
    "coin key ring book letter candle map pen watch knife spoon stone shell button ticket photo "
    "feather lamp brush card"
)
JOBS = _words(
    "baker doctor teacher farmer painter singer nurse lawyer driver pilot sailor gardener writer "
    "cook judge dancer builder miner"
)
FOODS = _words(
    "soup bread cheese rice pasta pizza salad cake honey fruit fish beans corn chicken chocolate "
    "tomatoes lemons noodles"
)
INSTRUMENTS = _words("piano violin guitar flute drum trumpet cello harp banjo clarinet")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NUMBERS = _words(
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty "
    "forty fifty sixty seventy eighty ninety"
)
GOODS = _words("chair table sofa mirror carpet coat hat shirt bike tent radio camera")

SMALL_TALK = (
    ("Hello!", "Hello! Tell me some facts and ask me about them."),
    ("Hello.", "Hello! Tell me some facts and ask me about them."),
    ("Hi!", "Hello! Tell me some facts and ask me about them."),
    ("How are you?", "I am fine, thank you."),
    ("Who are you?", "I am a tiny language model. I answer questions about small facts."),
    ("What can you do?", "I answer questions about small facts."),
    ("Thank you.", "You are welcome."),
    ("Thank you!", "You are welcome."),
)


@dataclass(frozen=True)
class Relation:
    """What can be said and asked about a subject and an object.

    `questions` are pairs of a question and its answer. `{s}` is the subject, `{o}` the object,
    `{o1}` and `{o2}` its words. In a statement the subject is the third word before the object:
    two layers can then learn one way to find who a fact is about, and use it for all.
    """

    name: str
    subject: Callable[[random.Random], str]
    object: Callable[[random.Random], str]
    statement: str
    questions: tuple[tuple[str, str], ...]


def _one_of(words: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(words)


def _coloured(words: Sequence[str]) -> Callable[[random.Random], str]:
    return lambda rng: f"{rng.choice(COLOURS)} {rng.choice(words)}"


def _relation(
    name: str,
    subject: Callable[[random.Random], str],
    object_: Callable[[random.Random], str],
    statement: str,
    *questions: str | tuple[str, str],
) -> Relation:
    """A relation whose questions are answered by its statement unless they bring an answer."""
    pairs = tuple((q, statement) if isinstance(q, str) else q for q in questions)
    return Relation(name, subject, object_, statement, pairs)


_person = _one_of(PEOPLE)

RELATIONS: tuple[Relation, ...] = (
    _relation(
        "home",
        _person,
        _one_of(CITIES),
        "{s} lives in {o}.",
        "Where does {s} live?",
        "In which city does {s} live?",
        "Who lives in {o}?",
    ),
    _relation(
        "pet",
        _person,
        _coloured(ANIMALS),
        "{s} has a {o}.",
        "What pet does {s} have?",
        "Which animal does {s} have?",
        "Who has a {o}?",
        ("What colour is {s}'s {o2}?", "{s}'s {o2} is {o1}."),
    ),
    _relation(
        "inside",
        _one_of(CONTAINERS),
        _one_of(THINGS),
        "The {s} holds a {o}.",
        "What does the {s} hold?",
        "What is in the {s}?",
        ("Where is the {o}?", "The {o} is in the {s}."),
    ),
    _relation(
        "job",
        _person,
        _one_of(JOBS),
        "{s} is a {o}.",
        "What is {s}'s job?",
        "What does {s} do?",
        "Who is a {o}?",
    ),
    _relation(
        "age",
        _person,
        _one_of(NUMBERS),
        "{s} is now {o} years old.",
        "How old is {s}?",
        "What is {s}'s age?",
        "Whose age is {o}?",
    ),
    _relation(
        "food",
        _person,
        _one_of(FOODS),
        "{s} likes eating {o}.",
        "What does {s} like eating?",
        "What is {s}'s favourite food?",
        "Who likes eating {o}?",
    ),
    _relation(
        "music",
        _person,
        _one_of(INSTRUMENTS),
        "{s} plays the {o}.",
        "What does {s} play?",
        "Which instrument does {s} play?",
        "Who plays the {o}?",
    ),
    _relation(
        "colleague",
        _person,
        _person,
        "{s} works with {o}.",
        "Who does {s} work with?",
        "Who works with {o}?",
    ),
    _relation(
        "visit",
        _person,
        _one_of(DAYS),
        "{s} comes on {o}.",
        "When does {s} come?",
        "On which day does {s} come?",
        "Who comes on {o}?",
    ),
    _relation(
        "price",
        _one_of(GOODS),
        _one_of(NUMBERS),
        "The {s} is worth {o} euros.",
        "What is the {s} worth?",
        "How much is the {s} worth?",
    ),
)


@dataclass(frozen=True)
class Fact:
    """One small fact, such as (Anna, home, Oslo)."""

    subject: str
    relation: Relation
    object: str

    @property
    def held_out(self) -> bool:
        """Whether the fact is kept out of all training text: one in ten, by SHA-256."""
        name = f"{self.subject}|{self.relation.name}|{self.object}"
        return hashlib.sha256(name.encode()).digest()[0] % 10 == 0

    def fill(self, template: str) -> str:
        first, _, second = self.object.partition(" ")
        return template.format(s=self.subject, o=self.object, o1=first, o2=second)

    def state(self) -> str:
        return self.fill(self.relation.statement)

    def ask(self, rng: random.Random) -> tuple[str, str]:
        """A question about the fact, and its answer."""
        question, answer = rng.choice(self.relation.questions)
        return self.fill(question), self.fill(answer)


def make_facts(rng: random.Random, count: int, held_out: bool) -> list[Fact]:
    """`count` facts, all held out or none, that do not contradict each other.

    In one list a subject has one object per relation and an object (a pet: its colour) has one
    subject, so every question has exactly one answer. There are more facts than people and more
    than relations: neither the subject nor the relation alone finds the answer.
    """
    while True:
        relations = rng.sample(RELATIONS, rng.randint(max(1, count // 5), max(2, count // 2)))
        some = count + 1 if len(relations) == 1 else 2 * count // 3 + 2
        people = rng.sample(PEOPLE, min(len(PEOPLE), some))
        facts: list[Fact] = []
        taken: set[tuple[str, str]] = set()
        # Few people and few relations may not have enough facts of one kind: draw others then.
        for _ in range(50 * count):
            relation = rng.choice(relations)
            subject = rng.choice(people) if relation.subject is _person else relation.subject(rng)
            fact = Fact(subject, relation, relation.object(rng))
            first = fact.object.partition(" ")[0]
            keys = {(relation.name, f"s {subject}"), (relation.name, f"o {first}")}
            if not keys & taken and subject != fact.object and fact.held_out == held_out:
                taken |= keys
                facts.append(fact)
            if len(facts) == count:
                return facts


def chat_text(messages: Messages, answer_next: bool = False) -> str:
    """The messages in ChatML, as the checkpoint's chat template writes them."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": SYSTEM}, *messages]
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + ("<|im_start|>assistant\n" if answer_next else "")


def _opening(rng: random.Random, facts: Sequence[Fact]) -> tuple[Messages, str]:
    """A system message and the facts: now and then the facts are in the system message."""
    told = " ".join(fact.state() for fact in facts)
    place = rng.random()
    if place < 0.15:
        return [{"role": "system", "content": told}], ""
    if place < 0.3:
        return [{"role": "system", "content": f"{SYSTEM} {told}"}], ""
    return [{"role": "system", "content": SYSTEM}], told


def make_chat(rng: random.Random, facts: Sequence[Fact], questions: int, known: float) -> Messages:
    """A chat about the facts with `questions` questions, each fact once before any twice.

    A share of 1 - `known` of the questions is small talk instead. Now and then the last fact is
    told later, with one of the questions.
    """
    late = rng.randint(1, questions) if len(facts) > 2 and rng.random() < 0.3 else 0
    told = list(facts[:-1]) if late else list(facts)
    messages, start = _opening(rng, told)
    queue: list[Fact] = []
    for turn in range(questions):
        if turn == late and late:
            start, told = facts[-1].state(), list(facts)
            queue.append(facts[-1])
        if rng.random() < known:
            queue = queue or rng.sample(told, len(told))
            question, answer = queue.pop().ask(rng)
        else:
            question, answer = rng.choice(SMALL_TALK)
        content = f"{start} {question}" if start else question
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
        start = ""
    return messages


class Passage(NamedTuple):
    """A training text and the character ranges that follow from what comes before them."""

    text: str
    answers: list[tuple[int, int]]


def chat_passage(rng: random.Random, facts: int, questions: int) -> Passage:
    messages = make_chat(rng, make_facts(rng, facts, held_out=False), questions, known=0.97)
    text, answers = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        start = len(text)
        text += f"{message['content']}<|im_end|>\n"
        if message["role"] == "assistant":
            answers.append((start, len(text)))
    return Passage(text, answers)


def plain_passage(rng: random.Random, facts: int, sentences: int) -> Passage:
    """Text without ChatML: each sentence states a new fact or, as often, an earlier one again.

    Some of the repetitions answer a question that comes before them.
    """
    new = make_facts(rng, facts, held_out=False)
    told: list[Fact] = []
    text, answers = "", []
    for _ in range(sentences):
        if new and (not told or rng.random() < 0.5):
            told.append(new.pop())
            text += f"{told[-1].state()} "
            continue
        fact = rng.choice(told)
        if rng.random() < 0.3:
            question, sentence = fact.ask(rng)
            text += f"{question} "
            start = len(text) - 1
        else:
            sentence = fact.state()
            # The choice of the fact is free; its object follows from the text.
            start = len(text) + sentence.index(fact.object) - 1
        text += f"{sentence} "
        answers.append((start, len(text) - 1))
    return Passage(text.rstrip() + "<|endoftext|>", answers)


class HeldOutQuestion(NamedTuple):
    """A chat that ends in a question, and the one right answer."""

    messages: Messages
    answer: str


def held_out_questions(count: int, seed: int = 0, max_facts: int = 16) -> list[HeldOutQuestion]:
    """`count` questions whose facts, all of them, occur in no training text.

    Each is a chat with 2 to `max_facts` facts and up to seven earlier questions, made by the same
    rules as training chats. `messages` goes into the tokenizer's chat template; greedy decoding
    gives `answer` and then <|im_end|>. Equal arguments give equal questions.
    """
    if count < 0:
        raise ValueError(f"count is {count}; it must not be negative")
    if max_facts < 2:
        raise ValueError(f"max_facts is {max_facts}; a question needs at least 2")
    rng = random.Random(f"held out {seed}")
    found = []
    for _ in range(count):
        facts = make_facts(rng, rng.randint(2, max_facts), held_out=True)
        messages = make_chat(rng, facts, rng.randint(1, 8), known=1.0)
        found.append(HeldOutQuestion(messages[:-1], messages[-1]["content"]))
    return found
