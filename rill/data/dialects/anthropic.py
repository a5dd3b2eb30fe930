"""Anthropic's messages.

user [tool_result, text]   ⇔   tool message, user message
assistant [text, tool_use]  ⇔   content, tool_calls
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rill.data.dialects.base import (
    Answer,
    Calls,
    Dialect,
    copied,
    event,
    function_call,
    named_choice,
    read_tool,
    text_of,
)  # fmt: skip

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
CHOICES = {"auto": "auto", "none": "none", "any": "required"}


class AnthropicDialect:
    path = "/messages"

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages: a list that is not empty")
        system = text_of(body.get("system"), "system")
        chat: dict[str, Any] = {"messages": [{"role": "system", "content": system}] if system else []}
        for number, message in enumerate(messages):
            chat["messages"] += _read_message(message, f"messages.{number}")
        chat |= copied(
            body,
            {
                "model": "model", "max_tokens": "max_tokens", "stop_sequences": "stop", "stream": "stream",
                "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
            },
        )  # fmt: skip
        if body.get("tools"):
            chat["tools"] = [
                read_tool(t, kinds=(None, "custom"), schema="input_schema") for t in body["tools"]
            ]
            chat["tool_choice"] = _read_choice(body.get("tool_choice") or {"type": "auto"})
        return chat

    def whole(self, answer: Answer) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = [{"type": "text", "text": answer.content}] if answer.content else []
        blocks += [_tool_use(call) for call in answer.calls]
        return {
            **_head(answer),
            "content": blocks,
            "stop_reason": REASONS.get(answer.finish_reason, "end_turn"),
            "usage": _usage(answer),
        }

    def stream(self, answer: Answer, *, shows_usage: bool = False) -> _MessageStream:
        return _MessageStream(answer)

    def error(self, message: str, code: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": code, "message": message}}


class _MessageStream:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_blocks = 0
        self._is_text_open = False

    def begin(self) -> bytes:
        message = {**_head(self._answer), "content": [], "stop_reason": None, "usage": _usage(self._answer)}
        return _event("message_start", message=message)

    def feed(self, content: str, calls: Calls) -> bytes:
        out = b""
        if content:
            if not self._is_text_open:
                out += self._open({"type": "text", "text": ""})
                self._is_text_open = True
            out += self._delta({"type": "text_delta", "text": content})
        for call in calls:
            out += self._close_text()
            out += self._open({**_tool_use(call), "input": {}})
            out += self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]})
            out += self._close()
        return out

    def end(self, answer: Answer) -> bytes:
        reason = REASONS.get(answer.finish_reason, "end_turn")
        delta = _event(
            "message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=_usage(answer)
        )
        return self._close_text() + delta + _event("message_stop")

    def error(self, message: str, code: str) -> bytes:
        return event(ANTHROPIC.error(message, code), "error")

    def _open(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        self._num_blocks += 1
        return _event("content_block_stop", index=self._num_blocks - 1)

    def _close_text(self) -> bytes:
        if not self._is_text_open:
            return b""
        self._is_text_open = False
        return self._close()


def _read_message(message: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant", "system"):
        raise ValueError(f"{where}: a message needs the role user or assistant")
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, where)}]
    results, calls, rest = [], [], []
    for block in content:
        match block.get("type") if isinstance(block, Mapping) else None:
            case "tool_result":
                said = text_of(block.get("content"), f"{where}: tool_result")
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": said})
            case "tool_use":
                given = json.dumps(block.get("input") or {})
                calls.append(function_call(block.get("id"), block.get("name"), given))
            case "thinking" | "redacted_thinking":  # another model's own
                pass
            case _:
                rest.append(block)
    text = text_of(rest, where)
    if role == "assistant":
        return [{"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": text}] if rest or not results else [])]


def _read_choice(choice: Mapping[str, Any]) -> Any:
    if choice.get("type") == "tool":
        return named_choice(choice)
    if choice.get("type") not in CHOICES:
        raise ValueError(f"tool_choice: unknown type {choice.get('type')!r}")
    return CHOICES[choice["type"]]


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        given = None
    # What the model wrote is no object: shown to the tool as it is, which will refuse it.
    value = given if isinstance(given, dict) else {"arguments": function["arguments"]}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": value}


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "stop_sequence": None,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": answer.num_completion_tokens}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


ANTHROPIC: Dialect = AnthropicDialect()
