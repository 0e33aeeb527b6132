"""What both sides are given to do: requests, made anew for every repetition."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from typing import Any, ClassVar

from mlx_paged.options import parse_bytes
from scripts.data import load_requests

Tokens = list[int]

_NAMES = ("Anna", "Tom", "Lena", "Paul", "Maria", "Peter", "Nina", "Oscar", "Julia", "Hugo")
_PLACES = ("Oslo", "Lima", "Cairo", "Turin", "Quebec", "Kyoto", "Bergen", "Porto", "Dakar")
_SENTENCES = (
    "{name} moved from {place} to {other} {n} years ago and still misses the sea.",
    "The train to {place} leaves at {n} minutes past nine, unless {name} is late again.",
    "In {place}, {name} keeps {n} bees, two goats and a very old dog.",
    "{name} asked whether the library in {other} has {n} copies of the same book.",
    "It rained for {n} days, so the market in {place} was moved under the bridge.",
    "Between {place} and {other} there are {n} villages, and {name} has slept in each.",
)


@dataclass(frozen=True)
class Request:
    """One prompt and how many tokens follow it.

    Attributes:
        prompt: its tokens; where it follows another request, those after that one's answer.
        new: tokens to generate.
        follows: the request whose prompt and answer come before this prompt.
    """

    prompt: Tokens
    new: int
    follows: int | None = None


@dataclass(frozen=True)
class Workload:
    """Requests that arrive all at once or, if `sequential`, each after the last one's end.

    Attributes:
        samples: answers to each request.
        memory: bytes that keys and values may take, where the workload limits them.
        whole: whether these are the bytes of all that is not weights, working memory included.
    """

    name: str
    requests: tuple[Request, ...]
    samples: int = 1
    memory: int | None = None
    whole: bool = False
    sequential: bool = False

    @property
    def streams(self) -> int:
        """Answers in all."""
        return len(self.requests) * self.samples

    @property
    def lengths(self) -> list[int]:
        """Tokens of each whole prompt."""
        found: list[int] = []
        for request in self.requests:
            before = 0
            if request.follows is not None:
                before = found[request.follows] + self.requests[request.follows].new
            found.append(before + len(request.prompt))
        return found

    @property
    def window(self) -> int:
        """Tokens of the longest prompt with its answer."""
        pairs = zip(self.lengths, self.requests, strict=True)
        return max(length + request.new for length, request in pairs)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all prompts and answers; what all prompts begin with is counted once."""
        prompts = [r.prompt for r in self.requests if r.follows is None]
        columns = zip(*prompts, strict=False)
        common = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        total = sum(len(r.prompt) + r.new * self.samples for r in self.requests)
        return total - common * max(0, len(prompts) - 1)

    def prompt(self, index: int, answers: Mapping[int, Sequence[int]]) -> Tokens:
        """The whole prompt of a request, given the answers to earlier ones."""
        request = self.requests[index]
        if request.follows is None:
            return request.prompt
        before = self.prompt(request.follows, answers)
        return [*before, *answers[request.follows], *request.prompt]


class Prompts:
    """Makes prompts of any length: plain text for a tokenizer, else random ids.

    Args:
        vocab_size: ids are below it.
        tokenizer: with `encode`; None for a model without one.
    """

    CORPUS = 50_000  # tokens that text is cut from

    def __init__(self, vocab_size: int, tokenizer: Any = None) -> None:
        self._vocab_size = vocab_size
        self._corpus: Tokens = []
        if tokenizer is not None:
            rng = random.Random(0)
            while len(self._corpus) < self.CORPUS:
                lines = [
                    rng.choice(_SENTENCES).format(
                        name=rng.choice(_NAMES),
                        place=rng.choice(_PLACES),
                        other=rng.choice(_PLACES),
                        n=rng.randrange(2, 60),
                    )
                    for _ in range(20)
                ]
                self._corpus += tokenizer.encode(" ".join(lines))

    def make(self, rng: random.Random, length: int) -> Tokens:
        """A prompt of exactly `length` tokens."""
        if not self._corpus:
            return [rng.randrange(self._vocab_size) for _ in range(length)]
        start = rng.randrange(len(self._corpus))
        text = self._corpus[start : start + length]
        while len(text) < length:
            text += self._corpus[: length - len(text)]
        return text


