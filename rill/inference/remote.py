"""What the HTTP adapters share: an Engine whose requests are streams from a server.

        caller's thread                    loop thread (asyncio)                        server
   submit ──▶ Flight ──▶ one task per flight: wait while paused ──▶ POST, stream ──▶ tokens
                              ▲                                        │ record in the flight, on_delta
                              └── cut short by pause or update: go on ◀┘ from the tokens so far

Interruption is the client's: the stream is closed (servers abort what nobody reads) and the request goes on later with
its tokens as prompt. So partial rollouts work with any server that takes and gives token ids, and no request is under
way while weights change: every token's version is exact, as long as nobody else updates that server.

A subclass gives `_stream` and, where its server can, `_load_weights`, `_score_one`, `_flush` and the memory calls.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import numpy as np

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
from rill.inference.flight import Flight
from rill.inference.requests import check_request
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

T = TypeVar("T")

_CONTROL_TIMEOUT_S = 120.0


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


class RemoteEngine:
    """Base of the HTTP adapters. See rill.inference.base.Engine for what each method promises."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        headers: dict[str, str],
        max_concurrent: int,
        connect_timeout_s: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.name = name
        self.vocab_size: int | None = None
        """Set by a subclass that knows it: bad ids are then refused in submit()."""
        self._url = url.rstrip("/")
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_finished = self._num_prompt = self._num_cached = self._num_generated = 0
        self._version = PolicyVersion(0)
        self._unavailable: str | None = None
        self._is_paused = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-client", daemon=True)
        self._thread.start()
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            transport=transport,
            # Generation may take as long as it takes; only connecting has a limit of its own.
            timeout=httpx.Timeout(None, connect=connect_timeout_s),
            limits=httpx.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent),
        )
        self._running = asyncio.Event()
        self._running.set()
        self._is_closed = False

    # --- for subclasses ----------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[Feature]:
        raise AssertionError("a subclass says what it has")

    @property
    def max_context(self) -> int:
        raise AssertionError("a subclass says what its server takes")

    def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        raise AssertionError("a subclass speaks to its server")

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        raise self._lacks(Feature.UPDATE_WEIGHTS)

    async def _score_one(self, token_ids: TokenIds, temperature: float) -> Floats:
        raise self._lacks(Feature.SCORE)

    async def _flush(self) -> None:
        """Drop the server's prefix cache, where it can be told to."""

    async def _release(self, level: MemoryLevel) -> None:
        raise self._lacks(Feature.RELEASE_MEMORY)

    async def _restore(self) -> None:
        raise self._lacks(Feature.RELEASE_MEMORY)

    # --- requests ----------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        return self._version

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        if self._unavailable is not None:
            raise EngineError(
                f"{self.name}: the last weight update failed ({self._unavailable}): update again"
            )
        for request in requests:
            check_request(request, max_context=self.max_context, vocab_size=self.vocab_size)
        flights = [Flight(request, on_delta) for request in requests]
        with self._lock:
            if self._is_closed:
                raise EngineError(f"{self.name}: the engine is closed")
            for flight in flights:
                if flight.request.id in self._flights:
                    raise RequestError(
                        f"request {flight.request.id!r} is already under way: give it its own id"
                    )
                self._flights[flight.request.id] = flight
        self._loop.call_soon_threadsafe(self._start, flights)
        return [flight.future for flight in flights]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        futures = self.submit(requests)
        try:
            return [f.result(max(0.0, deadline - time.monotonic())) for f in futures]
        except FutureTimeoutError:
            self.abort([r.id for r in requests])
            raise StuckError(f"{self.name}: generate did not end within {timeout_s} s") from None

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        async def score_all() -> list[Floats]:
            return await asyncio.gather(*(self._score_one(s, temperature) for s in sequences))

        return self._call(score_all(), "score", timeout_s)

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        async def abort_all() -> None:
            wanted = list(self._flights) if request_ids is None else request_ids
            flights = [self._flights[i] for i in wanted if i in self._flights]
            for flight in flights:
                flight.is_aborted = True
            await self._cut(flights)
            for flight in flights:
                self._end(flight, flight.aborted())

        self._call(abort_all(), "abort", _CONTROL_TIMEOUT_S)

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        async def pause_all() -> None:
            self._is_paused = True
            self._running.clear()
            if mode is PauseMode.INTERRUPT:
                await self._cut(list(self._flights.values()))
            else:
                while tasks := list(self._tasks.values()):
                    await asyncio.wait(tasks)

        self._call(pause_all(), f"pause({mode})", timeout_s)

    def resume(self) -> None:
        async def resume_all() -> None:
            self._is_paused = False
            self._go_on()

        self._call(resume_all(), "resume", _CONTROL_TIMEOUT_S)

    def release(self, level: MemoryLevel) -> None:
        if self._tasks:
            raise EngineError(
                f"{self.name}: release needs an idle engine, {len(self._tasks)} requests run: pause"
            )
        self._call(self._release(level), "release", _CONTROL_TIMEOUT_S)

    def restore(self) -> None:
        self._call(self._restore(), "restore", _CONTROL_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        """Requests under way are cut short, and go on from their tokens under the new weights."""
        if Feature.UPDATE_WEIGHTS not in self.features:
            raise self._lacks(Feature.UPDATE_WEIGHTS)
        if version <= self._version:
            raise WeightSyncError(f"{self.name}: version {version} is not newer than {self._version}")
        if partial and self._unavailable is not None:
            raise WeightSyncError(f"{self.name}: after a failed update only a whole one can follow")

        self._swap(version, lambda: self._load_weights(tensors, version, partial))

    def _swap(self, version: PolicyVersion, load: Callable[[], Awaitable[None]]) -> None:
        """Nothing is under way while `load` runs; afterwards everything goes on under the new version."""

        async def swap() -> None:
            self._running.clear()
            await self._cut(list(self._flights.values()))
            try:
                await load()
                await self._flush()
            except (httpx.HTTPError, EngineError, RequestError) as error:
                self._unavailable = str(error)
                raise WeightSyncError(f"{self.name}: {error}") from error
            except WeightSyncError as error:
                self._unavailable = str(error)
                raise
            except UnsupportedError:
                self._go_on()  # refused before anything was touched
                raise
            self._version, self._unavailable = version, None
            self._go_on()

        self._call(swap(), "update_weights", 1800.0)

    def flush(self) -> None:
        self._call(self._flush(), "flush", _CONTROL_TIMEOUT_S)

    def stats(self) -> EngineStats:
        num_running = len(self._tasks)
        return EngineStats(
            num_running=num_running,
            num_waiting=max(0, len(self._flights) - num_running),
            num_finished=self._num_finished,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=self._num_generated,
            version=self._version,
        )

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.abort()
        self._call(self._client.aclose(), "close", _CONTROL_TIMEOUT_S)
        self._call(self._loop.shutdown_asyncgens(), "close", _CONTROL_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    # --- the loop's thread -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Start everything that waits, unless paused or without usable weights."""
        if self._is_paused or self._unavailable is not None:
            return
        self._running.set()
        self._start([f for f in self._flights.values() if f.request.id not in self._tasks])

    def _start(self, flights: Sequence[Flight]) -> None:
        if not self._running.is_set():
            return  # resume() starts them
        for flight in flights:
            if flight.request.id in self._flights:
                task = self._loop.create_task(self._drive(flight), name=flight.request.id)
                self._tasks[flight.request.id] = task
                task.add_done_callback(self._forget_task)

    def _forget_task(self, task: asyncio.Task[None]) -> None:
        if self._tasks.get(task.get_name()) is task:
            del self._tasks[task.get_name()]

    async def _drive(self, flight: Flight) -> None:
        try:
            outcome: Completion | BaseException = flight.joined(await self._run(flight))
        except httpx.TransportError as error:
            outcome = PeerDiedError(f"{self.name} at {self._url}: {type(error).__name__}: {error}")
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
        parts: list[Delta] = []
        # Closed here and now: a stream left to the garbage collector would keep the server generating.
        async with aclosing(self._stream(request)) as chunks:
            async for chunk in chunks:
                delta = self._delta(request.id, chunk)
                parts.append(delta)
                flight.record(delta)
                if chunk.stop_reason is not None:
                    return _completion(parts, chunk)
        raise EngineError(f"{self.name}: the stream of {request.id!r} ended without a finish reason")

    def _delta(self, request_id: str, chunk: Chunk) -> Delta:
        versions = [self._version] * len(chunk.token_ids) if chunk.versions is None else chunk.versions
        self._num_generated += len(chunk.token_ids)
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
            self._num_finished += 1
            self._num_prompt += len(flight.request.token_ids)
            self._num_cached += outcome.num_cached_tokens
        flight.finish(outcome)

    def _call(self, work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise StuckError(f"{self.name}: {what} did not end within {timeout_s} s") from None
        except httpx.TransportError as error:
            raise PeerDiedError(f"{self.name} at {self._url}: {type(error).__name__}: {error}") from error

    # --- HTTP --------------------------------------------------------------------------------------------

    async def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        response = await self._client.post(path, json=body)
        _raise_for_status(self.name, path, response.status_code, response.text)
        with suppress(ValueError):
            return response.json()
        return response.text

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of a POST, decoded, up to [DONE]."""
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                _raise_for_status(self.name, path, response.status_code, text)
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event and "choices" not in event:
                    raise EngineError(f"{self.name}: {json.dumps(event['error'])[:500]}")
                yield event

    def _lacks(self, feature: Feature) -> UnsupportedError:
        return UnsupportedError(
            f"{self.name} has no {feature.value}: it has {', '.join(sorted(self.features)) or 'none'}"
        )


def _completion(parts: Sequence[Delta], last: Chunk) -> Completion:
    assert last.stop_reason is not None
    return Completion(
        request_id=parts[0].request_id,
        token_ids=np.concatenate([p.token_ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        stop_reason=last.stop_reason,
        stop_text=last.stop_text,
        num_cached_tokens=last.num_cached_tokens,
    )


def _raise_for_status(name: str, path: str, status: int, text: str) -> None:
    if status < 400:
        return
    message = f"{name}: {path} answered {status}: {text[:500]}"
    raise RequestError(message) if status < 500 and status != 429 else EngineError(message)
