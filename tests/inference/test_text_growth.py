"""Text that grows token by token: the work for each token does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rill.inference.native.detokenizer import _LETTERS, IncrementalDetokenizer, StopMatcher, plain_decode
from rill.inference.server.schemas import SamplingBody
from rill.inference.server.text import TextCodec, TextStream

EOS = 300
HALF = 0x80
"""A byte that is no character, whatever follows."""


class Bytes:
    """A tokenizer, and a server's codec, of bytes and one special token. Notes how much it was asked to decode."""

    special_ids = frozenset({EOS})

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return bytes(i for i in ids if i != EOS).decode("utf-8", "replace")

    def detokenizer(self, *, skip_special_tokens: bool, before: Sequence[int]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            lambda ids, skip: self.decode(ids, skip_special_tokens=skip),
            skip_special_tokens=skip_special_tokens,
        )


@pytest.mark.parametrize("token", [HALF, EOS])
def test_a_stream_of_tokens_without_text_costs_no_more_with_each(token: int) -> None:
    tokenizer: Any = Bytes()
    stream = TextStream(tokenizer, SamplingBody())
    text = "".join(stream.feed([i]) for i in [*b"ab", *[token] * 1000, *"é!".encode()])
    text += stream.feed([], is_last=True)
    assert text.startswith("ab") and text.endswith("é!") and tokenizer.longest < 32


@pytest.mark.parametrize("size", [1, 2, 5, 9, 10, 11, 12, 13, 64])
def test_characters_are_whole_however_many_tokens_come_at_a_time(size: int) -> None:
    for text in ("abcdefghijk日本", "日本語" * 9, "🙂a" * 9, "a" * 64 + "é"):
        tokenizer: Any = Bytes()
        stream, ids = TextStream(tokenizer, SamplingBody()), list(text.encode())
        parts = [stream.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
        assert "".join(parts) + stream.feed([], is_last=True) == text


def test_a_decoder_of_bytes_is_followed_to_the_letter() -> None:
    random = Random(0)
    letters = {byte: letter for letter, byte in _LETTERS.items()}
    assert sorted(letters.values()) == sorted(ByteLevel.alphabet())
    pieces = [bytes([i]) for i in range(256)]
    pieces += [
        random.choice(["日本", "🙂", " the", "é"]).encode()[: random.randrange(1, 5)] for _ in range(99)
    ]
    vocabulary = {
        "".join(map(letters.__getitem__, piece)): i for i, piece in enumerate(dict.fromkeys(pieces))
    }
    backend = Tokenizer(BPE(vocabulary, []))
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<end>", "日<s>"])
    backend.add_tokens(["plain words", "é日"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    decode, codec = plain_decode(tokenizer), TextCodec(tokenizer)
    for number in range(4000):
        ids = random.choices(range(backend.get_vocab_size() + 3), k=random.randrange(12))
        skip, cut = number % 2 == 0, random.randrange(12)
        growing = codec.detokenizer(skip_special_tokens=skip, before=[1])
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert (
            decode(ids, skip) == expected == growing.push(ids[:cut]) + growing.push(ids[cut:], is_last=True)
        )


def test_a_stop_string_is_found_after_bytes_that_are_no_characters() -> None:
    tokenizer: Any = Bytes()
    matcher = StopMatcher(lambda ids, _: tokenizer.decode(ids), ["é!"])
    found = [matcher.push([i]) for i in [*[HALF] * 1000, *"é!".encode()]]
    assert found == [None] * 1002 + [1] and tokenizer.longest < 32


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_stop_string_ends_at_the_same_token_however_many_come_at_a_time(size: int) -> None:
    tokenizer: Any = Bytes()
    for text in ("abcé!d", "é!", "ébé!x", "a" * 9 + "é!" + "b" * 9, "aé", "é" * 5):
        ids = list(text.encode())
        expected = len(text.encode().split(b"!")[0]) + 1 if "é!" in text else None
        matcher, num_before, found = StopMatcher(lambda ids, _: tokenizer.decode(ids), ["é!"]), 0, None
        for start in range(0, len(ids), size):
            if (count := matcher.push(ids[start : start + size])) is not None:
                found = num_before + count
                break
            num_before += size
        assert found == expected and matcher.matched == (None if expected is None else "é!")
