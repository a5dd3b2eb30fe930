"""Between text and tokens: encoding, chat templates, and text that grows token by token.

`TextCodec` owns the tokenizer. Fast tokenizers are not safe to use from two threads at once, so every use goes
through a lock; long inputs are encoded off the event loop by a copy with a lock of its own, since the loop would wait
for the other. `TextStream` turns one sequence's tokens into text that is final as soon as it is handed out: it holds
back half a character and whatever may become a stop string.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2.exceptions import TemplateError

from rill.data.pictures import read_parts, template_parts
from rill.data.tool_calls import held_back
from rill.errors import DataError
from rill.inference.native.detokenizer import (
    ByteDetokenizer,
    IncrementalDetokenizer,
    Memo,
    plain_decode,
    token_bytes,
)
from rill.inference.server.errors import bad_request
from rill.inference.server.generation import Piece
from rill.inference.server.schemas import ChatMessage, ChatTemplateBody, SamplingBody
from rill.types import Picture, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.pictures import PictureReader

_NUM_BEFORE = 8
"""Tokens of a prompt that decide how the one behind it is written; special ones among them do not."""
_SPACE = "▁"
"""Of SentencePiece's tokens, whose decoders drop the one that a text begins with."""
_INLINE_CHARS = 8192
"""Texts up to this long are encoded on the event loop: a thread switch would cost more."""
_RESERVED = {
    "messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "tokenizer_kwargs", "return_assistant_tokens_mask",
    "processor_kwargs",
}  # fmt: skip
"""Arguments of a template that are not the client's to set."""


class TextCodec:
    """The tokenizer as the server uses it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        """`pictures`: of a model that reads them. None: they are refused."""
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._chat_template = chat_template
        self._lock = threading.Lock()
        self._long_lock = threading.Lock()
        self.vocab_size = len(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids)
        self.drops_first_space = _SPACE in tokenizer.get_vocab()
        """Of a text: as SentencePiece's decoders do."""
        self._decode = plain_decode(tokenizer)
        self._token_bytes = token_bytes(tokenizer)
        self._token_texts = Memo(self._token_text)

    @property
    def chat_template(self) -> str:
        """The operator's, else the tokenizer's own; all of them where it has several; empty where there is none."""
        template = self._chat_template or self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def special_ids_of(self, texts: Sequence[str]) -> frozenset[int]:
        """The special tokens among these texts."""
        with self._lock:
            ids = [self._tokenizer.convert_tokens_to_ids(text) for text in texts]
        return frozenset(i for i in ids if isinstance(i, int)) & self.special_ids

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise bad_request(f"the text is not valid Unicode: {error.reason}") from error
        if len(text) > _INLINE_CHARS:
            return await asyncio.to_thread(self._encode_long, text, add_special_tokens)
        with self._lock:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    async def render(self, messages: list[dict[str, Any]], tools: Any, options: dict[str, Any]) -> str:
        """The text of a conversation's prompt. The template writes its own special tokens."""
        if not self.chat_template:
            raise bad_request("this model's tokenizer has no chat template: use /v1/completions", "messages")
        if sum(len(message["content"]) for message in messages) <= _INLINE_CHARS:
            return self._render(messages, tools, options)
        return await asyncio.to_thread(self._render, messages, tools, options)

    async def encode_pictures(
        self, text: str, files: Sequence[bytes]
    ) -> tuple[list[int], tuple[Picture, ...]]:
        """With placeholders where the files are shown."""
        reader = self._pictures
        if reader is None:
            raise bad_request("this model reads no pictures", "messages", "unsupported")
        placeholder = self.token_texts([reader.token_id])[0]
        try:
            written = await asyncio.to_thread(reader.written, text, placeholder, files)
            ids = await self.encode(written, add_special_tokens=False)
            return ids, await asyncio.to_thread(reader.placed, files, np.asarray(ids))
        except DataError as error:
            raise bad_request(str(error), "messages") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with self._lock:
            return self._decode(list(token_ids), skip_special_tokens)

    @property
    def is_bytes(self) -> bool:
        """Whether a text is its tokens' bytes and no more."""
        return self._token_bytes is not None

    def detokenizer(
        self, *, skip_special_tokens: bool, before: Sequence[int]
    ) -> IncrementalDetokenizer | ByteDetokenizer:
        """`before`: the prompt of a text that goes on with its own."""
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes[skip_special_tokens])
        behind = [i for i in before[-_NUM_BEFORE:] if i not in self.special_ids]
        return IncrementalDetokenizer(
            lambda ids, skip: self.decode(ids, skip_special_tokens=skip),
            skip_special_tokens=skip_special_tokens,
            before=behind if self.drops_first_space else (),
        )

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return list(map(self._token_texts.__getitem__, token_ids))

    def _token_text(self, token_id: int) -> str:
        text = self.decode([token_id], skip_special_tokens=False)
        with self._lock:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not (piece or "").startswith(_SPACE):
            return text
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(text) :]

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._long_lock:
            ids: list[int] = self._long.encode(text, add_special_tokens=add_special_tokens)
        return ids

    @cached_property
    def _long(self) -> PreTrainedTokenizerBase:
        with self._lock:
            return copy.deepcopy(self._tokenizer)

    def _render(self, messages: list[dict[str, Any]], tools: Any, options: dict[str, Any]) -> str:
        try:  # without the lock: a template is Python, and nothing of the tokenizer's backend
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self._chat_template, tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            # Templates are programs that see the client's data; whatever they trip over is in that data.
            raise bad_request(f"the chat template refuses these messages: {error}", "messages") from error
        assert isinstance(text, str)
        return text


