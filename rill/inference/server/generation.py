"""Runs requests on the engine for those who wait on the event loop: for whole answers, or for streams (hub.py carries
what the engine's thread reports).

A stream sends everything new as one event for each sample: a loop that falls behind sends larger events, not later
ones. Whoever stops waiting (disconnect, deadline, cancel) has its requests aborted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fastapi import Request as HttpRequest

from rill.errors import RillError
from rill.inference.base import Completion, Delta, Engine, Request, TopTokens
from rill.inference.replica_worker import PackedDeltas
from rill.inference.server.errors import ApiError
from rill.inference.server.hub import Hub, News
from rill.inference.server.metrics import Metrics
from rill.types import Floats, Ints, TokenIds

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New tokens of one sample of a stream."""

    index: int
    token_ids: TokenIds
    logprobs: Floats
    versions: Ints
    top: TopTokens | None
    completion: Completion | None
    """Set on the sample's last piece."""

    @staticmethod
    def of(index: int, news: Delta | Completion, first: int = 0) -> Piece:
        """From its token `first` on."""
        return Piece(
            index=index,
            token_ids=news.token_ids[first:],
            logprobs=news.logprobs[first:],
            versions=news.versions[first:],
            top=None if news.top is None else news.top.after(first),
            completion=news if isinstance(news, Completion) else None,
        )


class Generation:
    """Runs requests on the engine for the event loop that it was made on."""

    def __init__(self, engine: Engine, metrics: Metrics, timeout_s: float, stream_interval_s: float) -> None:
        self._engine = engine
        self._metrics = metrics
        self._timeout_s = timeout_s or None
        self._hub = Hub(asyncio.get_running_loop(), stream_interval_s)
        self._named: dict[tuple[str, str], list[str]] = {}
        # A thread of its own: an engine may be busy for as long as an update takes, and what else runs in threads
        # (health checks among it) must not wait behind those whom a client has left.
        self._aborts = ThreadPoolExecutor(1, thread_name_prefix="server-abort")

    async def run(self, requests: Sequence[Request], http: HttpRequest) -> list[Completion]:
        """All completions, in the order of the requests."""
        started = time.perf_counter()
        futures = self._engine.submit(requests)
        whole = _WholeAnswer(len(futures))
        for future in futures:
            future.add_done_callback(lambda done: self._hub.push_end(whole, done))
        deadline = self._hub.call_later(self._timeout_s, lambda: whole.give_up(_gave_up(self._timeout_s)))
        try:
            with _watched(http, lambda: whole.give_up(_went_away())):
                await whole.wait()
            completions = [future.result() for future in futures]
        except BaseException:
            self._give_up(requests)
            raise
        finally:
            if deadline is not None:
                deadline.cancel()
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
            with _watched(http, lambda: stream.give_up(_went_away())):
                await stream.begun()
        except BaseException:
            stream.close()
            raise
        return stream

    def name_requests(self, name: tuple[str, str], request_ids: Sequence[str]) -> Ticket:
        """`name`: the caller, and what it calls the request. Until the ticket is closed, abort(name) finds them."""
        self._named.setdefault(name, []).extend(request_ids)
        return Ticket(self._named, name, request_ids)

    async def abort(self, names: Sequence[tuple[str, str]]) -> int:
        """End what runs under these names; how many requests that were. They are answered with what they have."""
        ids = [request_id for name in names for request_id in self._named.get(name, ())]
        if ids:
            self._metrics.num_aborted += len(ids)
            await asyncio.get_running_loop().run_in_executor(self._aborts, self._engine.abort, ids)
        return len(ids)

    def close(self) -> None:
        self._aborts.shutdown(wait=False)

    def _give_up(self, requests: Sequence[Request]) -> None:
        self._metrics.num_aborted += len(requests)
        self._aborts.submit(self._abort_quietly, [r.id for r in requests])

    def _abort_quietly(self, request_ids: list[str]) -> None:
        try:
            self._engine.abort(request_ids)
        except RillError as error:  # nobody waits for it; the engine's state is /health's to tell
            log.warning("%d requests whose client left were not aborted: %s", len(request_ids), error)

    def _observe(self, requests: Sequence[Request], done: Sequence[Completion], seconds: float) -> None:
        self._metrics.latency_s.observe(seconds)
        self._metrics.num_prompt_tokens += sum(len(r.token_ids) for r in requests)
        for completion in done:
            self._metrics.count_completion(len(completion.token_ids))


