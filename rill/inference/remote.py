"""What the HTTP adapters share: an Engine whose requests are streams from a server, and how that is spoken to.

A stream that is cut short is closed: servers abort what nobody reads. flight_engine.py has all the rest. A subclass
gives `_stream` and, where its server can, `_load_weights`, `_score_one`, `_flush` and the memory calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from pydantic import Field

from rill.config import PartConfig
from rill.errors import AccessError, EngineError, PeerDiedError, RequestError
from rill.inference.base import Completion, Delta, Request
from rill.inference.continued import Flight
from rill.inference.flight_engine import FlightEngine
from rill.types import StopReason


class RemoteConfig(PartConfig):
    """What every server needs to be told."""

    url: str
    """The server's base address."""
    api_key_variable: str
    """The environment variable that holds the key. Unset or empty there: no key is sent."""
    max_concurrent: int = Field(default=512, ge=1)
    """Requests open at one time."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """To reach the server, in seconds."""


class ServerHttp:
    """A server's refusals as rill's errors: a 4xx is the request's mistake (RequestError), everything else that is not
    success an EngineError; what the network does is a PeerDiedError."""

    def __init__(self, name: str, config: RemoteConfig, transport: httpx.AsyncBaseTransport | None) -> None:
        self.name = name
        self.url = config.url.rstrip("/")
        most = config.max_concurrent
        self.client = httpx.AsyncClient(
            base_url=self.url,
            headers=bearer(os.environ.get(config.api_key_variable, "")),
            transport=transport,
            # Generation may take as long as it takes; only connecting has a limit of its own.
            timeout=httpx.Timeout(None, connect=config.connect_timeout_s),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
        )

    async def get(self, path: str) -> Any | None:
        """The JSON there, or None where the server has no such route."""
        with self._reached():
            response = await self.client.get(path)
        return response.json() if response.status_code == 200 else None

    async def post(
        self, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> Any:
        """The JSON that comes back, or the text where it is none. `headers` go over the client's own."""
        with self._reached():
            response = await self.client.post(path, json=body, headers=headers)
        self._raise_for_status(path, response.status_code, response.text)
        with suppress(ValueError):
            return response.json()
        return response.text

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a POST, decoded, up to [DONE]."""
        with self._reached():
            async with self.client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    self._raise_for_status(path, response.status_code, text)
                async for line in _lines(response):
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event and "choices" not in event:
                        raise self._event_error(event["error"])
                    yield event

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise PeerDiedError(f"{self.name} at {self.url}: {type(error).__name__}: {error}") from error

    def _event_error(self, error: Any) -> Exception:
        """A stream has its status line behind it: vLLM, SGLang and rill put the reason into an event."""
        told = error if isinstance(error, dict) else {}
        code = 400 if told.get("type") == "invalid_request_error" else told.get("code")
        return _error(code if isinstance(code, int) else 500, f"{self.name}: {json.dumps(error)[:500]}")

    def _raise_for_status(self, path: str, status: int, text: str) -> None:
        if status >= 400:
            raise _error(status, f"{self.name}: {path} answered {status}: {text[:500]}")


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """As server-sent events have them. httpx's own also end at what only Unicode calls a line's end, in a token's text
    for example."""
    held = b""
    async for part in response.aiter_bytes():
        *lines, held = (held + part).split(b"\n")
        for line in lines:
            yield line
    yield held


def _error(status: int, message: str) -> Exception:
    if status in (401, 403):
        return AccessError(message)
    return RequestError(message) if 400 <= status < 500 and status != 429 else EngineError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a server's stream gained."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int] | None = None
    """Where the server says; else the adapter's own version."""
    stop_reason: StopReason | None = None
    """Set on the last chunk."""
    stop_text: str | None = None
    num_cached_tokens: int = 0


class RemoteEngine(FlightEngine):
    """Base of the HTTP adapters."""

    def __init__(
        self, config: RemoteConfig, name: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self._http = ServerHttp(name, config, transport)
        super().__init__(name, f"{name} at {self._http.url}")

    def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("a subclass speaks to its server")

    async def _attempt(self, flight: Flight, request: Request) -> Completion:
        # Closed here and now: a stream left to the garbage collector would keep the server generating.
        async with aclosing(self._stream(request)) as chunks:
            async for chunk in chunks:
                self._gain(flight, self._delta(request.id, chunk))
                if chunk.stop_reason is not None:
                    return flight.completed(
                        chunk.stop_reason,
                        stop_text=chunk.stop_text,
                        num_cached_tokens=chunk.num_cached_tokens,
                    )
        raise EngineError(f"{self._where}: the stream of {request.id!r} ended without a finish reason")

    def _delta(self, request_id: str, chunk: Chunk) -> Delta:
        versions = [self.version] * len(chunk.token_ids) if chunk.versions is None else chunk.versions
        return Delta(
            request_id=request_id,
            token_ids=np.asarray(chunk.token_ids, dtype=np.int32),
            logprobs=np.asarray(chunk.logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
            stop_reason=chunk.stop_reason,
        )

    async def _close(self) -> None:
        await self._http.client.aclose()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