@dataclass(frozen=True)
class Context:
    """What sizes turn into requests with."""

    prompts: Prompts
    bytes_per_token: int
    data: str = "sharegpt"


@dataclass(frozen=True)
class Sizes(ABC):
    """The sizes of a workload, each of which can be set."""

    name: ClassVar[str]
    about: ClassVar[str]
    zero: ClassVar[frozenset[str]] = frozenset({"memory", "whole"})  # sizes that may be 0

    @abstractmethod
    def build(self, context: Context, seed: int) -> Workload:
        """The workload, with prompts of its own for every seed."""

    def changed(self, key: str, text: str) -> Sizes:
        """With one size set from the command line.

        Raises:
            ValueError: there is no such size, or the value is none.
        """
        known = {field.name: field.type for field in fields(self)}
        if key not in known:
            raise ValueError(f"{self.name} has no size {key!r}; it has {', '.join(known)}")
        try:
            if key == "memory":
                value: float = parse_bytes(text)
            else:
                value = float(text) if known[key] == "float" else int(text)
        except Exception:
            raise ValueError(f"{self.name}.{key} is {text!r}; it must be a number") from None
        if value < 0 or (value == 0 and key not in self.zero):
            raise ValueError(f"{self.name}.{key} is {text}; it must be more than 0")
        return replace(self, **{key: value})


@dataclass(frozen=True)
class Single(Sizes):
    """One request."""

    name = "single"
    about = "one prompt"
    prompt: int = 64
    new: int = 200

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"single {seed}")
        return Workload(self.name, (Request(context.prompts.make(rng, self.prompt), self.new),))


@dataclass(frozen=True)
class Uniform(Sizes):
    """Requests of one length."""

    name = "uniform"
    about = "prompts of one length"
    requests: int = 32
    prompt: int = 64
    new: int = 64

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"uniform {seed}")
        made = (context.prompts.make(rng, self.prompt) for _ in range(self.requests))
        return Workload(self.name, tuple(Request(prompt, self.new) for prompt in made))


@dataclass(frozen=True)
class Skewed(Sizes):
    """One long request, the others short."""

    name = "skewed"
    about = "one long prompt among short ones"
    requests: int = 32
    long: int = 4096
    short: int = 64
    new: int = 64

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"skewed {seed}")
        lengths = [self.long] + [self.short] * (self.requests - 1)
        made = (context.prompts.make(rng, length) for length in lengths)
        return Workload(self.name, tuple(Request(prompt, self.new) for prompt in made))


@dataclass(frozen=True)
class Mixed(Sizes):
    """Real request lengths in limited memory."""

    name = "mixed"
    about = "real request lengths, all at once, in limited memory"
    requests: int = 64
    scale: float = 0.5
    room: int = 4096
    memory: int = 0

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"mixed {seed}")
        return Workload(
            self.name,
            real_requests(context, rng, self.requests, self.scale),
            memory=self.memory or self.room * context.bytes_per_token,
        )


@dataclass(frozen=True)
class Samples(Sizes):
    """Several answers to one prompt."""

    name = "samples"
    about = "samples of one prompt"
    samples: int = 16
    prompt: int = 1024
    new: int = 64

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"samples {seed}")
        request = Request(context.prompts.make(rng, self.prompt), self.new)
        return Workload(self.name, (request,), samples=self.samples)


