"""OpenAI's Responses. Items of one answer (a message, calls) are one message of a chat.

What a server would have to keep (`previous_response_id`, `conversation`) is the caller's: to_chat refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "background")
IGNORED_ITEMS = ("reasoning",)
"""What another model thought."""


class ResponsesDialect:
    path = "/responses"

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if wrong := [name for name in KEPT_ELSEWHERE if body.get(name)]:
            raise ValueError(
                f"{', '.join(wrong)}: nothing is stored here; send the whole conversation as input"
            )
        kind = ((body.get("text") or {}).get("format") or {}).get("type", "text")
        if kind != "text":
            raise ValueError(f"text.format: {kind!r} is not supported")
        asked = body.get("input")
        items: Any = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        if not isinstance(items, list) or not items:
            raise ValueError("input: text, or a list of items that is not empty")
        chat: dict[str, Any] = {"messages": _read_items(items)}
        if body.get("instructions"):
            chat["messages"].insert(0, {"role": "system", "content": body["instructions"]})
        chat |= copied(
            body,
            {
                "model": "model", "max_output_tokens": "max_tokens", "stream": "stream", "temperature": "temperature",
                "top_p": "top_p", "parallel_tool_calls": "parallel_tool_calls",
            },
        )  # fmt: skip
        if body.get("tools"):
            chat["tools"] = [read_tool(t, kinds=("function",), schema="parameters") for t in body["tools"]]
            choice = body.get("tool_choice") or "auto"
            chat["tool_choice"] = choice if isinstance(choice, str) else named_choice(choice)
        return chat

    def whole(self, answer: Answer) -> dict[str, Any]:
        items: list[dict[str, Any]] = [_message(answer, answer.content)] if answer.content else []
        items += [_call_item(call) for call in answer.calls]
        return _response(answer, _status(answer), items)

    def stream(self, answer: Answer, *, shows_usage: bool = False) -> _ResponseStream:
        return _ResponseStream(answer)

    def error(self, message: str, code: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}


class _ResponseStream:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._text: str | None = None
        """Of the message that is open."""

    def begin(self) -> bytes:
        response = _response(self._answer, "in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def feed(self, content: str, calls: Calls) -> bytes:
        out = b""
        if content:
            out += self._open_message() if self._text is None else b""
            self._text = (self._text or "") + content
            out += self._part("response.output_text.delta", delta=content, logprobs=[])
        for call in calls:
            out += self._close_message() + self._call(_call_item(call))
        return out

    def end(self, answer: Answer) -> bytes:
        out = self._close_message()
        status = _status(answer)
        return out + self._event(f"response.{status}", response=_response(answer, status, self._items))

    def error(self, message: str, code: str) -> bytes:
        return self._event("error", message=message, code=code, param=None)

    def _open_message(self) -> bytes:
        item = _message(self._answer, None)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._item("added", item) + self._part("response.content_part.added", part=part)

    def _close_message(self) -> bytes:
        if self._text is None:
            return b""
        item = _message(self._answer, self._text)
        out = self._part("response.output_text.done", text=self._text, logprobs=[])
        out += self._part("response.content_part.done", part=item["content"][0])
        out += self._item("done", item)
        self._items.append(item)
        self._text = None
        return out

    def _call(self, item: dict[str, Any]) -> bytes:
        where = {"item_id": item["id"], "output_index": len(self._items)}
        out = self._item("added", {**item, "arguments": "", "status": "in_progress"})
        arguments = "response.function_call_arguments"
        out += self._event(f"{arguments}.delta", **where, delta=item["arguments"])
        out += self._event(f"{arguments}.done", **where, arguments=item["arguments"], name=item["name"])
        out += self._item("done", item)
        self._items.append(item)
        return out

    def _item(self, what: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._items), item=item)

    def _part(self, kind: str, **fields: Any) -> bytes:
        """Of the message that is open."""
        where = {"item_id": f"msg_{self._answer.id}", "output_index": len(self._items), "content_index": 0}
        return self._event(kind, **where, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._num_events += 1
        return event({"type": kind, "sequence_number": self._num_events - 1, **fields}, kind)


def _read_items(items: Sequence[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    is_answer_open = False
    """The last message is the assistant's, and further items may belong to it."""
    for number, item in enumerate(items):
        where = f"input.{number}"
        if not isinstance(item, Mapping):
            raise ValueError(f"{where}: an item must be an object, got {type(item).__name__}")
        kind = item.get("type") or "message"
        if kind in IGNORED_ITEMS:
            continue
        if kind == "function_call_output":
            content = text_of(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            is_answer_open = False
            continue
        if kind not in ("message", "function_call"):
            raise ValueError(f"{where}: an item of the type {kind!r} is not supported")
        role = "assistant" if kind == "function_call" else item.get("role")
        if not isinstance(role, str):
            raise ValueError(f"{where}: a message needs a role")
        if (
            role != "assistant"
            or not is_answer_open
            or (kind == "message" and messages[-1].get("tool_calls"))
        ):
            messages.append({"role": role, "content": ""})
        is_answer_open = role == "assistant"
        if kind == "message":
            messages[-1]["content"] += text_of(item.get("content"), where)
        else:
            call = function_call(item.get("call_id"), item.get("name"), item.get("arguments") or "{}")
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason in ("length", "abort") else "completed"


def _message(answer: Answer, text: str | None) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_{answer.id}",
        "role": "assistant",
        "status": "in_progress" if text is None else "completed",
        "content": [] if text is None else [part],
    }


def _call_item(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{call['id']}",
        "call_id": call["id"],
        "name": function["name"],
        "arguments": function["arguments"],
        "status": "completed",
    }


def _response(answer: Answer, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    total = answer.num_prompt_tokens + answer.num_completion_tokens
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "model": answer.model,
        "output": list(items),
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.num_completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        },
    }


RESPONSES: Dialect = ResponsesDialect()
