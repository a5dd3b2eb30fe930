"""POST /v1/responses and POST /v1/messages: OpenAI's Responses and Anthropic's messages, as chat completions.

A request is translated (rill.data.dialects), answered as the chat route would, and its answer or stream is translated
back, so that all three APIs sample, stop and count alike. Nothing is stored: a conversation comes whole with every
request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from rill.data.dialects import ANTHROPIC, RESPONSES, Answer, Dialect
from rill.data.dialects.base import function_call
from rill.errors import RillError
from rill.inference.base import Completion
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import json_response, respond
from rill.inference.server.errors import ApiError, bad_request, error_body, to_api_error
from rill.inference.server.generation import Samples
from rill.inference.server.routes_chat import ChatAnswer, chat_answer
from rill.inference.server.schemas import ChatBody
from rill.inference.server.state import state_of

routes = APIRouter()


@routes.post("/v1/responses")
async def create_response(request: Request) -> Response:
    return await _answer(RESPONSES, request)


@routes.post("/v1/messages")
async def create_message(request: Request) -> Response:
    return await _answer(ANTHROPIC, request)


async def _answer(dialect: Dialect, request: Request) -> Response:
    state = state_of(request)
    try:
        body = await _read(dialect, request)
        caller = state.keys.check_client(request)
        return await respond(state, caller, _Translated(dialect, await chat_answer(state, body)), request)
    except (ApiError, RillError) as error:
        raised = to_api_error(error)
        told = error_body(raised)["error"]
        return json_response(dialect.error(told["message"], told["type"]), raised.status)


async def _read(dialect: Dialect, request: Request) -> ChatBody:
    try:
        body = json.loads(await request.body())
        if not isinstance(body, dict):
            raise TypeError("the body must be a JSON object")
        return ChatBody.model_validate(dialect.to_chat(body))
    except ValidationError as error:
        first = error.errors()[0]
        raise bad_request(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise bad_request(f"the request cannot be read: {error}") from None


class _Translated:
    """A chat answer in another dialect."""

    def __init__(self, dialect: Dialect, chat: ChatAnswer) -> None:
        self._dialect, self._chat = dialect, chat
        self.name, self.is_streamed = chat.name, chat.is_streamed
        self._blank = Answer(id=chat.id.removeprefix("chatcmpl-"), model=chat.model, created=chat.created)

    def requests(self) -> list[EngineRequest]:
        return self._chat.requests()

    async def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        (choice,) = (await self._chat.whole(completions))["choices"]
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        return self._dialect.whole(
            self._said(message["content"] or "", calls, choice["finish_reason"], completions)
        )

    async def events(self, samples: Samples) -> AsyncIterator[bytes]:
        stream, said = self._dialect.stream(self._blank), _Said()
        completions: list[Completion] = []
        yield stream.begin()
        try:
            async for pieces in samples:
                for piece in pieces:
                    (choice,) = self._chat.chunk(piece)["choices"]
                    if new := stream.feed(*said.take(choice)):
                        yield new
                completions += [piece.completion for piece in pieces if piece.completion is not None]
        except (ApiError, RillError) as error:
            told = error_body(to_api_error(error))["error"]
            yield stream.error(told["message"], told["type"])
            return
        yield stream.end(self._said("".join(said.content), said.calls, said.finish_reason, completions))

    def _said(
        self, content: str, calls: Sequence[Any], finish_reason: str, completions: Sequence[Completion]
    ) -> Answer:
        usage = self._chat.usage(completions)["usage"]
        return replace(
            self._blank,
            content=content,
            calls=calls,
            finish_reason=finish_reason,
            num_prompt_tokens=usage["prompt_tokens"],
            num_completion_tokens=usage["completion_tokens"],
        )


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
