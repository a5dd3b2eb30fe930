"""Runs requests on the engine for those who wait on the event loop: for whole answers, or for streams.

        engine thread                                  event loop
   push(delta) ─────▶ pending ──┐ one wake-up, however many     ┌── ends ────▶ a few each turn of ──▶ stream A, whole B
   gather(delta) ───▶ pending ──┤ are pending: at once for      │              the loop, ends       ──▶ stream C
   push_end(future) ▶ pending ──┘ first tokens and ends, else   └── tokens ──▶ before tokens        ──▶ …
                                  every interval_s

Many requests of a batch end in one step. Were all their answers made before the loop looks at its sockets again, the
next requests would reach the engine only after the last of them, and it would stand idle meanwhile. A few at a time:
the first clients have their answers, and their next requests are under way, while the others' are made. And what a
whole answer tells of each token is written while the engine makes further ones: at the end only the rest is left.

A stream sends everything new as one event for each sample: a loop that falls behind sends larger events, not later
ones. Whoever stops waiting (disconnect, deadline, cancel) has its requests aborted.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self

from starlette.types import Message, Receive

from rill.errors import RillError
from rill.inference.base import Completion, Delta, Engine, Request, Sampled
from rill.inference.replica import PackedDeltas
from rill.inference.server.errors import ApiError
from rill.inference.server.metrics import Metrics
from rill.types import Floats

log = logging.getLogger(__name__)

News = Delta | Future[Completion]
"""Tokens of a request, or its end."""

_STREAM_SHARE_S = 0.002
"""What every open stream adds to the interval, at least: an event costs the loop about a fifteenth of that."""
_AHEAD_INTERVAL_S = 0.25
"""How often the engine tells of the tokens of a whole answer before its end: a wake-up costs as much as many tokens."""
_NUM_AHEAD = 64
"""Of each sample of it, how many are worth being written by themselves."""
_NUM_PER_TURN = 2
"""How many listeners hear of something in one turn of the loop."""
_LOOK_INTERVAL_S = 0.25
"""Between two looks at what is under way, for deadlines that passed. A timer for each request would cost more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Sampled):
    """New tokens of one sample of a stream."""

    index: int
    completion: Completion | None = None
    """Set on the sample's last piece."""


