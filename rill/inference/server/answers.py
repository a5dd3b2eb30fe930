"""Answers as HTTP: JSON, or server-sent events; and the way every generation request goes, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rill.errors import RillError
from rill.inference.base import Completion, Request
from rill.inference.server.errors import ApiError, error_body, to_api_error
from rill.inference.server.generation import SampleStream
from rill.inference.server.state import ServerState

_encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def json_response(body: Any, status: int = 200) -> Response:
    return Response(_encode_json(body), status_code=status, media_type="application/json")


def event(body: Any) -> bytes:
    return b"data: " + _encode_json(body) + b"\n\n"


async def respond(
    state: ServerState,
    caller: str,
    requests: Sequence[Request],
    http: HttpRequest,
    *,
    name: str,
    is_streamed: bool,
    whole: Callable[[list[Completion]], Awaitable[dict[str, Any]]],
    events: Callable[[SampleStream], AsyncIterator[bytes]],
) -> Response:
    """Admitted, run, and answered: by what `whole` makes of the completions, or by the events of the stream.

    `name`: what /abort_requests calls it, for the same caller. The place that admission gave is held until the answer
    is made, or the stream has ended or lost its client.
    """
    state.admission.enter(caller)
    ticket = state.generation.name_requests((caller, name), [request.id for request in requests])
    try:
        if not is_streamed:
            completions = await state.generation.run(requests, http)
            answer = json_response(await whole(completions))
            state.admission.leave()
            ticket.close()
            return answer
        stream = await state.generation.open(requests, http)
    except BaseException:
        state.admission.leave()
        ticket.close()
        raise

    def close() -> None:
        stream.close()
        state.admission.leave()
        ticket.close()

    return _EventStream(events(stream), close)


class _EventStream(StreamingResponse):
    """Server-sent events. `on_close` runs even when the client left before the first event."""

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(
            _with_errors(events), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The status line is sent already: an error in the middle becomes the last event."""
    try:
        async for data in events:
            yield data
    except (ApiError, RillError) as error:
        yield event(error_body(to_api_error(error))) + DONE