@dataclass(frozen=True, slots=True)
class Ticket:
    """The names of requests that are under way."""

    named: dict[tuple[str, str], list[str]]
    name: tuple[str, str]
    request_ids: Sequence[str]

    def close(self) -> None:
        left = [i for i in self.named.pop(self.name, ()) if i not in self.request_ids]
        if left:  # a client may use a name twice
            self.named[self.name] = left


class _WholeAnswer:
    """Waits for all samples of one HTTP request, or for the first that fails."""

    def __init__(self, num_samples: int) -> None:
        self._num_left = num_samples
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> None:
        await self._over

    def deliver(self, news: Sequence[News]) -> None:
        self._num_left -= len(news)
        for item in news:
            if not isinstance(item, Delta) and (error := item.exception()) is not None:
                self.give_up(error)
        if self._num_left == 0 and not self._over.done():
            self._over.set_result(None)

    def give_up(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)


class SampleStream:
    """The samples of one HTTP request as they grow. Iterates over batches of pieces; close() aborts the rest."""

    def __init__(self, owner: Generation, requests: Sequence[Request]) -> None:
        self._owner = owner
        self._requests = requests
        self._index = {r.id: i for i, r in enumerate(requests)}
        self._received = [0] * len(requests)
        self._completions: list[Completion] = []
        self._news: list[News] = []
        self._wake = asyncio.Event()
        self._opened_at = time.perf_counter()
        self._is_closed = False
        self._error: ApiError | None = None
        # One timer for the whole stream: a timeout around every wait would cost a task each.
        self._deadline = owner._hub.call_later(
            owner._timeout_s, lambda: self.give_up(_gave_up(owner._timeout_s))
        )
        self.has_token = False
        """Whether a token has come; set on the engine's thread."""

    @property
    def request_ids(self) -> list[str]:
        return [r.id for r in self._requests]

    def on_done(self, future: Future[Completion]) -> None:
        """Called on the engine's thread. The order with the last delta does not matter."""
        self._owner._hub.push_end(self, future)

    def deliver(self, news: Sequence[News]) -> None:
        self._news.extend(news)
        self._wake.set()

    def give_up(self, error: ApiError) -> None:
        """Whoever waits for the stream gets this error."""
        self._error = error
        self._wake.set()

    async def begun(self) -> None:
        """Waits for the first news; raises where they are that a sample failed, or that somebody gave up."""
        await self._wake.wait()
        if self._error is not None:
            raise self._error
        for item in self._news:
            if not isinstance(item, Delta):
                item.result()

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        is_first = True
        while len(self._completions) < len(self._requests):
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
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
        return Piece.of(index, delta)

    def _ended(self, completion: Completion) -> Piece:
        index = self._index[completion.request_id]
        first, self._received[index] = self._received[index], -1
        self._completions.append(completion)
        return Piece.of(index, completion, first)


@contextmanager
def _watched(http: HttpRequest, on_gone: Callable[[], None]) -> Iterator[None]:
    """`on_gone` is called when the client leaves while the block runs."""

    async def watch() -> None:
        # The body has been read, so the next message can be nothing else.
        while (await http.receive())["type"] != "http.disconnect":
            pass
        on_gone()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()


def _went_away() -> ApiError:
    return ApiError(499, "the client went away")


def _gave_up(timeout_s: float | None) -> ApiError:
    return ApiError(408, f"the request took longer than {timeout_s} s and was given up", code="timeout")


def finite(logprobs: Floats) -> list[float]:
    """JSON has no infinities; clients need numbers."""
    values: list[float] = logprobs.tolist()
    if all(map(math.isfinite, values)):
        return values
    return [v if math.isfinite(v) else 0.0 if v > 0 else -9999.0 for v in values]