class Hub:
    """A stream's first token and every end are urgent: everything pending goes with them. The rest waits until
    `interval_s` after the last flush."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        """`interval_s`: with few streams; 0 sends every token as it comes."""
        self._loop = loop
        self._least_interval_s = interval_s
        self._lock = threading.Lock()
        self._pending: list[tuple[Samples, News]] = []
        self._is_scheduled = False
        self._is_urgent = False
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.streams: dict[str, Samples] = {}
        """Who hears of a request's tokens, by the request's id."""
        self._ends: dict[Samples, list[News]] = {}
        """What is still to be told, first come first served: where a request has ended, and elsewhere."""
        self._tokens: dict[Samples, list[News]] = {}
        self._is_turning = False

    @property
    def interval_s(self) -> float:
        """Many streams: larger events, not more of the processor than the engine can spare."""
        return max(self._least_interval_s, len(self.streams) * _STREAM_SHARE_S)

    def push(self, delta: Delta) -> None:
        """Engine thread: tokens of a request."""
        stream = self.streams.get(delta.request_id)
        if stream is None:
            return  # nobody reads it any more
        is_first, stream.has_token = not stream.has_token, True
        if delta.stop_reason is None:  # else its end tells of it
            self.push_all(stream, [delta], is_urgent=is_first or self._least_interval_s == 0)

    def push_end(self, samples: Samples, future: Future[Completion]) -> None:
        """Engine thread: a request has ended. The order with its last delta does not matter."""
        self.push_all(samples, [future], is_urgent=True)

    def push_all(self, samples: Samples, news: Sequence[News], *, is_urgent: bool) -> None:
        with self._lock:
            self._pending += [(samples, item) for item in news]
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
        for samples, item in pending:
            if samples in self._ends:
                self._ends[samples].append(item)
                continue
            self._tokens.setdefault(samples, []).append(item)
            if not isinstance(item, Delta):  # what waits for the same stream goes before it
                self._ends[samples] = self._tokens.pop(samples)
        if not self._is_turning:
            self._take_turn()

    def _take_turn(self) -> None:
        for _ in range(_NUM_PER_TURN):
            if not (waiting := self._ends or self._tokens):
                break
            samples = next(iter(waiting))
            samples.deliver(waiting.pop(samples))
        self._is_turning = bool(self._ends or self._tokens)
        if self._is_turning:
            self._loop.call_soon(self._take_turn)


class Generation:
    """Runs requests on the engine, for one event loop."""

    def __init__(
        self,
        engine: Engine,
        admission: AbstractContextManager[None],
        metrics: Metrics,
        timeout_s: float,
        stream_interval_s: float,
    ) -> None:
        """`admission`: held while a request is under way."""
        self.metrics = metrics
        self._admission = admission
        self.timeout_s = timeout_s
        self._stream_interval_s = stream_interval_s
        self._engine = engine
        self._under_way: dict[Samples, tuple[str, str]] = {}
        """With the caller, and what it calls the request: a client may use a name twice."""
        self._is_looking = False
        # A thread of its own: an engine may be busy for as long as an update takes, and what else runs in threads
        # (health checks among it) must not wait behind those whom a client has left.
        self._aborts = ThreadPoolExecutor(1, thread_name_prefix="server-abort")

    @cached_property
    def hub(self) -> Hub:
        """Made by the first request, on its loop."""
        return Hub(asyncio.get_running_loop(), self._stream_interval_s)

    def interval_s(self, *, is_streamed: bool) -> float:
        """How often the engine is to tell of tokens: told more often than they are used, they would only wait here."""
        return self.hub.interval_s if is_streamed else _AHEAD_INTERVAL_S

    def submit(
        self,
        requests: Sequence[Request],
        name: tuple[str, str],
        receive: Receive,
        *,
        is_streamed: bool,
        in_parts: bool,
    ) -> Samples:
        """Their samples, to be waited for, and closed. `receive`: of the client, who has nothing more to say but that
        it leaves. `in_parts`: what is not streamed is heard of before its end too."""
        self._admission.__enter__()
        hub, samples = self.hub, Samples(self, requests, receive)
        if is_streamed:
            hub.streams.update(dict.fromkeys(samples.request_ids, samples))
        self._under_way[samples] = name
        samples.listen()
        if not self._is_looking:
            self._look()
        try:
            on_delta = hub.push if is_streamed else samples.gather if in_parts else None
            futures = self._engine.submit(requests, on_delta)
        except BaseException:
            self.close(samples)
            raise
        samples.num_left = len(futures)
        for future in futures:
            future.add_done_callback(partial(hub.push_end, samples))
        return samples

    def close(self, samples: Samples) -> None:
        """What has not ended is aborted."""
        for request_id in samples.request_ids:
            self.hub.streams.pop(request_id, None)
        samples.stop_listening()
        del self._under_way[samples]
        self._admission.__exit__(None, None, None)
        if samples.num_left:
            self.metrics.num_aborted += samples.num_left
            self._aborts.submit(self._abort_quietly, samples.request_ids)

    async def abort(self, names: Collection[tuple[str, str]]) -> int:
        """End what runs under these names; how many requests that were. They are answered with what they have."""
        asked = [samples for samples, name in self._under_way.items() if name in names]
        ids = [i for samples in asked for i in samples.request_ids if i not in samples.completions]
        if ids:
            self.metrics.num_aborted += len(ids)
            await asyncio.get_running_loop().run_in_executor(self._aborts, self._engine.abort, ids)
        return len(ids)

    def _look(self) -> None:
        """At all that is under way, and again later while something is."""
        self._is_looking = bool(self._under_way)
        if self._is_looking:
            asyncio.get_running_loop().call_later(_LOOK_INTERVAL_S, self._look)
        for samples in self._under_way:
            samples.look()

    def _abort_quietly(self, request_ids: list[str]) -> None:
        try:
            self._engine.abort(request_ids)
        except RillError as error:  # nobody waits for it; the engine's state is /health's to tell
            log.warning("%d requests whose client left were not aborted: %s", len(request_ids), error)


class Samples:
    """What one HTTP request asked the engine for, as it grows. Waited for as a `whole`, or iterated over in batches of
    pieces once it has `begun`: what goes wrong before that is an HTTP status, which clients know how to retry, and not
    an event of a stream that began well."""

    def __init__(self, owner: Generation, requests: Sequence[Request], receive: Receive) -> None:
        self.request_ids = [r.id for r in requests]
        self.has_token = False
        """Whether one has come; set on the engine's thread."""
        self.num_left = 0
        """How many have not ended, of those that the engine has taken."""
        self.completions: dict[str, Completion] = {}
        """Of those that have, by the request's id."""
        self._owner = owner
        self._requests = requests
        self._receive = receive
        self._told: Generator[Any, None, Message] | None = None
        """What its client says next, while that is awaited."""
        self._index = {r.id: i for i, r in enumerate(requests)}
        self._received = [0] * len(requests)
        self._gathered: list[list[Delta]] = [[] for _ in requests]
        self._num_gathered = [0] * len(requests)
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None
        self._opened_at = time.perf_counter()
        self._is_begun = False
        self._failure: Exception | None = None
        """Of a sample."""
        self._error: ApiError | None = None
        """Why somebody gave up."""

    def gather(self, delta: Delta) -> None:
        """Engine thread, or those of several replicas, each for requests of its own: tokens of a whole answer. They
        travel on when they are many; the last come with its end."""
        index = self._index[delta.request_id]
        self._gathered[index].append(delta)
        self._num_gathered[index] += len(delta.token_ids)
        if self._num_gathered[index] >= _NUM_AHEAD and delta.stop_reason is None:
            self._owner.hub.push_all(self, self._gathered[index], is_urgent=False)
            self._gathered[index], self._num_gathered[index] = [], 0

    def deliver(self, news: Sequence[News]) -> None:
        self._news.extend(news)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """For news; raises where somebody gave up."""
        if not self._news and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._owner.close(self)

    @property
    def num_cached_tokens(self) -> int:
        """Once all have ended. A prompt is counted once: of it, what each of its samples found in the cache."""
        found: dict[int, int] = {}
        for request in self._requests:
            prompt, num_cached = request.token_ids, self.completions[request.id].num_cached_tokens
            found[id(prompt)] = min(found.get(id(prompt), len(prompt)), num_cached)
        return sum(found.values())

    async def whole(self, write: Callable[[Piece], None] = lambda _: None) -> list[Piece]:
        """Of samples that are not streamed: all of each, in the order of the requests. `write` has heard of all of it
        before, piece by piece."""
        async for pieces in self:
            for piece in pieces:
                write(piece)
        if not self.completions:
            self._count()
        done = [self.completions[request_id] for request_id in self.request_ids]
        return [Piece(index=index, completion=each, **each.part()) for index, each in enumerate(done)]

    async def begun(self) -> None:
        """Waits for the first news; raises where they are that a sample failed, or that somebody gave up."""
        await self._wait()
        for item in self._news:
            if not isinstance(item, Delta):
                item.result()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Piece]:
        """What is new, once something is."""
        pieces: list[Piece] = []
        while not pieces:
            if self._failure is not None:  # a sample that failed ends the answer, after what came before it
                raise self._failure
            if not self.num_left:
                raise StopAsyncIteration
            await self._wait()
            pieces = self._pieces()
        if not self.num_left:
            self._count()
        if self.has_token and not self._is_begun:
            self._is_begun = True
            self._owner.metrics.first_token_s.observe(time.perf_counter() - self._opened_at)
        return pieces

    def _count(self) -> None:
        metrics = self._owner.metrics
        metrics.latency_s.observe(time.perf_counter() - self._opened_at)
        metrics.num_prompt_tokens += sum([len(request.token_ids) for request in self._requests])
        for completion in self.completions.values():
            metrics.num_completion_tokens += len(completion.token_ids)
            metrics.completion_tokens.observe(len(completion.token_ids))

    def _pieces(self) -> list[Piece]:
        """One piece for each sample, however many tokens it gained: what waits behind a busy loop travels together."""
        news, self._news = self._news, []
        deltas: list[Delta] = []
        done: list[Completion] = []
        for item in news:
            if isinstance(item, Delta):
                deltas.append(item)
                continue
            try:
                done.append(item.result())
            except Exception as failure:  # noqa: BLE001 - whatever it is, it is the answer's to raise
                self._failure = self._failure or failure
        self.num_left -= len(done)
        self.completions |= {completion.request_id: completion for completion in done}
        # One that has ended has overtaken its last deltas; and the last of all is told with what ended it.
        new = [
            delta
            for delta in deltas
            if len(delta.token_ids) and delta.stop_reason is None and delta.request_id not in self.completions
        ]
        packed = PackedDeltas.pack(new) if len(new) > 1 else None
        pieces = []
        for delta in new if packed is None else packed.unpack(Delta):
            index = self._index[delta.request_id]
            self._received[index] += len(delta.token_ids)
            pieces.append(Piece(index=index, **delta.part()))
        for completion in done:
            index = self._index[completion.request_id]
            rest = completion.part(self._received[index])
            pieces.append(Piece(index=index, completion=completion, **rest))
        return pieces

    def _give_up(self, error: ApiError) -> None:
        """Whoever waits gets this error."""
        self._error = error
        self._wake()

    def listen(self) -> None:
        """Hears at once that the client leaves. No task awaits it, which would cost a tenth of the whole request."""
        self._told = self._receive().__await__()
        self._hear()

    def _hear(self, _: object = None) -> None:
        if self._told is None:
            return
        try:
            waits_for = next(self._told)
        except StopIteration as end:
            self._told = None
            if end.value["type"] == "http.disconnect":
                self._give_up(ApiError(499, "the client went away"))
        else:
            waits_for.add_done_callback(self._hear)

    def stop_listening(self) -> None:
        if self._told is not None:
            self._told.close()
            self._told = None

    def look(self) -> None:
        """Gives up where it is late; listens again where its client said something else than that it leaves."""
        limit_s = self._owner.timeout_s
        if limit_s and time.perf_counter() - self._opened_at > limit_s:
            message = f"the request took longer than {limit_s} s and was given up"
            self._give_up(ApiError(408, message, code="timeout"))
        if self._told is None:
            self.listen()


def finite(logprobs: Floats) -> list[float]:
    """JSON has no infinities; clients need numbers."""
    values: list[float] = logprobs.tolist()
    if math.isfinite(sum(values)):  # one that is not leaves no sum that is
        return values
    return [v if math.isfinite(v) else 0.0 if v > 0 else -9999.0 for v in values]
