"""Requests under way at a server: one task each on an event loop of its own, cut short and continued.

        caller's thread                    loop thread (asyncio)                        server
   submit ──▶ Flight ──▶ one task per flight: wait while held ──▶ open the stream ──▶ tokens
                              ▲                                        │ record in the flight, on_delta
                              └── cut short by a pause or an update ◀──┘ go on later from the tokens so far

Used by remote.py. Methods marked "loop" run on the loop's thread; `call` is how other threads get there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np

from rill.errors import EngineError, PeerDiedError, StuckError
from rill.inference.base import Completion, Delta, EngineStats, Request
from rill.inference.flight import Flight
from rill.inference.requests import check_ids
from rill.inference.tally import Tally
from rill.types import PolicyVersion, StopReason

T = TypeVar("T")

_CANCEL_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 10.0


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


class RemoteFlights:
    def __init__(self, where: str, open_stream: Callable[[Request], AsyncGenerator[Chunk, None]]) -> None:
        """`where` names the server in errors; `open_stream` is one attempt at a request."""
        self._where = where
        self._open_stream = open_stream
        self.version = PolicyVersion(0)
        self.is_paused = False
        self.unavailable: str | None = None
        """Why the server's weights cannot be used."""
        self.is_closed = False
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_held = False
        self._tally = Tally()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{where}-client", daemon=True)
        self._thread.start()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    def submit(self, flights: Sequence[Flight]) -> None:
        with self._lock:
            if self.is_closed:
                raise EngineError(f"{self._where}: the engine is closed")
            check_ids([flight.request.id for flight in flights], self._flights)
            for flight in flights:
                self._flights[flight.request.id] = flight
        self._loop.call_soon_threadsafe(self._start, flights)

    def call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
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

    def stats(self) -> EngineStats:
        num_running = len(self._tasks)
        return self._tally.stats(
            num_running=num_running,
            num_waiting=max(0, len(self._flights) - num_running),
            version=self.version,
        )

    def close(self) -> None:
        """The loop ends; what it runs has been aborted by then."""
        self.call(self._loop.shutdown_asyncgens(), "close", _CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    # --- loop: control -----------------------------------------------------------------------------------

    async def hold(self, *, cut: bool) -> None:
        """Start nothing more; what runs is cut short, or awaited."""
        self._is_held = True
        if cut:
            await self._cut(list(self._flights.values()))
        while not cut and (tasks := list(self._tasks.values())):
            await asyncio.wait(tasks)

    def go_on(self) -> None:
        """Start everything that waits, unless paused or without usable weights."""
        if self.is_paused or self.unavailable is not None:
            return
        self._is_held = False
        self._start(list(self._flights.values()))

    async def abort(self, request_ids: Sequence[str] | None) -> None:
        wanted = list(self._flights) if request_ids is None else request_ids
        flights = [self._flights[i] for i in wanted if i in self._flights]
        for flight in flights:
            flight.is_aborted = True
        await self._cut(flights)
        for flight in flights:
            self._end(flight, flight.aborted())

    # --- loop: one flight --------------------------------------------------------------------------------

    def _start(self, flights: Sequence[Flight]) -> None:
        """Those that have not ended and do not run: submit() and go_on() may both ask for one."""
        if self._is_held:
            return  # go_on() starts them
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
        async with aclosing(self._open_stream(request)) as chunks:
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
