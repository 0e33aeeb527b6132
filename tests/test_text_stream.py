"""Text streams: any text, cut into tokens anywhere, ended by any stop strings."""

from collections.abc import Iterable
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged.text_stream import TextStream


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


CHARACTERS = byte_characters()
ALPHABET = "ab é🙂\n"
WORDS = [b"one ", b"one E", b"d ", b"EN", b"D!", b"two"]


def spell(piece: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in piece)


class ByteTokenizer:
    """A byte-level tokenizer: bytes, runs of up to three bytes of ALPHABET, and WORDS."""

    def __init__(self, detokenizer: Any) -> None:
        letters = sorted(set(ALPHABET.encode()))
        runs = [bytes(run) for n in (2, 3) for run in product(letters, repeat=n)]
        words = CHARACTERS + [spell(run) for run in [*runs, *WORDS]]
        self.ids = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(models.BPE(vocab=self.ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
        )
        self.wrapper = TokenizerWrapper(fast, detokenizer)

    def tokens(self, *pieces: bytes) -> list[int]:
        """One token for each piece; several for a piece that is none."""
        tokens = []
        for piece in pieces:
            token = self.ids.get(spell(piece))
            half = len(piece) // 2
            tokens += [token] if token is not None else self.tokens(piece[:half], piece[half:])
        return tokens


BPE, NAIVE = ByteTokenizer(BPEStreamingDetokenizer), ByteTokenizer(NaiveStreamingDetokenizer)


def test_the_alphabet_is_byte_level() -> None:
    assert set(CHARACTERS) == set(pre_tokenizers.ByteLevel.alphabet())


def split(text: str, cuts: Iterable[int]) -> list[bytes]:
    """The text's bytes, cut anywhere, and after each newline."""
    data = text.encode()
    # mlx-lm's plain detokenizer loses a character that begins in a newline's token.
    cuts = [*cuts, *(i + 1 for i, byte in enumerate(data) if byte == 10)]
    ends = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(ends)]


def until_stop(text: str, stops: Iterable[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


# A small alphabet, so that stop strings occur, overlap and almost occur.
few = st.text(st.sampled_from("a" + ALPHABET), max_size=24)
any_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=24)
stop_strings = st.lists(
    st.text(st.sampled_from("a" + ALPHABET), min_size=1, max_size=5), max_size=4
)


@pytest.mark.parametrize("tokenizer", [BPE, NAIVE])
@settings(max_examples=150, deadline=None)
@given(
    text=st.one_of(few, few, any_text),
    cuts=st.lists(st.integers(0, 200), max_size=30),
    stops=stop_strings,
)
@example(text="xab", cuts=[], stops=["ab", "abc"])
@example(text="xabc", cuts=[1, 2, 3], stops=["abcd", "b"])
@example(text="xabcd", cuts=[1, 2, 3, 4], stops=["abcd", "b"])
@example(text="🙂🙂", cuts=range(8), stops=["🙂🙂"])
@example(text="a\ufffdb", cuts=range(8), stops=["\ufffd"])
def test_pieces_are_the_text_until_the_first_stop(
    tokenizer: ByteTokenizer, text: str, cuts: list[int], stops: list[str]
) -> None:
    tokens = tokenizer.tokens(*split(text, cuts))
    if tokenizer is BPE:
        text = text.removeprefix(" ")  # as mlx-lm does at the beginning of a text
    expected = until_stop(text, stops)
    stream, undecided = TextStream(tokenizer.wrapper, stops), TextStream(tokenizer.wrapper)
    emitted = decoded = ""
    for token in tokens:
        emitted += stream.add(token)
        decoded += undecided.add(token)
        assert expected.startswith(emitted)
        if stream.finished_by_stop:
            assert emitted == expected != text
        else:
            assert len(decoded) - len(emitted) < max(map(len, stops), default=1)
    emitted += stream.finish()
    assert emitted == expected
    assert stream.finished_by_stop == any(stop in text for stop in stops)
    assert decoded + undecided.finish() == text


@pytest.mark.parametrize("tokenizer", [BPE, NAIVE])
def test_broken_utf8_ends_as_replacement_characters(tokenizer: ByteTokenizer) -> None:
    tokens = tokenizer.tokens(b"a", b"\xf0\x9f", b"\x99")
    stream = TextStream(tokenizer.wrapper)
    assert [stream.add(token) for token in tokens] == ["a", "", ""]
    assert set(stream.finish()) == {"\ufffd"}


def test_text_is_held_back_only_while_a_stop_is_possible() -> None:
    tokens = BPE.tokens(b"one ", b"E", b"N", b"d ", b"EN", b"D!")
    stream = TextStream(BPE.wrapper, ["END"])
    assert [stream.add(token) for token in tokens] == ["one ", "", "", "ENd ", "", ""]
    assert stream.finished_by_stop
    assert stream.add(tokens[0]) == ""
    assert stream.finish() == ""


def test_held_text_is_given_out_at_the_end() -> None:
    tokens = BPE.tokens(b"one E", b"N")
    stream = TextStream(BPE.wrapper, "END")
    assert [stream.add(token) for token in tokens] == ["one ", ""]
    assert stream.finish() == "EN"
    assert not stream.finished_by_stop


def test_a_stop_inside_a_possible_longer_one_waits() -> None:
    tokens = BPE.tokens(b"-", b"a", b"b", b"c", b"d")
    decided = TextStream(BPE.wrapper, ["abcd", "bc"])
    assert [decided.add(token) for token in tokens] == ["-", "", "", "", ""]
    assert decided.finished_by_stop
    ended = TextStream(BPE.wrapper, ["abcd", "bc"])
    assert "".join(ended.add(token) for token in tokens[:4]) == "-"
    assert not ended.finished_by_stop
    assert ended.finish() == "a"
    assert ended.finished_by_stop


def test_a_stop_does_not_wait_for_a_longer_one_at_its_place() -> None:
    stream = TextStream(BPE.wrapper, ["abb", "ab"])
    assert [stream.add(token) for token in BPE.tokens(b"D!", b"a", b"b")] == ["D!", "", ""]
    assert stream.finished_by_stop


def test_streams_of_one_tokenizer_are_apart() -> None:
    tokens = BPE.tokens(b"one ", b"two")
    first, second = TextStream(BPE.wrapper), TextStream(BPE.wrapper)
    assert first.add(tokens[0]) + second.add(tokens[1]) + first.add(tokens[1]) == "one twotwo"
    assert first.finish() + second.finish() == ""


def test_without_a_tokenizer_there_is_no_text() -> None:
    stream = TextStream(None)
    assert [stream.add(token) for token in (1, 2, 10**9)] == ["", "", ""]
    assert stream.finish() == ""
    assert not stream.finished_by_stop


def test_stop_strings_are_checked() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        TextStream(None, ["end"])
    with pytest.raises(ValueError, match="at least one character"):
        TextStream(BPE.wrapper, ["end", ""])
