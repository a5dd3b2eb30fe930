"""What a dialect is: a request becomes a chat body, and an answer becomes JSON or server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

Calls = Sequence[Mapping[str, Any]]
"""Tool calls in the chat form: {"id", "type": "function", "function": {"name", "arguments": JSON text}}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a model said."""

    id: str
    """Letters and digits; a dialect puts its prefix before them."""
    model: str
    created: int
    content: str = ""
    calls: Calls = ()
    finish_reason: str = "stop"
    """As chat completions have it: stop, length, tool_calls."""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class AnswerStream(Protocol):
    """The events of one answer, as bytes: begin, then feed as text and calls come, then end."""

    def begin(self) -> bytes: ...

    def feed(self, content: str, calls: Calls) -> bytes:
        """New text, and calls that are complete. Text comes before calls."""
        ...

    def end(self, answer: Answer) -> bytes:
        """`answer` is the whole of what was fed."""
        ...

    def error(self, message: str, code: str) -> bytes:
        """In the place of `end`."""
        ...


class Dialect(Protocol):
    path: str
    """Behind /v1."""

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The same request to chat completions. Raises ValueError for what has no counterpart there."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def stream(self, answer: Answer, *, shows_usage: bool = False) -> AnswerStream:
        """`answer` as it is known before anything was said. `shows_usage`: chat sends it only where it was asked."""
        ...

    def error(self, message: str, code: str) -> dict[str, Any]: ...


_encode = msgspec.json.Encoder().encode


def event(body: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encode(body) + b"\n\n"


def text_of(content: Any, where: str) -> str:
    """The text of a content that is text or parts. Raises ValueError for parts of another kind, which would be lost."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where}: content must be text or a list of parts, got {type(content).__name__}")
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") not in ("text", "input_text", "output_text")
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"{where}: a content part of the kind {kind!r} is not supported: text alone")
    return "".join(part["text"] for part in content)


def read_tool(tool: Any, *, kinds: Sequence[str | None], schema: str) -> dict[str, Any]:
    """The same tool in the chat form. `schema`: the field that holds its parameters' schema."""
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if not isinstance(tool, Mapping) or kind not in kinds:
        raise ValueError(f"tools: a tool of the kind {kind!r} runs elsewhere and is not supported")
    name, description = tool.get("name"), tool.get("description")
    if not isinstance(name, str) or not name:
        raise ValueError("tools: a tool has no name")
    about = {"description": description} if description else {}
    parameters = tool.get(schema) or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **about}}


def named_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.get("name")}}


def function_call(call_id: Any, name: Any, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def copied(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Fields that only have another name."""
    return {new: body[old] for old, new in names.items() if body.get(old) is not None}
