"""What the engine's thread reports, on its way to those who wait for it on the event loop.

        engine thread                                  event loop
   push(delta) ─────▶ pending ──┐ one wake-up, however many     ┌── ends ────▶ a few each turn of ──▶ stream A, whole B
   push(delta) ─────▶ pending ──┤ are pending: at once for      │              the loop, ends       ──▶ stream C
   push_end(future) ▶ pending ──┘ first tokens and ends, else   └── tokens ──▶ before tokens        ──▶ …
                                  every interval_s

Many requests of a batch end in one step. Were all their answers made before the loop looks at its sockets again, the
next requests would reach the engine only after the last of them, and it would stand idle meanwhile. A few at a time:
the first clients have their answers, and their next requests are under way, while the others' are made.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from rill.inference.base import Completion, Delta

News = Delta | Future[Completion]
"""Tokens of a request, or its end."""

_STREAM_SHARE_S = 0.002
"""What every open stream adds to the interval, at least: an event costs the loop about a fifteenth of that."""
_NUM_PER_TURN = 2
"""How many listeners hear of something in one turn of the loop."""


class Listener(Protocol):
    """Waits for the news of one HTTP request, on the event loop."""

    has_token: bool
    """Whether a token has come; set on the engine's thread."""

    def deliver(self, news: Sequence[News]) -> None: ...


class Hub:
    """A stream's first token and every end are urgent: everything pending goes with them. The rest waits until
    `interval_s` after the last flush."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        """`interval_s`: with few streams; 0 sends every token as it comes."""
        self._loop = loop
        self._least_interval_s = interval_s
        self._lock = threading.Lock()
        self._pending: list[tuple[Listener, News]] = []
        self._is_scheduled = False
        self._is_urgent = False
        self._flushed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.streams: dict[str, Listener] = {}
        """Who hears of a request's tokens, by the request's id."""
        self._ends: deque[tuple[Listener, list[News]]] = deque()
        self._tokens: deque[tuple[Listener, list[News]]] = deque()
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
        self._push(stream, delta, is_urgent=is_first or self._least_interval_s == 0)

    def push_end(self, listener: Listener, future: Future[Completion]) -> None:
        """Engine thread: a request has ended. The order with its last delta does not matter."""
        self._push(listener, future, is_urgent=True)

    def _push(self, listener: Listener, item: News, *, is_urgent: bool) -> None:
        with self._lock:
            self._pending.append((listener, item))
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
        news: dict[int, tuple[Listener, list[News]]] = {}
        for listener, item in pending:
            news.setdefault(id(listener), (listener, []))[1].append(item)
        for listener, items in news.values():
            has_end = not all(isinstance(item, Delta) for item in items)
            (self._ends if has_end else self._tokens).append((listener, items))
        if not self._is_turning:
            self._take_turn()

    def _take_turn(self) -> None:
        for _ in range(_NUM_PER_TURN):
            if not (waiting := self._ends or self._tokens):
                break
            listener, items = waiting.popleft()
            listener.deliver(items)
        self._is_turning = bool(self._ends or self._tokens)
        if self._is_turning:
            self._loop.call_soon(self._take_turn)