class TextStream:
    """The text of one sequence, growing.

    tokens ──▶ decode from the last safe place ──▶ [ handed out | held back: half a character, maybe a stop ]
    """

    def __init__(
        self,
        codec: TextCodec,
        body: SamplingBody,
        kept_ids: frozenset[int] = frozenset(),
        *,
        before: Sequence[int] = (),
    ) -> None:
        """`kept_ids`: special tokens that are text all the same. `before`: the prompt of a text that goes on with its
        own."""
        self._stop, self._include_stop = body.stops, body.include_stop_str_in_output
        skip_special_tokens = body.skip_special_tokens
        self._detokenizer = codec.detokenizer(
            skip_special_tokens=skip_special_tokens and not kept_ids, before=before
        )
        # Not left to the decoder: a long run of tokens without text would be decoded again with each of them.
        self._dropped_ids = codec.special_ids - kept_ids if skip_special_tokens else frozenset()
        self._held = ""
        self.text = ""
        """Everything handed out so far."""
        self.is_stopped = False
        """A stop string was found: nothing more is handed out."""

    def hear(self, piece: Piece) -> str:
        """The text that became final with it. The token that ended a sample is none, unless stops are asked for."""
        ids, end = piece.token_ids.tolist(), piece.completion
        if end is not None and not self._include_stop:
            by_token = end.stop_reason in (StopReason.EOS, StopReason.STOP) and end.stop_text is None
            ids = ids[:-1] if by_token else ids
        return self.feed(ids, is_last=end is not None)

    def feed(self, token_ids: Sequence[int], *, is_last: bool = False) -> str:
        if not self._dropped_ids.isdisjoint(token_ids):
            token_ids = [i for i in token_ids if i not in self._dropped_ids]
        if self.is_stopped:
            return ""
        self._held += self._detokenizer.push(token_ids, is_last=is_last)
        return self._hand_out(is_last)

    def _hand_out(self, is_last: bool) -> str:
        found = min(((at, s) for s in self._stop if (at := self._held.find(s)) >= 0), default=None)
        if found is not None:
            self.is_stopped = True
            out = self._held[: found[0] + (len(found[1]) if self._include_stop else 0)]
            self._held = ""
        elif is_last:
            out, self._held = self._held, ""
        else:
            keep = held_back(self._held, self._stop)
            out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += out
        return out


async def encode_chat(codec: TextCodec, body: ChatTemplateBody) -> tuple[list[int], tuple[Picture, ...]]:
    """The prompt of a conversation, and the pictures in it."""
    files: list[bytes] = []
    messages = [_template_message(message, files) for message in body.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    text = await codec.render(messages, tools or None, _template_options(body))
    if files:
        return await codec.encode_pictures(text, files)
    return await codec.encode(text, add_special_tokens=False), ()


def _template_options(body: ChatTemplateBody) -> dict[str, Any]:
    """Keyword arguments of the template."""
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request(
            "add_generation_prompt and continue_final_message exclude each other", "continue_final_message"
        )
    options = dict(body.chat_template_kwargs or {})
    if clash := sorted(_RESERVED & options.keys()):
        raise bad_request(f"chat_template_kwargs may not set {', '.join(clash)}", "chat_template_kwargs")
    options["add_generation_prompt"] = body.add_generation_prompt
    options["continue_final_message"] = body.continue_final_message
    return options


def _template_message(message: ChatMessage, files: list[bytes]) -> dict[str, Any]:
    out = message.model_dump(include={"role", "name", "reasoning_content", "tool_call_id"}, exclude_none=True)
    out["content"] = _content(message, files)
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return out


def _content(message: ChatMessage, files: list[bytes]) -> str | list[dict[str, str]]:
    """Text, or with pictures the parts of it; what is neither is refused."""
    if not isinstance(message.content, list):
        return message.content or ""
    try:
        content, pictures = read_parts([part.model_dump(exclude_none=True) for part in message.content])
    except DataError as error:
        raise bad_request(str(error), "messages", "unsupported") from error
    files += pictures
    return template_parts(content) if pictures else content


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Templates write arguments as JSON themselves: a string given to them would be quoted twice."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
