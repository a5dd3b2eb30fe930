"""Finds stop strings in a growing token sequence.

Tokens are turned into text as they come. A token may hold part of a character, so text is taken only up to the
last complete one; a stop string may span tokens, so each search looks back by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "�"


MAX_PARTIAL = 8
"""Tokens that are held back at the end of a text: no character has more. What still ends in half a one then never will
be one, and holding it back would mean to decode all of it again with every token."""


class IncrementalDetokenizer:
    """`push(token)` returns the text that the token completes, possibly empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        # Decoding starts one piece early because a tokenizer may join a token to the one before it.
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        is_partial = text.endswith(INCOMPLETE) and len(self._ids) - self._read <= MAX_PARTIAL
        if is_partial or len(text) <= len(before):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class StopMatcher:
    """True from `push` once one of the strings has appeared; `matched` is the one that appeared first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        self.matched: str | None = None

    def push(self, token: int) -> bool:
        text = self._tail + self._detokenizer.push(token)
        found = [(text.find(s), -len(s), s) for s in self._stop if s in text]
        if found:
            self.matched = min(found)[2]
            return True
        self._tail = text[-self._keep :] if self._keep else ""
        return False
