"""The result of an `_async` transfer: a place for a value that is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rill.errors import RillError, StuckError, UserError
from rill.runtime.process.waits import waiting
from rill.runtime.transfer.landing import landing_in

T = TypeVar("T")

DEFAULT_WAIT_S = 600.0


class Pending(Generic[T]):
    """The result of an `_async` call."""

    def __init__(self, what: str, on: str) -> None:
        self.what = what
        self._on = on
        self._arrived = threading.Event()
        self._open: Callable[[], T] | None = None
        self._error: RillError | None = None

    def done(self) -> bool:
        return self._arrived.is_set()

    def wait(self, timeout_s: float = DEFAULT_WAIT_S) -> T:
        """The value; raises what went wrong, StuckError past the deadline."""
        if not self._arrived.is_set():
            with waiting(self.what, self._on):
                self._arrived.wait(timeout_s)
        if not self._arrived.is_set():
            raise StuckError(f"{self.what} did not end within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        assert self._open is not None
        value = self._open()
        self._open = lambda: value
        return value

    def fulfil(self, open_value: Callable[[], T]) -> None:
        self._open = open_value
        self._arrived.set()

    def fail(self, error: RillError) -> None:
        self._error = error
        self._arrived.set()


class FillingPending(Pending[Any]):
    """A receive into memory that the caller brought."""

    def __init__(self, what: str, on: str, into: Any) -> None:
        super().__init__(what, on)
        self._into = into

    def fulfil(self, open_value: Callable[[], Any]) -> None:
        def open_into() -> Any:
            with landing_in(self._into):
                return self._fill(open_value())

        super().fulfil(open_into)

    def _fill(self, value: Any) -> Any:
        into = self._into
        if value is into:
            return into
        if type(value) is not type(into) or value.shape != into.shape or value.dtype != into.dtype:
            raise UserError(f"{self.what}: cannot fill {_describe(into)} with {_describe(value)}")
        if hasattr(into, "copy_"):
            if not value.is_set_to(into):  # it has landed there already
                into.copy_(value)
        else:
            into[...] = value
        return into


def _describe(value: Any) -> str:
    has_shape = hasattr(value, "shape") and hasattr(value, "dtype")
    return f"{type(value).__name__}{tuple(value.shape)} {value.dtype}" if has_shape else type(value).__name__
