"""Text that grows token by token: the work for each token does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rill.inference.native.detokenizer import StopMatcher
from rill.inference.server.schemas import SamplingBody
from rill.inference.server.text import TextStream

EOS = 300
HALF = 0x80
"""A byte that is no character, whatever follows."""


class Bytes:
    """A tokenizer, and a server's codec, of bytes and one special token. Notes how much it was asked to decode."""

    special_ids = frozenset({EOS})
    drops_first_space = False

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        return bytes(i for i in ids if i != EOS).decode("utf-8", "replace")


@pytest.mark.parametrize("token", [HALF, EOS])
def test_a_stream_of_tokens_without_text_costs_no_more_with_each(token: int) -> None:
    tokenizer: Any = Bytes()
    stream = TextStream(tokenizer, SamplingBody())
    text = "".join(stream.feed([i]) for i in [*b"ab", *[token] * 1000, *"é!".encode()])
    text += stream.feed([], is_last=True)
    assert text.startswith("ab") and text.endswith("é!") and tokenizer.longest < 32


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
