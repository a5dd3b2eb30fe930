"""What the HTTP adapters share: an Engine whose requests are streams from a server (remote_http.py speaks to it).

A stream that is cut short is closed: servers abort what nobody reads. flight_engine.py has all the rest. A subclass
gives `_stream` and, where its server can, `_load_weights`, `_score_one`, `_flush` and the memory calls.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import httpx
import numpy as np
from pydantic import Field

from rill.config import PartConfig
from rill.errors import EngineError
from rill.inference.base import Completion, Delta, Request
from rill.inference.flight import Flight
from rill.inference.flight_engine import FlightEngine
from rill.inference.remote_http import ServerHttp
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
        self._http = ServerHttp(
            name,
            config.url,
            headers=bearer(os.environ.get(config.api_key_variable, "")),
            max_concurrent=config.max_concurrent,
            connect_timeout_s=config.connect_timeout_s,
            transport=transport,
        )
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
        await self._http.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
