"""Conversations as chat templates want them: messages, tools and options, from a client's body."""

from __future__ import annotations

import json
from typing import Any

from rill.data.pictures import read_parts, template_parts
from rill.errors import DataError
from rill.inference.server.errors import bad_request
from rill.inference.server.schemas import ChatMessage, ChatTemplateBody
from rill.inference.server.text import TextCodec
from rill.types import Picture


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
    reserved = {"messages", "conversation", "tools", "documents", "chat_template", "tokenize", "padding"}
    reserved |= {"truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    reserved |= {"return_assistant_tokens_mask", "processor_kwargs"}
    if clash := sorted(reserved & options.keys()):
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
