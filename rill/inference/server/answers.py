"""The way every generation request goes, whole or streamed.

A generation route makes an `Answer` of its body and gives it to `respond`. What completions and chat have in common is
in `OpenAIAnswer`: a choice for each piece of a sample, in an envelope.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, ClassVar, Protocol

from starlette.responses import Response

from rill.errors import RillError
from rill.inference.base import Request
from rill.inference.server.choices import finish_reason, stop_detail, usage
from rill.inference.server.errors import ApiError, bad_request, error_fields, to_api_error
from rill.inference.server.generation import Piece, Samples
from rill.inference.server.http import DONE, Call, EventStream, event, json_response
from rill.inference.server.sampling import new_id
from rill.inference.server.schemas import GenerationBody
from rill.inference.server.state import ServerState


class Answer(Protocol):
    """What a route asks the engine for, and what it makes of what comes back."""

    name: str
    """What /abort_requests calls it, for the same caller."""
    is_streamed: bool

    def requests(self) -> list[Request]: ...

    async def whole(self, samples: Samples) -> dict[str, Any]: ...

    def events(self, samples: Samples) -> AsyncIterator[bytes]: ...


class OpenAIAnswer:
    prefix: ClassVar[str]
    """Of its id."""
    kinds: ClassVar[tuple[str, str]]
    """What a whole answer and a chunk of a stream call themselves."""

    def __init__(self, state: ServerState, body: GenerationBody, prompts: list[list[int]]) -> None:
        self.state, self.body, self.prompts = state, body, prompts
        self.id = new_id(self.prefix)
        self.name = body.request_id or self.id
        self.is_streamed = bool(body.stream)
        self.created = int(time.time())
        self.model = body.model or state.config.model_name
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream=true", "stream_options")
        self._tells_usage = body.stream_options is not None and body.stream_options.include_usage

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""

    async def events(self, samples: Samples) -> AsyncIterator[bytes]:
        async for pieces in samples:
            told = [event(self.chunk(piece)) for piece in pieces]
            if not samples.num_left:  # one write for the last tokens and what follows them
                if self._tells_usage:
                    told.append(event(self.envelope([], is_chunk=True) | self.usage(samples)))
                told.append(DONE)
            yield b"".join(told)

    def choice(self, piece: Piece) -> dict[str, Any]:
        """What completions and chat say alike of a piece."""
        choice: dict[str, Any] = {
            "index": piece.index,
            "finish_reason": finish_reason(piece.completion),
            "stop_reason": stop_detail(piece.completion),
            "logprobs": None,
        }
        if self.body.return_token_ids:  # vLLM's token_ids, and our versions beside them
            choice["token_ids"] = piece.token_ids.tolist()
            choice["token_versions"] = piece.versions.tolist()
        return choice

    def usage(self, samples: Samples) -> dict[str, Any]:
        return {"usage": usage(sum(map(len, self.prompts)), samples.completions)}

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kinds[is_chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


async def respond(call: Call, answer: Answer) -> Response:
    """Admitted, run, and answered. The place that admission gave is held until the answer is made, or the stream has
    ended or lost its client."""
    state, requests = call.state, answer.requests()
    with ExitStack() as held:
        held.enter_context(state.admission.admit())
        name = (call.caller, answer.name)
        samples = held.enter_context(
            state.generation.submit(requests, name, call.http.receive, is_streamed=answer.is_streamed)
        )
        if not answer.is_streamed:
            return json_response(await answer.whole(samples))
        await samples.begun()
        return EventStream(_with_errors(answer.events(samples)), held.pop_all().close)


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The status line is sent already: an error in the middle becomes the last event."""
    try:
        async for data in events:
            yield data
    except (ApiError, RillError) as error:
        yield event({"error": error_fields(to_api_error(error))}) + DONE