@dataclass(frozen=True)
class Chat(Sizes):
    """Conversations in turn, on one system prompt."""

    name = "chat"
    about = "conversations on one system prompt, a request at a time"
    conversations: int = 8
    turns: int = 6
    system: int = 1024
    user: int = 32
    new: int = 32

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"chat {seed}")
        system = context.prompts.make(rng, self.system)
        requests: list[Request] = []
        for turn in range(self.turns):
            for conversation in range(self.conversations):
                prompt = context.prompts.make(rng, self.user)
                follows = None
                if turn:
                    follows = (turn - 1) * self.conversations + conversation
                else:
                    prompt = system + prompt
                requests.append(Request(prompt, self.new, follows))
        return Workload(self.name, tuple(requests), sequential=True)


@dataclass(frozen=True)
class Capacity(Sizes):
    """How many real requests fit."""

    name = "capacity"
    about = "real requests that run at once in a number of bytes, before they run out"
    requests: int = 256  # the most that are tried
    scale: float = 1.0
    room: int = 32768
    memory: int = 0
    whole: int = 1  # the bytes are for all but the weights; 0: for keys and values only

    def build(self, context: Context, seed: int) -> Workload:
        rng = random.Random(f"capacity {seed}")
        return Workload(
            self.name,
            real_requests(context, rng, self.requests, self.scale),
            memory=self.memory or self.room * context.bytes_per_token,
            whole=bool(self.whole),
        )


KINDS: tuple[type[Sizes], ...] = (Single, Uniform, Skewed, Mixed, Samples, Chat, Capacity)
NAMES = tuple(kind.name for kind in KINDS)

PRESETS: dict[str, tuple[Sizes, ...]] = {
    "full": tuple(kind() for kind in KINDS),
    # For a model of some hundred million parameters on a few CPU cores. No capacity: at lengths
    # that such a model decodes in minutes, contiguous caches, which grow by 256 tokens, would
    # look worse than they are.
    "small": (
        Single(new=24),
        Uniform(requests=8, prompt=32, new=12),
        Skewed(requests=8, long=256, short=16, new=8),
        Mixed(requests=4, scale=0.06, room=512),
        Samples(samples=8, prompt=192, new=8),
        Chat(conversations=2, turns=2, system=192, user=16, new=4),
    ),
    # Seconds, on a model of any make: to see that all works.
    "smoke": (
        Single(prompt=8, new=12),
        Uniform(requests=3, prompt=8, new=6),
        Skewed(requests=4, long=96, short=8, new=6),
        Mixed(requests=6, scale=0.05, room=160),
        Samples(samples=3, prompt=40, new=6),
        Chat(conversations=2, turns=2, system=40, user=4, new=4),
        Capacity(requests=24, scale=0.05, room=256, whole=0),
    ),
}


def chosen_sizes(preset: str, names: Sequence[str], changes: Sequence[str]) -> list[Sizes]:
    """The sizes of the named workloads, in the order of `NAMES`.

    Args:
        preset: a key of PRESETS.
        names: workloads; none for all.
        changes: "WORKLOAD.SIZE=VALUE" each.

    Raises:
        ValueError: an unknown workload or size, or a value that is none.
    """
    found = {sizes.name: sizes for sizes in PRESETS[preset]}
    for name in names:
        if name not in found:
            raise ValueError(f"workload is {name!r}; it must be one of {', '.join(found)}")
    for change in changes:
        target, equals, value = change.partition("=")
        name, dot, key = target.partition(".")
        if not equals or not dot or name not in found:
            raise ValueError(f"size is {change!r}; it must be such as skewed.long=1024")
        found[name] = found[name].changed(key, value)
    return [found[name] for name in NAMES if not names or name in names]


def real_requests(
    context: Context, rng: random.Random, count: int, scale: float
) -> tuple[Request, ...]:
    """The first requests of the data, their lengths times `scale`."""
    real = load_requests(context.data, count)
    return tuple(
        Request(
            context.prompts.make(rng, max(2, round(prompt * scale))), max(2, round(answer * scale))
        )
        for prompt, answer in zip(real.prompt.tolist(), real.answer.tolist(), strict=True)
    )
