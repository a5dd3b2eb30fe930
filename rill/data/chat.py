"""Turns a Prompt into the token ids a model sees, with the tokenizer's chat template or as plain text.

Callers: environments (what the engine is asked) and SFT (what is trained on): one encoder for both, so a model is
trained on exactly the tokens it will be prompted with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.errors import DataError
from rill.types import Message, Prompt, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Token ids from prompts and text from token ids.

    `template_arguments` go to the chat template, e.g. {"enable_thinking": False}.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template_arguments = dict(template_arguments or {})
        self.tools: list[Any] = [dict(tool) for tool in tools]
        self._last: tuple[Prompt, TokenIds] | None = None

    def encode(self, prompt: Prompt) -> TokenIds:
        """The ids up to where the model starts to write. The members of a group ask one after the other: they share one
        array, which is not to be changed."""
        last = self._last
        if last is None or last[0] is not prompt:
            last = self._last = (prompt, self._encode(prompt))
        return last[1]

    def _encode(self, prompt: Prompt) -> TokenIds:
        if prompt.messages:
            ids = self.encode_text(self.render(prompt.messages, add_generation_prompt=True), special=False)
        elif prompt.text is not None:
            ids = self.encode_text(prompt.text, special=True)
        else:
            raise DataError(f"prompt {prompt.id} has neither messages nor text")
        if ids.size == 0:
            raise DataError(f"prompt {prompt.id} encodes to no tokens: {prompt.text or prompt.messages!r}")
        return ids

    def encode_text(self, text: str, *, special: bool) -> TokenIds:
        """`special`: let the tokenizer add its own start token; a rendered template holds it already."""
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=special), dtype=np.int32)

    def decode(self, token_ids: TokenIds, *, skip_special: bool = True) -> str:
        text = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=skip_special)
        assert isinstance(text, str)
        return text

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a conversation as the chat template writes it."""
        if not self.tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template but the prompt has messages: use plain-text prompts "
                '(form = "bare"), or a tokenizer with a template'
            )
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                [message_dict(message) for message in messages],
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.template_arguments,
            )
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise DataError(f"the chat template refuses a conversation of roles {roles}: {error}") from error
        assert isinstance(text, str)
        return text


def message_dict(message: Message) -> dict[str, Any]:
    """A message in the OpenAI form, without its empty fields."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [dict(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields
