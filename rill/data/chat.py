"""Turns prompts and messages into the token ids a model sees, with the tokenizer's chat template or as plain text.

Callers: agents (what the engine is asked) and SFT (what is trained on): one encoder for both, so a model is trained on
exactly the tokens it will be prompted with.

A conversation grows by what is new alone (`encode_following`): what a model sampled is never encoded again, and the
work does not grow with the history.

    base   user │ assistant "…mark" │ new messages │ start of the next answer        one short conversation, rendered
    kept                             └──────── encoded and appended ────────┘

The mark stands where the sampled tokens end. Templates that rewrite earlier turns (old reasoning dropped) thereby keep
what was sampled; a caller that wants the rewritten history passes other messages and begins a branch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from rill.data.frame import Frame, compared_constants, find_frame
from rill.data.pictures import template_parts
from rill.data.tool_calls import ToolSyntax, detect_syntax
from rill.errors import DataError
from rill.types import Message, Picture, Prompt, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rill.models.pictures import PictureReader

MARK = "rill9mark"
"""Stands in a rendered conversation for what the model sampled. No template changes it."""

MAX_BEGUN = 64
"""Conversations whose tokens are remembered, and shapes of turns."""

_TEMPLATE_ERRORS = (TemplateError, TypeError, KeyError, ValueError, AttributeError)
"""What a template may raise that does not fit a conversation."""

Tools = Sequence[Mapping[str, Any]]
"""As the OpenAI API has them: {"type": "function", "function": {"name", "description", "parameters"}}."""


class PromptEncoder:
    """Token ids from prompts and text from token ids.

    `template_arguments` go to the chat template, e.g. {"enable_thinking": False}. `chat_template`: in place of the
    tokenizer's own.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        chat_template: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template or tokenizer.chat_template
        self.template_arguments = dict(template_arguments or {})
        self.pictures: PictureReader | None = None
        """Of a model that reads pictures. None: messages with pictures are refused."""
        self._last: tuple[Prompt, TokenIds] | None = None
        self._begun: dict[Hashable, TokenIds] = {}
        self._frames: dict[Hashable, Frame | None] = {}
        self._token_texts: dict[int, str] = {}
        self._heard_roles: set[str] = set()

    def encode(self, prompt: Prompt) -> TokenIds:
        """The ids up to where the model starts to write. The members of a group ask one after the other: they share one
        array, which is not to be changed."""
        last = self._last
        if last is None or last[0] is not prompt:
            last = self._last = (prompt, self._encode(prompt))
        return last[1]

    def _encode(self, prompt: Prompt) -> TokenIds:
        if prompt.messages:
            ids = self.encode_messages(prompt.messages)
        elif prompt.text is not None:
            ids = self.encode_text(prompt.text, special=True)
        else:
            raise DataError(f"prompt {prompt.id} has neither messages nor text")
        if ids.size == 0:
            raise DataError(f"prompt {prompt.id} encodes to no tokens: {prompt.text or prompt.messages!r}")
        return ids

    def encode_messages(
        self, messages: Sequence[Message], tools: Tools = (), *, key: Hashable = None
    ) -> TokenIds:
        """A whole conversation, up to where the model starts to write. `key` stands for it: the members of a group
        begin alike, and share one array, which is not to be changed."""
        if key is not None and key in self._begun:
            return self._begun[key]
        ids = self.encode_text(self.render(messages, tools, add_generation_prompt=True), special=False)
        if key is not None:
            if len(self._begun) >= MAX_BEGUN:
                self._begun.pop(next(iter(self._begun)))
            self._begun[key] = ids
        return ids

    def encode_following(
        self,
        said: Message,
        new: Sequence[Message],
        *,
        tools: Tools = (),
        tools_key: bytes = b"",
        sampled_ids: TokenIds,
        is_cut_off: bool = False,
    ) -> TokenIds:
        """What is to be appended to an answer (`said`, sampled as `sampled_ids`) when `new` messages follow it: the
        rest of its closing, the messages, the start of the next answer. A cut-off answer is closed first. `tools_key`
        stands for the tools.

        Raises DataError where the template cannot say it; the conversation is then rendered as a whole.
        """
        if new and new[0].role == "tool" and said.tool_calls and not is_cut_off:
            text = self._after_call(said, new, tools, tools_key, sampled_ids)
            if text is not None:
                return self.encode_text(text, special=False)
        ids = self.encode_text(self._after_mark(_ANSWER, new, tools, tools_key), special=False)
        return ids[self._num_said(sampled_ids, ids) :]

    def pictures_in(
        self, messages: Sequence[Message], token_ids: TokenIds, start: int = 0
    ) -> tuple[Picture, ...]:
        """The messages' pictures, placed where they stand in what the messages were encoded to; its first token is
        number `start` of the whole sequence."""
        files = [file for message in messages for file in message.pictures]
        return self._reader.placed(files, token_ids, start) if files else ()

    def encode_text(self, text: str, *, special: bool) -> TokenIds:
        """`special`: let the tokenizer add its own start token; a rendered template holds it already."""
        if self._backend is not None:
            return np.asarray(self._backend.encode(text, add_special_tokens=special).ids, dtype=np.int32)
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=special), dtype=np.int32)

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer inside: the same ids at a tenth of the cost for short texts, which turns are."""
        backend = self.tokenizer.backend_tokenizer if self.tokenizer.is_fast else None
        return None if backend is None or backend.truncation or backend.padding else backend

    def decode(self, token_ids: TokenIds, *, skip_special: bool = True) -> str:
        if self._backend is not None and not self.tokenizer.clean_up_tokenization_spaces:
            return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=skip_special))
        text = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=skip_special)
        assert isinstance(text, str)
        return text

    def render(self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool) -> str:
        """The text of a conversation as the chat template writes it."""
        if not self.chat_template:
            raise DataError(
                "the tokenizer has no chat template but the prompt has messages: use plain-text prompts "
                '(form = "bare"), a tokenizer with a template, or set rollout.env.chat_template'
            )
        has_calls = any(message.tool_calls for message in messages)
        error: Exception | None = None
        for as_text in (False, True)[
            : 1 + has_calls
        ]:  # arguments: most templates want a mapping, some JSON text
            try:
                text = self._apply(
                    messages,
                    tools,
                    add_generation_prompt,
                    as_parts=self._reads_parts,
                    arguments_as_text=as_text,
                )
                return self._with_placeholders(text, [f for m in messages for f in m.pictures])
            except _TEMPLATE_ERRORS as raised:
                error = error or raised
        roles = ", ".join(m.role for m in messages)
        raise DataError(f"the chat template refuses a conversation of roles {roles}: {error}") from error

    def _with_placeholders(self, text: str, files: Sequence[bytes]) -> str:
        if not files:
            return text
        placeholder = self.tokenizer.convert_ids_to_tokens(self._reader.token_id)
        assert isinstance(placeholder, str)
        return self._reader.written(text, placeholder, files)

    @property
    def _reader(self) -> PictureReader:
        if self.pictures is None:
            raise DataError(
                "a message has pictures, and this model reads text alone: use a Qwen-VL model, or leave them out"
            )
        return self.pictures

    def check_roles(self, messages: Sequence[Message]) -> None:
        """Raises DataError where the template leaves out what a message of some role says."""
        for role in [message.role for message in messages if message.role not in self._heard_roles]:
            base = () if role in ("system", "user", "developer") else (_QUESTION,)
            said = self.render([*base, Message(role=role, content=MARK)], add_generation_prompt=False)
            if MARK not in said:
                raise DataError(f"the chat template says nothing of messages with the role {role!r}")
            self._heard_roles.add(role)

    def _apply(
        self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool, **style: bool
    ) -> str:
        text = self.tokenizer.apply_chat_template(
            [message_dict(message, **style) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.template_arguments,
        )
        assert isinstance(text, str)
        return text

    @cached_property
    def tool_syntax(self) -> ToolSyntax:
        return detect_syntax(str(self.chat_template or ""))

    def without_special(self, text: str) -> str:
        """The text of tokens without the special ones among them."""
        return self._special.sub("", text) if text else ""

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokens = sorted(self.tokenizer.all_special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads content as a list of parts alone (those of some vision models)."""
        for as_parts in (False, True):
            try:
                if MARK in self._apply([_QUESTION, _ANSWER], (), False, as_parts=as_parts):
                    return as_parts
            except _TEMPLATE_ERRORS:
                continue
        return False

    @cached_property
    def _last_closing(self) -> int | None:
        """The token that closes an answer with nothing behind it. Some templates close it otherwise in a history."""
        _, _, tail = self.render([_QUESTION, _ANSWER], add_generation_prompt=False).partition(MARK)
        ids = self.encode_text(tail, special=False)
        return int(ids[0]) if ids.size else None

    def _num_said(self, sampled_ids: TokenIds, ids: TokenIds) -> int:
        """How many of the first ids the model has sampled already: usually the one that ends a turn, or none."""
        for count in range(min(len(sampled_ids), len(ids), 4), 0, -1):
            if np.array_equal(sampled_ids[-count:], ids[:count]):
                return count
        return int(len(sampled_ids) > 0 and len(ids) > 0 and int(sampled_ids[-1]) == self._last_closing)

    def _after_mark(self, said: Message, new: Sequence[Message], tools: Tools, tools_key: bytes) -> str:
        """The text behind the mark in what was said (see _marked), up to where the next answer starts."""

        def rendered(messages: Sequence[Message]) -> str:
            whole = self.render([_QUESTION, _marked(said), *messages], tools, add_generation_prompt=True)
            _, mark, tail = whole.partition(MARK)
            if not mark:
                raise DataError("the chat template drops what the assistant said when something follows it")
            return tail

        shape: list[Hashable] = [tools_key or repr(tools)]
        shape += [call["function"]["name"] for call in said.tool_calls]
        for m in new:
            if m.tool_calls or m.pictures or not self._is_framed(m.content):
                return rendered(new)
            shape.append((m.role, m.name, m.tool_call_id is None))
        key = tuple(shape)
        frame = self._frames.get(key)
        if frame is None and key not in self._frames:
            if len(self._frames) >= MAX_BEGUN:
                self._frames.clear()
            frame = self._frames[key] = find_frame(new, rendered)
        return rendered(new) if frame is None else frame.filled(new)

    @cached_property
    def _is_framed(self) -> Callable[[str], bool]:
        """Whether the template only puts such a content between text (see frame.py)."""
        constants = compared_constants(self.chat_template) if isinstance(self.chat_template, str) else None
        if constants is None:
            return lambda content: False
        compared = constants.search
        return lambda content: bool(content.strip()) and compared(content) is None

    def _after_call(
        self, said: Message, new: Sequence[Message], tools: Tools, tools_key: bytes, sampled_ids: TokenIds
    ) -> str | None:
        """The text behind a turn that ends with tool calls; None where the template does not show where that is.

        Behind the mark come the end of the call and the end of the turn; the
        model has written them up to and including its last token, which is a special one.
        """
        try:
            tail = self._after_mark(said, new, tools, tools_key)
        except DataError:
            return None
        end = self._token_text(int(sampled_ids[-1])) if len(sampled_ids) else ""
        limit = tail.find(new[0].content) if new[0].content else -1
        at = tail.find(end, 0, limit if limit >= 0 else len(tail)) if end.strip() else -1
        return tail[at + len(end) :] if at >= 0 else None

    def _token_text(self, token_id: int) -> str:
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode(np.array([token_id]), skip_special=False)
        return text


_QUESTION = Message(role="user", content="?")
_ANSWER = Message(role="assistant", content=MARK)


def _marked(said: Message) -> Message:
    """With the mark as its content, or as the last argument of its last call."""
    if not said.tool_calls:
        return replace(said, content=MARK)
    *others, last = said.tool_calls
    function = {**last["function"], "arguments": {"x": MARK}}
    return replace(said, content="", tool_calls=(*others, {**last, "function": function}))


def message_dict(
    message: Message, *, arguments_as_text: bool = False, as_parts: bool = False
) -> dict[str, Any]:
    """A message in the OpenAI form, without its empty fields. Templates read a call's arguments as a mapping."""
    content: Any = [{"type": "text", "text": message.content}] if as_parts else message.content
    if message.pictures:
        content = template_parts(message.content)
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_call_dict(call, arguments_as_text) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _call_dict(call: Mapping[str, Any], arguments_as_text: bool) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    arguments = function.get("arguments", {})
    if arguments_as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not arguments_as_text and isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments)
        except (ValueError, RecursionError):  # what the model wrote is no JSON: shown as it is
            function["arguments"] = arguments
    return {**call, "function": function}
