"""Conversations: messages as chat templates want them, and tool calls as models write them.

Hermes, Qwen and their kin write each call as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. `ToolCallStream`
takes those out of growing text: what lies before and between is content, and a call is handed out when it is
complete. Text between the tags that is not such a call stays in the content, so that nothing is lost.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from rill.inference.server.errors import bad_request
from rill.inference.server.schemas import ChatBody, ChatMessage, ChatTemplateBody, Tool
from rill.inference.server.text import ToolSchemas, held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    return [_template_message(message) for message in messages]


def template_tools(tools: list[Tool] | None) -> ToolSchemas | None:
    return [tool.model_dump(exclude_none=True) for tool in tools] if tools else None


def template_options(body: ChatTemplateBody) -> dict[str, Any]:
    """Keyword arguments of the template. A client's own template is a program, and is not run."""
    if body.chat_template is not None:
        raise bad_request("templates from clients are not run", "chat_template", "unsupported")
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


def wants_tool_calls(body: ChatBody) -> bool:
    """Whether tool calls are to be taken out of the text. Choices that need constrained decoding are refused."""
    if body.tool_choice is not None and body.tool_choice not in ("none", "auto"):
        raise bad_request(
            "tool_choice must be 'auto' or 'none': a forced call needs constrained decoding, which is not here",
            "tool_choice",
            "unsupported",
        )
    if body.tool_choice == "auto" and not body.tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    return bool(body.tools) and body.tool_choice != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    id: str
    name: str
    arguments: str
    """JSON, as OpenAI has it."""

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolCallStream:
    """Splits growing text into content and calls."""

    def __init__(self, *, parallel: bool = True) -> None:
        self._parallel = parallel
        self._held = ""
        self.calls: list[ParsedCall] = []

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[ParsedCall]]:
        """The content and the calls that became final."""
        self._held += text
        content, found = "", []
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = 0 if is_last else held_back(self._held, (OPEN,))
                content += self._visible(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            content += self._visible(self._held[:start])
            self._held = self._held[start:]
            end = self._held.find(CLOSE)
            if end < 0 and not is_last:
                break
            block = self._held if end < 0 else self._held[: end + len(CLOSE)]
            self._held = self._held[len(block) :]
            call = parse_call(block)
            if call is None:
                content += block
            elif self._parallel or not self.calls:
                self.calls.append(call)
                found.append(call)
        return content, found

    def _visible(self, text: str) -> str:
        """Models write line breaks between and after calls; those are not content."""
        return "" if self.calls and not text.strip() else text


def parse_call(block: str) -> ParsedCall | None:
    inner = block.removeprefix(OPEN).removesuffix(CLOSE).strip()
    try:
        value = msgspec.json.decode(inner)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ParsedCall(id=f"call_{uuid.uuid4().hex[:24]}", name=value["name"], arguments=arguments)


def _template_message(message: ChatMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": _content_text(message)}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
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


def _content_text(message: ChatMessage) -> str:
    if message.content is None:
        return ""
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise bad_request(
                f"content parts of type {part.type[:64]!r} are not supported", "messages", "unsupported"
            )
    return "".join(part.text or "" for part in message.content)


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Templates write arguments as JSON themselves: a string given to them would be quoted twice."""
    if isinstance(arguments, dict):
        return arguments
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
