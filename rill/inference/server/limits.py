"""How many generation requests may be in flight; and the drain before the end. On the event loop, without locks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rill.inference.server.errors import ApiError


class Admission:
    """Lets generation requests in, counts them, and closes the door when the server drains."""

    def __init__(self, max_concurrent: int) -> None:
        self.num_in_flight = 0
        self.is_draining = False
        self._max_concurrent = max_concurrent
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Holds a place for one generation request while the block runs."""
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
        if self._max_concurrent and self.num_in_flight >= self._max_concurrent:
            message = f"{self.num_in_flight} requests are in flight, the limit: try again soon"
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
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
