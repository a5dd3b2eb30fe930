"""OpenAI's chat completions: what the other dialects are translated to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rill.data.dialects.base import Answer, Calls, Dialect, event

DONE = b"data: [DONE]\n\n"


class ChatDialect:
    path = "/chat/completions"

    def to_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return dict(body)

    def whole(self, answer: Answer) -> dict[str, Any]:
        calls = [dict(call) for call in answer.calls]
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def stream(self, answer: Answer, *, shows_usage: bool = False) -> _ChatStream:
        return _ChatStream(answer, shows_usage)

    def error(self, message: str, code: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}


class _ChatStream:
    def __init__(self, answer: Answer, shows_usage: bool) -> None:
        self._head = _head(answer, "chat.completion.chunk")
        self._shows_usage = shows_usage
        self._num_calls = 0

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def feed(self, content: str, calls: Calls) -> bytes:
        delta: dict[str, Any] = {"content": content} if content else {}
        if calls:
            delta["tool_calls"] = [{"index": self._num_calls + n, **call} for n, call in enumerate(calls)]
            self._num_calls += len(calls)
        return self._chunk(delta) if delta else b""

    def end(self, answer: Answer) -> bytes:
        last = self._chunk({}, answer.finish_reason)
        if self._shows_usage:
            last += event({**self._head, "choices": [], "usage": _usage(answer)})
        return last + DONE

    def error(self, message: str, code: str) -> bytes:
        return event(CHAT.error(message, code)) + DONE

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_completion_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
    }


CHAT: Dialect = ChatDialect()
