"""POST /v1/responses and POST /v1/messages: OpenAI's Responses and Anthropic's messages, as chat completions.

A request is translated (rill.data.dialects), answered as the chat route would, and its answer or stream is translated
back, so that all three APIs sample, stop and count alike. Nothing is stored: a conversation comes whole with every
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from rill.data.dialects import ANTHROPIC, RESPONSES, Answer, Dialect
from rill.inference.server.answers import respond
from rill.inference.server.errors import (
    ApiError,
    bad_request,
    describe_validation,
    error_fields,
)
from rill.inference.server.generation import Piece, Samples
from rill.inference.server.http import Access, Call, Routes
from rill.inference.server.routes_chat import ChatAnswer
from rill.inference.server.schemas import ChatBody, DialectBody, MessagesBody, ResponsesBody
from rill.inference.server.text import encode_chat

routes = Routes()


@routes.post("/v1/responses", Access.CLIENT, RESPONSES.error)
async def create_response(call: Call, body: ResponsesBody) -> Response:
    return await _answer(RESPONSES, call, body)


@routes.post("/v1/messages", Access.CLIENT, ANTHROPIC.error)
async def create_message(call: Call, body: MessagesBody) -> Response:
    return await _answer(ANTHROPIC, call, body)


async def _answer(dialect: Dialect, call: Call, body: DialectBody) -> Response:
    try:
        chat = ChatBody.model_validate(dialect.to_chat(body.model_dump()))
    except ValidationError as error:
        raise describe_validation(error) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise bad_request(f"the request cannot be read: {error}") from None
    prompt, pictures = await encode_chat(call.state.codec, chat)
    return await respond(call, _Translated(dialect, call.state, chat, prompt, pictures))


class _Translated(ChatAnswer):
    """A chat answer in another dialect."""

    def __init__(self, dialect: Dialect, *asked: Any) -> None:
        super().__init__(*asked)
        self._dialect = dialect
        self.writes_tokens = False
        self._answer = Answer(id=self.id.removeprefix("chatcmpl-"), model=self.model, created=self.created)
        """With what was said so far."""
        self.name = dialect.whole(self._answer)["id"]
        self._stream = dialect.stream(self._answer)
        self._is_begun = False

    def limit(self) -> tuple[str, int | None]:
        param, value = super().limit()
        return "max_output_tokens" if self._dialect is RESPONSES else param, value

    async def whole(self, samples: Samples) -> dict[str, Any]:
        for piece in await samples.whole():
            self._hear(piece)
        return self._dialect.whole(self._counted(samples))

    def events(self, pieces: Sequence[Piece], samples: Samples) -> bytes:
        told = self._begin() + b"".join(self._stream.feed(*self._hear(piece)) for piece in pieces)
        return told if samples.num_left else told + self._stream.end(self._counted(samples))

    def failure(self, error: ApiError) -> bytes:
        fields = error_fields(error)
        return self._begin() + self._stream.error(fields["message"], fields["type"])

    def _begin(self) -> bytes:
        is_begun, self._is_begun = self._is_begun, True
        return b"" if is_begun else self._stream.begin()

    def _hear(self, piece: Piece) -> tuple[str, list[dict[str, Any]]]:
        """What came with it: text, and calls that are complete."""
        before, said = self._answer, self.hear(piece)
        self._answer = replace(
            before,
            content=before.content + said.content,
            calls=[*before.calls, *said.calls],
            finish_reason=said.finish_reason or before.finish_reason,
        )
        return said.content, said.calls

    def _counted(self, samples: Samples) -> Answer:
        usage = self.usage(samples)["usage"]
        return replace(
            self._answer,
            num_prompt_tokens=usage["prompt_tokens"],
            num_completion_tokens=usage["completion_tokens"],
        )
