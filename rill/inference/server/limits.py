"""How much a client may ask: body bytes, requests a minute, requests in flight; and the drain before the end.

`BodyLimit` is ASGI middleware, because the size must be known before the body is read into memory. The others are
asked by routes through `Admission`, which also counts what is in flight for the drain. All of it runs on the event
loop and needs no locks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rill.inference.server.errors import ApiError, error_response

_MAX_TRACKED_CALLERS = 10_000


class BodyLimit:
    """Answers 413 before a body larger than the limit is held in memory."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.max_body_bytes == 0:
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self.max_body_bytes:
            await error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_body_bytes:  # chunked transfer: nothing was declared
                # FastAPI lets only its own exception out of the reading of a body.
                raise HTTPException(413, self._too_large().message)
            return message

        await self.app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the request body is larger than {self.max_body_bytes} bytes", code="request_too_large"
        )


class RateLimit:
    """A token bucket per caller: `per_minute` on average, a sixth of it (at least one) at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_minute / 60.0
        self._burst = max(1.0, per_minute / 6.0)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        if self._per_s == 0:
            return
        now = self._clock()
        level, filled_at = self._buckets.pop(caller, (self._burst, now))
        level = min(self._burst, level + (now - filled_at) * self._per_s)
        if level < 1.0:
            self._buckets[caller] = (level, now)
            wait_s = math.ceil((1.0 - level) / self._per_s)
            raise ApiError(
                429, f"rate limit reached: try again in {wait_s} s", code="rate_limit", retry_after_s=wait_s
            )
        self._buckets[caller] = (level - 1.0, now)
        if len(self._buckets) > _MAX_TRACKED_CALLERS:
            self._buckets.popitem(last=False)


class Admission:
    """Lets generation requests in, counts them, and closes the door when the server drains."""

    def __init__(self, requests_per_minute: int, max_concurrent: int) -> None:
        self.num_in_flight = 0
        self.is_draining = False
        self._rate = RateLimit(requests_per_minute)
        self._max_concurrent = max_concurrent
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self, caller: str) -> Iterator[None]:
        """Holds a place for one generation request while the block runs."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after_s=5)
        if self._max_concurrent and self.num_in_flight >= self._max_concurrent:
            raise ApiError(
                429,
                f"{self.num_in_flight} requests are in flight, the limit: try again soon",
                code="too_many_requests",
                retry_after_s=1,
            )
        self._rate.take(caller)
        self.num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._idle.set()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those in flight. False when the deadline passed first."""
        self.is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
