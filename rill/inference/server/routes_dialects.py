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
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    usage: dict[str, Any] = {}
    last: dict[str, Any] = {}
    reason = "stop"
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
            delta = choice["delta"]
            reason = choice.get("finish_reason") or reason
            new = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls") or ()]
            text = delta.get("content") or ""
            content.append(text)
            calls += new
            if said := stream.feed(text, new):
                yield said
    if stream is not None:
        yield stream.end(
            Answer(
                id=_id(last),
                model=last["model"],
                created=last["created"],
                content="".join(content),
                calls=calls,
                finish_reason=reason,
                num_prompt_tokens=usage.get("prompt_tokens", 0),
                num_completion_tokens=usage.get("completion_tokens", 0),
            )
        )


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
