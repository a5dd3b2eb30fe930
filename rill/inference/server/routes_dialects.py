"""POST /v1/responses and POST /v1/messages: OpenAI's Responses and Anthropic's messages, as chat completions.

A request is translated (rill.data.dialects), answered by the chat route, and its answer or stream is translated back,
so that all three APIs sample, stop and count alike. Nothing is stored: a conversation comes whole with every request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from rill.data.dialects import ANTHROPIC, RESPONSES, Answer, AnswerStream, Dialect
from rill.data.dialects.base import function_call
from rill.errors import RillError
from rill.inference.server.answers import json_response
from rill.inference.server.errors import ApiError, bad_request, error_body, to_api_error
from rill.inference.server.routes_chat import create_chat_completion
from rill.inference.server.schemas import ChatBody

routes = APIRouter()


@routes.post("/v1/responses")
async def create_response(request: Request) -> Response:
    return await _answer(RESPONSES, request)


@routes.post("/v1/messages")
async def create_message(request: Request) -> Response:
    return await _answer(ANTHROPIC, request)


async def _answer(dialect: Dialect, request: Request) -> Response:
    try:
        body = await _read(dialect, request)
        answered = await create_chat_completion(body, request)
    except (ApiError, RillError) as error:
        raised = to_api_error(error)
        told = error_body(raised)["error"]
        return json_response(dialect.error(told["message"], told["type"]), raised.status)
    if isinstance(answered, StreamingResponse):
        answered.body_iterator = _translated(dialect, answered.body_iterator)
        return answered
    return json_response(dialect.whole(_whole(json.loads(bytes(answered.body)))))


async def _read(dialect: Dialect, request: Request) -> ChatBody:
    try:
        body = json.loads(await request.body())
        if not isinstance(body, dict):
            raise TypeError("the body must be a JSON object")
        chat = dialect.to_chat(body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise bad_request(f"the request cannot be read: {error}") from None
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    try:
        return ChatBody.model_validate(chat)
    except ValidationError as error:
        first = error.errors()[0]
        raise bad_request(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _whole(chat: dict[str, Any]) -> Answer:
    choice, usage = chat["choices"][0], chat["usage"]
    return Answer(
        id=_id(chat),
        model=chat["model"],
        created=chat["created"],
        content=choice["message"].get("content") or "",
        calls=choice["message"].get("tool_calls") or (),
        finish_reason=choice["finish_reason"],
        num_prompt_tokens=usage["prompt_tokens"],
        num_completion_tokens=usage["completion_tokens"],
    )


async def _translated(dialect: Dialect, chunks: Any) -> AsyncIterator[bytes]:
    """The events of the other dialect, from those of chat."""
    stream: AnswerStream | None = None
    said = _Said()
    usage: dict[str, Any] = {}
    last: dict[str, Any] = {}
    async for chunk in _events(chunks):
        if "error" in chunk:
            told = chunk["error"]
            stream = stream or dialect.stream(Answer(id="0", model="", created=0))
            yield stream.error(told["message"], told["type"])
            return
        last, usage = chunk, chunk.get("usage") or usage
        if stream is None:
            stream = dialect.stream(Answer(id=_id(chunk), model=chunk["model"], created=chunk["created"]))
            yield stream.begin()
        for choice in chunk["choices"]:
            if new := stream.feed(*said.take(choice)):
                yield new
    if stream is not None:
        answer = Answer(
            id=_id(last),
            model=last["model"],
            created=last["created"],
            content="".join(said.content),
            calls=said.calls,
            finish_reason=said.finish_reason,
            num_prompt_tokens=usage.get("prompt_tokens", 0),
            num_completion_tokens=usage.get("completion_tokens", 0),
        )
        yield stream.end(answer)


class _Said:
    """What the chunks of a chat say together. Arguments of a call may come in pieces."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []
        """By their index; all but the last are complete, and that one when the answer ends."""
        self.finish_reason = "stop"
        self._num_told = 0

    def take(self, choice: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        """New text, and calls that are complete now."""
        delta = choice["delta"]
        for piece in delta.get("tool_calls") or ():
            function = piece.get("function") or {}
            if piece["index"] >= len(self.calls):
                self.calls.append(function_call(piece.get("id"), function.get("name"), ""))
            self.calls[piece["index"]]["function"]["arguments"] += function.get("arguments") or ""
        text = delta.get("content") or ""
        self.content.append(text)
        is_over = choice.get("finish_reason") is not None
        if is_over:
            self.finish_reason = choice["finish_reason"]
        num_complete = len(self.calls) if is_over else max(0, len(self.calls) - 1)
        complete = self.calls[self._num_told : num_complete]
        self._num_told = max(num_complete, self._num_told)
        return text, complete


async def _events(chunks: Any) -> AsyncIterator[dict[str, Any]]:
    """What server-sent events say. A piece of the stream holds whole events."""
    async for piece in chunks:
        data = piece if isinstance(piece, bytes) else piece.encode()
        for line in data.split(b"\n\n"):
            said = line.removeprefix(b"data: ")
            if said and said != b"[DONE]" and line.startswith(b"data: "):
                yield json.loads(said)


def _id(chat: dict[str, Any]) -> str:
    return str(chat["id"]).removeprefix("chatcmpl-")
