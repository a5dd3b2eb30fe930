"""One message as the OpenAI API has it, read from outside: a row of a file, a program that talks to an agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rill.data.pictures import read_parts
from rill.errors import DataError, InvalidSampleError
from rill.types import Message


def read_message(item: Any) -> Message:
    """Raises DataError for what is none."""
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise DataError(f"a message has no role: {item!r:.80}")
    content, calls = item.get("content"), item.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
        raise DataError("`tool_calls` must be a list of {function: {name, arguments}}")
    content, pictures = read_parts(content) if isinstance(content, list) else (content, ())
    content = "" if content is None else content
    if not isinstance(content, str):
        raise DataError(f"a message needs text content, got {type(content).__name__}")
    for name in ("name", "tool_call_id"):
        if not isinstance(item.get(name), str | None):
            raise DataError(f"`{name}` must be text, got {type(item[name]).__name__}")
    try:
        content.encode()
        return Message(
            role=item["role"],
            content=content,
            name=item.get("name"),
            tool_calls=tuple(calls),
            tool_call_id=item.get("tool_call_id"),
            pictures=pictures,
        )
    except UnicodeEncodeError as error:
        raise DataError(f"{content[error.start]!r} is half a character, not text") from None
    except InvalidSampleError as error:
        raise DataError(str(error)) from None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", {}), str | Mapping)
    )
