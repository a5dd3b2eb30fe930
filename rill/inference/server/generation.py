"""Between the event loop and the engine's thread.

        engine thread                                  event loop
   on_delta(d) ──▶ pending ──┐ one wake-up, however many   ┌──▶ stream A ──▶ one event for each sample
   on_delta(d) ──▶ pending ──┤ are pending: at once for    ├──▶ stream B ──▶ …
   future done ──▶ pending ──┘ first tokens and ends,      └──▶ …
                               else every stream_interval_s, or 1 ms for each stream

A request that is not streamed costs the loop one wake-up, when it ends. A stream sends everything new as one event for
each sample: a loop that falls behind sends larger events, not later ones. Whoever stops waiting (disconnect, deadline,
cancel) has its requests aborted.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request as HttpRequest

from rill.inference.base import Completion, Delta, Engine, Request
from rill.inference.replica_outbox import PackedDeltas
from rill.inference.server.errors import ApiError
from rill.inference.server.metrics import Metrics
from rill.types import Floats, Ints, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of one sample of a stream."""

    index: int
    token_ids: TokenIds
    logprobs: Floats
    versions: Ints
    completion: Completion | None
    """Set on the sample's last piece."""


class Generation:
    """Runs requests on the engine for the event loop that it was made on."""

    def __init__(self, engine: Engine, metrics: Metrics, timeout_s: float, stream_interval_s: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._timeout_s = timeout_s or None
        self._hub = _Hub(asyncio.get_running_loop(), stream_interval_s)

    async def run(self, requests: Sequence[Request], http: HttpRequest) -> list[Completion]:
        """All completions, in the order of the requests."""
        started = time.perf_counter()
        futures = [asyncio.wrap_future(f) for f in self._engine.submit(requests)]
        gone = asyncio.ensure_future(_disconnected(http))
        everything = asyncio.gather(*futures)
        try:
            waits: list[asyncio.Future[Any]] = [everything, gone]
            done, _ = await asyncio.wait(waits, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if everything not in done:
                raise _gave_up(self._timeout_s) if gone not in done else ApiError(499, "the client went away")
            completions = everything.result()
        except BaseException:
            self._give_up(requests)
            raise
        finally:
            gone.cancel()
            everything.cancel()
        self._observe(requests, completions, time.perf_counter() - started)
        return completions

    async def open(self, requests: Sequence[Request], http: HttpRequest) -> SampleStream:
        """Submit now, iterate later. Returns with the first token: what goes wrong before that is an HTTP status, which
        clients know how to retry, and not an event of a stream that began well."""
        stream = SampleStream(self, requests)
        self._hub.register(stream)
        # Told more often than it is sent, the tokens would only wait here.
        interval_s = self._hub.interval_s
        requests = [replace(request, delta_interval_s=interval_s) for request in requests]
        try:
            futures = self._engine.submit(requests, self._hub.push)
        except BaseException:
            stream.close(is_under_way=False)
            raise
        for future in futures:
            future.add_done_callback(stream.on_done)
        try:
            await self._first_news(stream, http)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _first_news(self, stream: SampleStream, http: HttpRequest) -> None:
        gone = asyncio.ensure_future(_disconnected(http))
        begun = asyncio.ensure_future(stream.begun())
        try:
            done, _ = await asyncio.wait((begun, gone), return_when=asyncio.FIRST_COMPLETED)
            if begun not in done:
                raise ApiError(499, "the client went away")
            begun.result()
        finally:
            gone.cancel()
            begun.cancel()

    def _give_up(self, requests: Sequence[Request]) -> None:
        self._metrics.num_aborted += len(requests)
        # An engine may take its lock in abort: not on the event loop.
        asyncio.get_running_loop().run_in_executor(None, self._engine.abort, [r.id for r in requests])

    def _observe(self, requests: Sequence[Request], done: Sequence[Completion], seconds: float) -> None:
        self._metrics.latency_s.observe(seconds)
        self._metrics.num_prompt_tokens += sum(len(r.token_ids) for r in requests)
        for completion in done:
            self._metrics.count_completion(len(completion.token_ids))


class SampleStream:
    """The samples of one HTTP request as they grow. Iterates over batches of pieces; close() aborts the rest."""

    def __init__(self, owner: Generation, requests: Sequence[Request]) -> None:
        self._owner = owner
        self._requests = requests
        self._index = {r.id: i for i, r in enumerate(requests)}
        self._received = [0] * len(requests)
        self._completions: list[Completion] = []
        self._news: list[Delta | Future[Completion]] = []
        self._wake = asyncio.Event()
        self._opened_at = time.perf_counter()
        self._is_closed = False
        self._is_late = False
        # One timer for the whole stream: a timeout around every wait would cost a task each.
        self._deadline = owner._hub.call_later(owner._timeout_s, self._be_late)
        self.has_token = False
        """Whether a token has come; set on the engine's thread."""

    @property
    def request_ids(self) -> list[str]:
        return [r.id for r in self._requests]

    def on_done(self, future: Future[Completion]) -> None:
        """Called on the engine's thread. The order with the last delta does not matter."""
        self._owner._hub.push_end(self, future)

    def deliver(self, news: list[Delta | Future[Completion]]) -> None:
        self._news.extend(news)
        self._wake.set()

    async def begun(self) -> None:
        """Waits for the first news; raises where they are that a sample failed, or that it is too late."""
        await self._wake.wait()
        if self._is_late:
            raise _gave_up(self._owner._timeout_s)
        for item in self._news:
            if not isinstance(item, Delta):
                item.result()

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        is_first = True
        while len(self._completions) < len(self._requests):
            await self._wake.wait()
            self._wake.clear()
            if self._is_late:
                raise _gave_up(self._owner._timeout_s)
            news, self._news = self._news, []
            ends = [item for item in news if not isinstance(item, Delta)]
            pieces = self._pieces([item for item in news if isinstance(item, Delta)], ends)
            if pieces and is_first:
                is_first = False
                self._owner._metrics.first_token_s.observe(time.perf_counter() - self._opened_at)
            if pieces:
                yield pieces
            for end in ends:
                end.result()  # a sample that failed ends the stream, after what came before it
        self._owner._observe(self._requests, self._completions, time.perf_counter() - self._opened_at)

    def close(self, *, is_under_way: bool = True) -> None:
        """`is_under_way`: the engine has the requests, and what has not ended must be aborted."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._owner._hub.unregister(self)
        if is_under_way and len(self._completions) < len(self._requests):
            self._owner._give_up(self._requests)

    def _be_late(self) -> None:
        self._is_late = True
        self._wake.set()

    def _pieces(self, deltas: Sequence[Delta], ends: Sequence[Future[Completion]]) -> list[Piece]:
        """One piece for each sample, however many tokens it gained: what waits behind a busy loop travels together."""
        done = [end.result() for end in ends if end.exception() is None]
        ended = {completion.request_id for completion in done}
        new = [d for d in deltas if d.request_id not in ended]
        packed = PackedDeltas.pack(new) if len(new) > 1 else None
        grown = new if packed is None else packed.unpack()
        pieces = [self._grown(delta) for delta in grown if len(delta.token_ids)]
        return [piece for piece in pieces if piece is not None] + [self._ended(c) for c in done]

    def _grown(self, delta: Delta) -> Piece | None:
        index = self._index[delta.request_id]
        if self._received[index] < 0:
            return None  # overtaken by its completion, which held these tokens
        self._received[index] += len(delta.token_ids)
        return Piece(
            index=index,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            versions=delta.versions,
            completion=None,
        )

    def _ended(self, completion: Completion) -> Piece:
        index = self._index[completion.request_id]
        rest = slice(self._received[index], None)
        self._received[index] = -1
        self._completions.append(completion)
        return Piece(
            index=index,
            token_ids=completion.token_ids[rest],
            logprobs=completion.logprobs[rest],
            versions=completion.versions[rest],
            completion=completion,
        )


_STREAM_SHARE_S = 0.001
"""What every open stream adds to the interval, at least: an event costs the loop a seventh of that."""


class _Hub:
    """Carries deltas from the engine's thread to the streams of one event loop.

    A stream's first token and every end are urgent: everything pending goes with them. The rest waits until
    `interval_s` after the last flush, or longer where there are many streams.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._loop = loop
        self._least_interval_s = interval_s
        self._lock = threading.Lock()
        self._pending: list[tuple[SampleStream, Delta | Future[Completion]]] = []
        self._is_scheduled = False
        self._is_urgent = False
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._streams: dict[str, SampleStream] = {}

    @property
    def interval_s(self) -> float:
        """Many streams: larger events, not more of the processor than the engine can spare."""
        return max(self._least_interval_s, len(self._streams) * _STREAM_SHARE_S)

    def call_later(self, wait_s: float | None, act: Callable[[], None]) -> asyncio.TimerHandle | None:
        return None if wait_s is None else self._loop.call_later(wait_s, act)

    def register(self, stream: SampleStream) -> None:
        for request_id in stream.request_ids:
            self._streams[request_id] = stream

    def unregister(self, stream: SampleStream) -> None:
        for request_id in stream.request_ids:
            self._streams.pop(request_id, None)

    def push(self, delta: Delta) -> None:
        """Engine thread: tokens of a request."""
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return  # nobody reads it any more
        is_first, stream.has_token = not stream.has_token, True
        self._push(stream, delta, is_urgent=is_first or self._least_interval_s == 0)

    def push_end(self, stream: SampleStream, future: Future[Completion]) -> None:
        """Engine thread: a request has ended."""
        self._push(stream, future, is_urgent=True)

    def _push(self, stream: SampleStream, item: Delta | Future[Completion], *, is_urgent: bool) -> None:
        with self._lock:
            self._pending.append((stream, item))
            if self._is_urgent or (self._is_scheduled and not is_urgent):
                return
            self._is_urgent |= is_urgent
            self._is_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._flush if is_urgent else self._flush_later)
        except RuntimeError:
            return  # the loop is closed: nobody reads any more

    def _flush_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(self._flushed_at + self.interval_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            pending, self._pending = self._pending, []
            self._is_scheduled = self._is_urgent = False
        self._flushed_at = self._loop.time()
        news: dict[int, tuple[SampleStream, list[Delta | Future[Completion]]]] = {}
        for stream, item in pending:
            news.setdefault(id(stream), (stream, []))[1].append(item)
        for stream, items in news.values():
            stream.deliver(items)


async def _disconnected(http: HttpRequest) -> None:
    """Returns when the client has gone. The body has been read, so the next message can be nothing else."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _gave_up(timeout_s: float | None) -> ApiError:
    return ApiError(408, f"the request took longer than {timeout_s} s and was given up", code="timeout")


def finite(logprobs: Floats) -> list[float]:
    """JSON has no infinities; clients need numbers."""
    values: list[float] = logprobs.tolist()
    if all(map(math.isfinite, values)):
        return values
    return [v if math.isfinite(v) else 0.0 if v > 0 else -9999.0 for v in values]
