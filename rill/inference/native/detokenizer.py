"""Text of a growing token sequence, and stop strings in it.

Tokens are turned into text as they come. A token may hold part of a character, so text is taken only up to the
last complete one; a stop string may span tokens, so each search looks back by its length. The server's TextStream grows
by the same detokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "�"


MAX_PARTIAL = 8
"""Tokens that are held back at the end of a text: no character has more. What still ends in half a one then never will
be one, and holding it back would mean to decode all of it again with every token."""

Decode = Callable[[list[int], bool], str]
"""Token ids, and whether to leave special tokens out."""


def plain_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's own decode; without transformers' wrapper, which costs several times the work, where that adds
    nothing."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and (kind.decode, kind._decode) == (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
        and not tokenizer.clean_up_tokenization_spaces
    ):
        backend: Any = tokenizer.backend_tokenizer
        return lambda ids, skip: str(backend.decode(ids, skip_special_tokens=skip))
    return lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))


class IncrementalDetokenizer:
    """`push(tokens)` returns the text that they complete, possibly empty."""

    def __init__(
        self, decode: Decode, *, skip_special_tokens: bool = False, before: Sequence[int] = ()
    ) -> None:
        """`before`: the last tokens of a text that this one goes on."""
        self._decode, self._skip = decode, skip_special_tokens
        self._ids = list(before)
        """From one piece before the text that is not yet out: a tokenizer may join a token to the one before it, or
        drop the space of the first."""
        self._num_out = len(self._ids)
        self._before = decode(self._ids, skip_special_tokens) if self._ids else ""
        """The text of those that are out."""

    @property
    def has_partial(self) -> bool:
        return len(self._ids) > self._num_out

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """is_last: half a character is not waited for, and nothing comes after it."""
        self._ids = [*self._ids, *tokens]  # another list: a copy of this object keeps its own
        text = self._decode(self._ids, self._skip)
        is_partial = text.endswith(INCOMPLETE) and len(self._ids) - self._num_out <= MAX_PARTIAL
        if not is_last and (is_partial or len(text) <= len(self._before)):
            return ""
        new = text[len(self._before) :]
        if is_last:
            return new
        self._ids = self._ids[self._num_out :]
        self._num_out = len(self._ids)
        self._before = self._decode(self._ids, self._skip)
        return new


class StopMatcher:
    """`matched` is the string that appeared first, once one has."""

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._detokenizer = IncrementalDetokenizer(decode)
        self._stop = tuple(stop)
        self._keep = max(len(s) for s in stop) - 1
        self._tail = ""
        self.matched: str | None = None

    def push(self, tokens: Sequence[int]) -> int | None:
        """How many of them there are up to the one that completes a stop string; None: none does."""
        if len(tokens) > 1:
            before, tail = copy(self._detokenizer), self._tail
            if not self._finds(tokens) and not self._detokenizer.has_partial:
                return None
            # Once more, to see at which of them.
            self._detokenizer, self._tail, self.matched = before, tail, None
        for count, token in enumerate(tokens, start=1):
            if self._finds([token]):
                return count
        return None

    def _finds(self, tokens: Sequence[int]) -> bool:
        text = self._tail + self._detokenizer.push(tokens)
        found = [(text.find(s), -len(s), s) for s in self._stop if s in text]
        if found:
            self.matched = min(found)[2]
            return True
        self._tail = text[-self._keep :] if self._keep else ""
        return False
