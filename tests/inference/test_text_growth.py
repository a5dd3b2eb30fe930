"""Text that grows token by token: the work for each token does not grow with the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rill.inference.native.detokenizer import StopMatcher
from rill.inference.server.text import TextStream

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


@pytest.mark.parametrize("token", [HALF, EOS])
def test_a_stream_of_tokens_without_text_costs_no_more_with_each(token: int) -> None:
    tokenizer: Any = Bytes()
    stream = TextStream(tokenizer)
    text = "".join(stream.feed([i]) for i in [*b"ab", *[token] * 1000, *"é!".encode()])
    text += stream.feed([], is_last=True)
    assert text.startswith("ab") and text.endswith("é!") and tokenizer.longest < 32


def test_a_stop_string_is_found_after_bytes_that_are_no_characters() -> None:
    tokenizer: Any = Bytes()
    matcher = StopMatcher(tokenizer, ["é!"])
    found = [matcher.push(i) for i in [*[HALF] * 1000, *"é!".encode()]]
    assert found == [False] * 1002 + [True] and tokenizer.longest < 32
