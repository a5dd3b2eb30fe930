"""An answer of the hub that is on its way: waited for by a thread, a callback or an event loop, or given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from rill import errors
from rill.errors import RillError, RunError


class Pending:
    """An answer that is on its way."""

    __slots__ = ("_lock", "_on_late", "callback", "error", "is_done", "seq", "value")
    _mutex = threading.Lock()

    def __init__(self, callback: Callable[[Pending], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._on_late: Callable[[Any], None] | None = None
        self.callback = callback
        self.is_done = False
        self.value: Any = None
        self.error: RillError | None = None
        self.seq = 0
        """The request's number, once it was sent."""

    def wait(self, timeout_s: float) -> bool:
        """Whether the answer is there. Call once per timeout; the first that returns true ends the waiting."""
        return self.is_done or self._lock.acquire(timeout=max(0.0, timeout_s)) or self.is_done

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def abandon(self, on_late: Callable[[Any], None]) -> bool:
        """Stop waiting. False: the answer is there after all; true: `on_late` gets its value if it still comes."""
        with self._mutex:
            if not self.is_done:
                self._on_late = on_late
            return not self.is_done

    def finish(self, value: Any, error: RillError | None = None) -> None:
        with self._mutex:
            if self.is_done:
                return
            self.value, self.error, self.is_done = value, error, True
        self._lock.release()
        if self._on_late is not None:
            if error is None:
                self._on_late(value)
        elif self.callback is not None:
            self.callback(self)


def set_if_open(future: asyncio.Future[None]) -> None:
    """On the future's own loop: what it waits for has come."""
    if not future.done():
        future.set_result(None)


def as_error(body: Any) -> RillError:
    """A refusal of the hub, [name of the RillError, message], as the exception it stands for."""
    kind, message = body
    cls = vars(errors).get(kind, RunError)
    assert isinstance(cls, type) and issubclass(cls, RillError)
    return cls(message)
