"""What every route needs, in one record on the application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rill.errors import RillError
from rill.inference.base import Engine
from rill.inference.server.auth import KeyRing
from rill.inference.server.config import ServerConfig
from rill.inference.server.errors import ApiError, error_body, to_api_error
from rill.inference.server.generation import Generation
from rill.inference.server.limits import Admission
from rill.inference.server.metrics import Metrics
from rill.inference.server.text import TextCodec
from rill.inference.server.tool_calls import ToolSyntax

if TYPE_CHECKING:
    from rill.inference.server.weights import WeightInbox
    from rill.models.loading import ModelConfig

encode_json = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class ServerState:
    engine: Engine
    codec: TextCodec
    tool_syntax: ToolSyntax
    """How this model writes tool calls."""
    config: ServerConfig
    keys: KeyRing
    admission: Admission
    metrics: Metrics
    generation: Generation
    model: ModelConfig | None
    """What the engine was loaded from: new weights are compared with it, and /reload_weights goes back to it."""
    started_at: int = field(default_factory=lambda: int(time.time()))
    admin_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Administration is one thing at a time."""
    is_paused: bool = False
    is_asleep: bool = False
    inbox: WeightInbox | None = None
    """Made by the first update: the parent of replicas needs no torch until then."""


def state_of(request: Request) -> ServerState:
    state = request.app.state.server
    assert isinstance(state, ServerState)
    return state


def json_response(body: Any, status: int = 200) -> Response:
    return Response(encode_json(body), status_code=status, media_type="application/json")


class EventStream(StreamingResponse):
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


def event(body: Any) -> bytes:
    return b"data: " + encode_json(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The status line is sent already: an error in the middle becomes the last event."""
    try:
        async for data in events:
            yield data
    except (ApiError, RillError) as error:
        yield event(error_body(to_api_error(error))) + DONE
