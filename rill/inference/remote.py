"""What the HTTP adapters share: an Engine whose requests are streams from a server.

    remote.py           the Engine's methods, and what a subclass must know of its server
    remote_flights.py   the requests under way: started, cut short, continued
    remote_http.py      requests and event streams over HTTP

Interruption is the client's: the stream is closed (servers abort what nobody reads) and the request goes on later with
its tokens as prompt. So partial rollouts work with any server that takes and gives token ids, and no request is under
way while weights change: every token's version is exact, as long as nobody else updates that server.

A subclass gives `_stream` and, where its server can, `_load_weights`, `_score_one`, `_flush` and the memory calls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx
from pydantic import Field

from rill.config import PartConfig
from rill.errors import EngineError, RequestError, UnsupportedError, WeightSyncError
from rill.inference.base import (
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.commands import CONTROL_TIMEOUT_S, MOVE_TIMEOUT_S
from rill.inference.flight import Flight
from rill.inference.remote_flights import Chunk, RemoteFlights
from rill.inference.remote_http import ServerHttp
from rill.inference.requests import Generates, check_fits, check_request
from rill.types import Floats, PolicyVersion, TokenIds

T = TypeVar("T")


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


class RemoteEngine(Generates):
    """Base of the HTTP adapters. See rill.inference.base.Engine for what each method promises."""

    def __init__(
        self, config: RemoteConfig, name: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.name = name
        self.max_context = 0
        """Set by a subclass: what its server takes."""
        self.vocab_size: int | None = None
        """Set by a subclass that knows it: bad ids are then refused in submit()."""
        self._http = ServerHttp(
            name,
            config.url,
            headers=bearer(os.environ.get(config.api_key_variable, "")),
            max_concurrent=config.max_concurrent,
            connect_timeout_s=config.connect_timeout_s,
            transport=transport,
        )
        self._flights = RemoteFlights(f"{name} at {self._http.url}", self._stream)

    # --- for subclasses ----------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[Feature]:
        raise AssertionError("a subclass says what it has")

    def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("a subclass speaks to its server")

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        """Afterwards the server has them, and nothing in its prefix cache is older."""
        raise AssertionError

    async def _score_one(self, token_ids: TokenIds, temperature: float) -> Floats:
        raise AssertionError

    async def _flush(self) -> None:
        """Drop the server's prefix cache, where it can be told to."""

    async def _release(self, level: MemoryLevel) -> None: ...

    async def _restore(self) -> None: ...

    # --- requests ----------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        return self._flights.version

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        if self._flights.unavailable is not None:
            raise EngineError(
                f"{self.name}: the last weight update failed ({self._flights.unavailable}): update again"
            )
        for request in requests:
            check_request(request, max_context=self.max_context, vocab_size=self.vocab_size)
            check_fits(request, self.max_context)
        flights = [Flight(request, on_delta) for request in requests]
        self._flights.submit(flights)
        return [flight.future for flight in flights]

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        self._require(Feature.SCORE)

        async def score_all() -> list[Floats]:
            return await asyncio.gather(*(self._score_one(s, temperature) for s in sequences))

        return self._call(score_all(), "score", timeout_s)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._call(self._flights.abort(request_ids), "abort")

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        async def pause_all() -> None:
            self._flights.is_paused = True
            await self._flights.hold(cut=mode is PauseMode.INTERRUPT)

        self._call(pause_all(), f"pause({mode})", timeout_s)

    def resume(self) -> None:
        async def resume_all() -> None:
            self._flights.is_paused = False
            self._flights.go_on()

        self._call(resume_all(), "resume")

    def release(self, level: MemoryLevel) -> None:
        if self._flights.num_running:
            raise EngineError(
                f"{self.name}: release needs an idle engine, {self._flights.num_running} requests run: pause"
            )
        self._require(Feature.RELEASE_MEMORY)
        self._call(self._release(level), "release", MOVE_TIMEOUT_S)

    def restore(self) -> None:
        self._require(Feature.RELEASE_MEMORY)
        self._call(self._restore(), "restore", MOVE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """Requests under way are cut short, and go on from their tokens under the new weights."""
        self._require(Feature.UPDATE_WEIGHTS)
        if partial and self._flights.unavailable is not None:
            raise WeightSyncError(f"{self.name}: after a failed update only a whole one can follow")
        self._swap(version, lambda: self._load_weights(tensors, version, partial))

    def rewind(self) -> None:
        self._flights.version = PolicyVersion(0)

    def _swap(self, version: PolicyVersion, load: Callable[[], Awaitable[None]]) -> None:
        """Nothing is under way while `load` runs; afterwards everything goes on under the new version."""
        flights = self._flights
        if version <= flights.version:
            raise WeightSyncError(f"{self.name}: version {version} is not newer than {flights.version}")

        async def swap() -> None:
            await flights.hold(cut=True)
            try:
                await load()
            except (httpx.HTTPError, EngineError, RequestError) as error:
                flights.unavailable = str(error)
                raise WeightSyncError(f"{self.name}: {error}") from error
            except WeightSyncError as error:
                flights.unavailable = str(error)
                raise
            except asyncio.CancelledError:
                flights.unavailable = "it was given up, and nobody knows how far it came"
                raise
            except UnsupportedError:
                flights.go_on()  # refused before anything was touched
                raise
            flights.version, flights.unavailable = version, None
            flights.go_on()

        self._call(swap(), "update_weights", MOVE_TIMEOUT_S)

    def flush(self) -> None:
        self._call(self._flush(), "flush")

    def stats(self) -> EngineStats:
        return self._flights.stats()

    def close(self) -> None:
        if self._flights.is_closed:
            return
        self._flights.is_closed = True
        self.abort()
        self._call(self._http.close(), "close")
        self._flights.close()

    def _call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float = CONTROL_TIMEOUT_S) -> T:
        return self._flights.call(work, what, timeout_s)

    def _require(self, feature: Feature) -> None:
        if feature not in self.features:
            raise UnsupportedError(
                f"{self.name} has no {feature.value}: it has {', '.join(sorted(self.features)) or 'none'}"
            )


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
