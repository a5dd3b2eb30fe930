"""What the HTTP adapters share: an Engine whose requests are streams from a server (remote_http.py speaks to it).

        caller's thread                    loop thread (asyncio)                        server
   submit ──▶ Flight ──▶ one task per flight: wait while held ──▶ open the stream ──▶ tokens
                              ▲                                        │ record in the flight, on_delta
                              └── cut short by a pause or an update ◀──┘ go on later from the tokens so far

Interruption is the client's: the stream is closed (servers abort what nobody reads) and the request goes on later with
its tokens as prompt. So partial rollouts work with any server that takes and gives token ids, and no request is under
way while weights change: every token's version is exact, as long as nobody else updates that server.

A subclass gives `_stream` and, where its server can, `_load_weights`, `_score_one`, `_flush` and the memory calls. Its
coroutines, and methods marked "loop", run on the loop's thread; `_call` is how other threads get there.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np
from pydantic import Field

from rill.config import PartConfig
from rill.errors import (
    EngineError,
    PeerDiedError,
    RequestError,
    StuckError,
    UnsupportedError,
    WeightSyncError,
)
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
from rill.inference.remote_http import ServerHttp
from rill.inference.requests import Generates, check_fits, check_ids, check_request
from rill.inference.tally import Tally
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


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


class RemoteEngine(Generates):
    """Base of the HTTP adapters. See rill.inference.base.Engine for what each method promises."""

    def __init__(
        self, config: RemoteConfig, name: str, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.name = name
        self.version = PolicyVersion(0)
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
        self._where = f"{name} at {self._http.url}"
        self._unavailable: str | None = None
        """Why the server's weights cannot be used."""
        self._is_closed = self._is_paused = self._is_held = False
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tally = Tally()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"{self._where}-client", daemon=True
        )
        self._thread.start()

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

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        if self._unavailable is not None:
            raise EngineError(
                f"{self.name}: the last weight update failed ({self._unavailable}): update again"
            )
        for request in requests:
            check_request(request, max_context=self.max_context, vocab_size=self.vocab_size)
            check_fits(request, self.max_context)
        flights = [Flight(request, on_delta) for request in requests]
        with self._lock:
            if self._is_closed:
                raise EngineError(f"{self._where}: the engine is closed")
            check_ids([request.id for request in requests], self._flights)
            self._flights.update((flight.request.id, flight) for flight in flights)
        self._loop.call_soon_threadsafe(self._start, flights)
        return [flight.future for flight in flights]

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        self._require(Feature.SCORE)

        async def score_all() -> list[Floats]:
            return await asyncio.gather(*(self._score_one(s, temperature) for s in sequences))

        return self._call(score_all(), "score", timeout_s)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        async def end() -> None:
            wanted = list(self._flights) if request_ids is None else request_ids
            flights = [self._flights[i] for i in wanted if i in self._flights]
            for flight in flights:
                flight.is_aborted = True
            await self._cut(flights)
            for flight in flights:
                self._end(flight, flight.aborted())

        self._call(end(), "abort")

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        async def pause_all() -> None:
            self._is_paused = True
            await self._hold(cut=mode is PauseMode.INTERRUPT)

        self._call(pause_all(), f"pause({mode})", timeout_s)

    def resume(self) -> None:
        async def resume_all() -> None:
            self._is_paused = False
            self._go_on()

        self._call(resume_all(), "resume")

    def release(self, level: MemoryLevel) -> None:
        if self._tasks:
            raise EngineError(
                f"{self.name}: release needs an idle engine, {len(self._tasks)} requests run: pause"
            )
        self._require(Feature.RELEASE_MEMORY)
        self._call(self._release(level), "release", MOVE_TIMEOUT_S)

    def restore(self) -> None:
        self._require(Feature.RELEASE_MEMORY)
        self._call(self._restore(), "restore", MOVE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """Requests under way are cut short, and go on from their tokens under the new weights."""
        self._require(Feature.UPDATE_WEIGHTS)
        if partial and self._unavailable is not None:
            raise WeightSyncError(f"{self.name}: after a failed update only a whole one can follow")
        if version <= self.version:
            raise WeightSyncError(f"{self.name}: version {version} is not newer than {self.version}")

        async def swap() -> None:
            await self._hold(cut=True)
            try:
                await self._load_weights(tensors, version, partial)
            except UnsupportedError:
                self._go_on()  # refused before anything was touched
                raise
            except (httpx.HTTPError, EngineError, RequestError, WeightSyncError) as error:
                self._unavailable = str(error)
                if isinstance(error, WeightSyncError):
                    raise
                raise WeightSyncError(f"{self.name}: {error}") from error
            except asyncio.CancelledError:
                self._unavailable = "it was given up, and nobody knows how far it came"
                raise
            self.version, self._unavailable = version, None
            self._go_on()

        self._call(swap(), "update_weights", MOVE_TIMEOUT_S)

    def rewind(self) -> None:
        self.version = PolicyVersion(0)

    def flush(self) -> None:
        self._call(self._flush(), "flush")

    def stats(self) -> EngineStats:
        num_running = len(self._tasks)
        return self._tally.stats(
            num_running=num_running,
            num_waiting=max(0, len(self._flights) - num_running),
            version=self.version,
        )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.abort()
        self._call(self._http.close(), "close")
        self._call(self._loop.shutdown_asyncgens(), "close", _CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float = CONTROL_TIMEOUT_S) -> T:
        """Run this on the loop and wait for it. What was given up has heard of it when this raises."""
        ended = threading.Event()

        async def run() -> T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            ended.wait(_CANCEL_TIMEOUT_S)
            raise StuckError(f"{self._where}: {what} did not end within {timeout_s} s") from None
        except httpx.TransportError as error:
            raise PeerDiedError(f"{self._where}: {type(error).__name__}: {error}") from error

    def _require(self, feature: Feature) -> None:
        if feature not in self.features:
            raise UnsupportedError(
                f"{self.name} has no {feature.value}: it has {', '.join(sorted(self.features)) or 'none'}"
            )

    # --- loop: control -----------------------------------------------------------------------------------

    async def _hold(self, *, cut: bool) -> None:
        """Start nothing more; what runs is cut short, or awaited."""
        self._is_held = True
        if cut:
            await self._cut(list(self._flights.values()))
        while not cut and (tasks := list(self._tasks.values())):
            await asyncio.wait(tasks)

    def _go_on(self) -> None:
        """Start everything that waits, unless paused or without usable weights."""
        if self._is_paused or self._unavailable is not None:
            return
        self._is_held = False
        self._start(list(self._flights.values()))

    # --- loop: one flight --------------------------------------------------------------------------------

    def _start(self, flights: Sequence[Flight]) -> None:
        """Those that have not ended and do not run: submit() and _go_on() may both ask for one."""
        if self._is_held:
            return  # _go_on() starts them
        for flight in flights:
            if flight.request.id in self._flights and flight.request.id not in self._tasks:
                task = self._loop.create_task(self._drive(flight), name=flight.request.id)
                self._tasks[flight.request.id] = task
                task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        if self._tasks.get(task.get_name()) is task:
            del self._tasks[task.get_name()]

    async def _drive(self, flight: Flight) -> None:
        try:
            outcome: Completion | BaseException = await self._run(flight)
        except httpx.TransportError as error:
            outcome = PeerDiedError(f"{self._where}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001 - boundary: whatever happened belongs to the request's future
            outcome = error
        self._end(flight, outcome)

    async def _run(self, flight: Flight) -> Completion:
        """One attempt: the stream from where the flight stands to its end."""
        ended = flight.already_ended()
        if ended is not None:
            return ended
        flight.restart()
        request = flight.next_request()
        # Closed here and now: a stream left to the garbage collector would keep the server generating.
        async with aclosing(self._stream(request)) as chunks:
            async for chunk in chunks:
                flight.record(self._delta(request.id, chunk))
                if chunk.stop_reason is not None:
                    return flight.completed(
                        chunk.stop_reason,
                        stop_text=chunk.stop_text,
                        num_cached_tokens=chunk.num_cached_tokens,
                    )
        raise EngineError(f"{self._where}: the stream of {request.id!r} ended without a finish reason")

    def _delta(self, request_id: str, chunk: Chunk) -> Delta:
        versions = [self.version] * len(chunk.token_ids) if chunk.versions is None else chunk.versions
        self._tally.add(num_generated_tokens=len(chunk.token_ids))
        return Delta(
            request_id=request_id,
            token_ids=np.asarray(chunk.token_ids, dtype=np.int32),
            logprobs=np.asarray(chunk.logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
            stop_reason=chunk.stop_reason,
        )

    async def _cut(self, flights: Sequence[Flight]) -> None:
        """Stop these streams and wait until they have stopped; the flights keep their tokens."""
        tasks = [self._tasks[f.request.id] for f in flights if f.request.id in self._tasks]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    def _end(self, flight: Flight, outcome: Completion | BaseException) -> None:
        if self._flights.pop(flight.request.id, None) is None:
            return
        self._tasks.pop(flight.request.id, None)
        if isinstance(outcome, Completion):
            self._tally.end(num_prompt=len(flight.request.token_ids), num_cached=outcome.num_cached_tokens)
        flight.finish(outcome)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
