"""POST /v1/responses and POST /v1/messages: OpenAI's Responses and Anthropic's messages, as chat completions.

A request is translated (rill.data.dialects), answered as the chat route would, and its answer or stream is translated
back, so that all three APIs sample, stop and count alike. Nothing is stored: a conversation comes whole with every
request.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from rill.data.dialects import ANTHROPIC, RESPONSES, Answer, Dialect
from rill.errors import RillError
from rill.inference.base import Completion
from rill.inference.base import Request as EngineRequest
from rill.inference.server.answers import respond
from rill.inference.server.errors import (
    ApiError,
    bad_request,
    describe_validation,
    error_fields,
    to_api_error,
)
from rill.inference.server.generation import Samples
from rill.inference.server.http import Access, Call, Routes
from rill.inference.server.routes_chat import ChatAnswer, chat_answer
from rill.inference.server.schemas import AnyBody, ChatBody, MessagesBody, ResponsesBody

routes = Routes()


@routes.post("/v1/responses", Access.CLIENT, RESPONSES.error)
async def create_response(call: Call, body: ResponsesBody) -> Response:
    return await _answer(RESPONSES, call, body)


@routes.post("/v1/messages", Access.CLIENT, ANTHROPIC.error)
async def create_message(call: Call, body: MessagesBody) -> Response:
    return await _answer(ANTHROPIC, call, body)


async def _answer(dialect: Dialect, call: Call, body: AnyBody) -> Response:
    try:
        chat = ChatBody.model_validate(dialect.to_chat(body.model_extra or {}))
    except ValidationError as error:
        raise describe_validation(error) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise bad_request(f"the request cannot be read: {error}") from None
    return await respond(call, _Translated(dialect, await chat_answer(call.state, chat)))


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
        stream = self._dialect.stream(self._blank)
        text, finish_reason = "", "stop"
        calls: list[dict[str, Any]] = []
        completions: list[Completion] = []
        yield stream.begin()
        try:
            async for pieces in samples:
                told = b""
                for piece in pieces:
                    content, complete, reason = self._chat.said(piece)
                    new = [call.as_json() for call in complete]
                    told += stream.feed(content, new)
                    text, calls, finish_reason = text + content, calls + new, reason or finish_reason
                if told:
                    yield told
                completions += [piece.completion for piece in pieces if piece.completion is not None]
        except (ApiError, RillError) as error:
            fields = error_fields(to_api_error(error))
            yield stream.error(fields["message"], fields["type"])
            return
        yield stream.end(self._said(text, calls, finish_reason, completions))

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
