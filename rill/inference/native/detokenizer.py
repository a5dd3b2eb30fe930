"""Text of a growing token sequence, and stop strings in it.

Tokens are turned into text as they come. A token may hold part of a character, so text is taken only up to the
last complete one; a stop string may span tokens, so each search looks back by its length. The server's TextStream grows
by the same detokenizer.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

T = TypeVar("T")

INCOMPLETE = "�"


MAX_PARTIAL = 8
"""Tokens that are held back at the end of a text: no character has more. What still ends in half a one then never will
be one, and holding it back would mean to decode all of it again with every token."""

Decode = Callable[[list[int], bool], str]
"""Token ids, and whether to leave special tokens out."""


class Memo(dict[int, T]):
    """Made once for each token; after that a lookup without a call of Python's."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> T:
        made = self[token_id] = self._make(token_id)
        return made


def plain_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """The tokenizer's own decode; without transformers' wrapper, which costs several times the work, where that adds
    nothing."""
    if (found := token_bytes(tokenizer)) is not None:
        return lambda ids, skip: b"".join(map(found[skip].__getitem__, ids)).decode("utf-8", "replace")
    if _is_plain(tokenizer):
        backend: Any = tokenizer.backend_tokenizer
        return lambda ids, skip: str(backend.decode(ids, skip_special_tokens=skip))
    return lambda ids, skip: str(tokenizer.decode(ids, skip_special_tokens=skip))


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[PreTrainedTokenizerFast]:
    """Whether decoding is its backend's and no more."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and (kind.decode, kind._decode) == (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
        and not tokenizer.clean_up_tokenization_spaces
    )


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> tuple[Memo[bytes], Memo[bytes]] | None:
    """The bytes of each token, and without those of special ones, where a text is its tokens' bytes and no more (the
    tokenizers of GPT-2, Llama 3 and Qwen). To join what was looked up once takes a fifth of the tokenizer's time."""
    backend: Any = tokenizer.backend_tokenizer if _is_plain(tokenizer) else None
    if type(getattr(backend, "decoder", None)).__name__ != "ByteLevel":
        return None
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}

    def bytes_of(token_id: int) -> bytes:
        token: str = backend.id_to_token(token_id) or ""
        try:
            return bytes(map(_LETTERS.__getitem__, token))
        except KeyError:  # an added token, which is written as it is
            return token.encode()

    every = Memo(bytes_of)
    return every, Memo(lambda token_id: b"" if backend.id_to_token(token_id) in special else every[token_id])


_PLAIN = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(256)) - set(_PLAIN))
_LETTERS = {chr(byte): byte for byte in _PLAIN} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""Which byte a letter stands for: a byte that is no letter is written as one from U+0100 on."""


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
        text, end = self._decode(self._ids, self._skip), len(self._ids)
        if is_last:
            return text[len(self._before) :]
        first = max(self._num_out, end - MAX_PARTIAL)
        # What comes before half a character does not wait for it.
        while text.endswith(INCOMPLETE) and end > first:
            end -= 1
            text = self._decode(self._ids[:end], self._skip)
        if end > self._num_out and text.endswith(INCOMPLETE):
            end, text = len(self._ids), self._decode(self._ids, self._skip)
        if len(text) <= len(self._before):
            return ""
        new = text[len(self._before) :]
        self._ids, self._num_out = self._ids[self._num_out :], end - self._num_out
        self._before = self._decode(self._ids[: self._num_out], self._skip)
        return new


class ByteDetokenizer:
    """The same where tokens are bytes: what stands before changes nothing, and the text is that of all at once."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decode = getincrementaldecoder("utf-8")("replace").decode

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        return self._decode(b"".join(map(self._bytes_of.__getitem__, tokens)), is_last)


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
