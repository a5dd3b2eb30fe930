"""Guided decoding: which tokens a grammar allows next. The one door to llguidance.

A `Guide` (rill.inference.base) is compiled in the caller's thread, so a grammar that is wrong is a RequestError before
anything is queued; the engine's thread then asks for a mask and tells which token was taken, step by step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rill.errors import MissingExtraError, RequestError
from rill.inference.base import Guide, GuideKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GuideMatcher:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: Any, eos_ids: frozenset[int], num_bytes: int) -> None:
        self._matcher = matcher
        self._ends = np.zeros(num_bytes, dtype=np.uint8)
        for token in eos_ids:
            self._ends[token // 8] |= 1 << token % 8

    def add(self, tokens: Sequence[int]) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(tokens))

    def allowed(self) -> npt.NDArray[np.uint8]:
        """Bits of the tokens that may come next. Where nothing more may, or the grammar gave up, those that end."""
        if self._matcher.is_stopped():
            return self._ends
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if not self._matcher.is_accepting():
            return bits
        out = np.zeros(max(len(bits), len(self._ends)), dtype=np.uint8)  # any end of this model will do
        out[: len(bits)] |= bits
        out[: len(self._ends)] |= self._ends
        return out


class Guides:
    """Compiles grammars for one tokenizer. Any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._num_bytes = -(-vocab_size // 8)
        self._lock = threading.Lock()
        self._known: Any = None

    def matcher(self, guide: Guide, who: str) -> GuideMatcher:
        library = _library()
        with self._lock:
            if self._known is None:  # takes a second with a large vocabulary
                self._known = _tokenizer_of(library, self._tokenizer, sorted(self._eos_ids))
        try:
            matcher = library.LLMatcher(self._known, _grammar(library, guide), log_level=0)
        except Exception as error:  # boundary: llguidance's refusals share no base class
            raise RequestError(f"{who}: {guide.kind}: {error}") from error
        if matcher.is_error():
            raise RequestError(f"{who}: {guide.kind}: {matcher.get_error()}")
        return GuideMatcher(matcher, self._eos_ids, self._num_bytes)


def _grammar(library: Any, guide: Guide) -> str:
    make = library.LLMatcher
    if guide.kind is GuideKind.JSON_SCHEMA:
        return str(make.grammar_from_json_schema(guide.text))
    if guide.kind is GuideKind.REGEX:
        return str(make.grammar_from_regex(guide.text))
    if guide.kind is GuideKind.CHOICE:
        choices = " | ".join(json.dumps(choice) for choice in json.loads(guide.text))
        return str(make.grammar_from_lark(f"start: {choices}"))
    from llguidance.gbnf_to_lark import any_to_lark

    return str(make.grammar_from_lark(any_to_lark(guide.text)))


def _tokenizer_of(library: Any, tokenizer: PreTrainedTokenizerBase, eos_ids: list[int]) -> Any:
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, eos_token=eos_ids or None)
    except ValueError:  # a decoder that it does not know: tell it every token's text
        return library.LLTokenizer(library.TokenizerWrapper(_Spelled(tokenizer)), eos_token=eos_ids or None)


class _Spelled:
    """A tokenizer as llguidance's wrapper wants it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = list(tokenizer.all_special_ids)
        self.tokens = [str(tokenizer.decode([i])).encode() for i in range(len(tokenizer))]

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode() if isinstance(text, bytes) else text
        ids: list[int] = self._tokenizer.encode(plain, add_special_tokens=False)
        return ids


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingExtraError("guided decoding needs llguidance: pip install 'rill[guided]'") from error
    return llguidance
