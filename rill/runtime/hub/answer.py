"""An answer of the hub that is on its way: a future that knows its request, and what to do when it comes too late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

import msgspec

from rill import errors
from rill.errors import RillError, RunError

T = TypeVar("T")


class Asked(Future[T], Generic[T]):
    """`cancel` stops waiting: false when the answer is there after all; a later one goes to `on_late`."""

    def __init__(self, answer: Any = Any, on_late: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.seq = 0
        """The number of the request, from the moment it was submitted."""
        self._type = answer
        self._on_late = on_late

    def arrived(self, body: msgspec.Raw) -> None:
        value = msgspec.msgpack.decode(body, type=self._type)
        try:
            self.set_result(value)
        except InvalidStateError:
            if self._on_late is not None:
                self._on_late(value)

    def failed(self, error: RillError) -> None:
        if not self.done():
            self.set_exception(error)

    def came(self, timeout_s: float) -> bool:
        """Whether the answer, or its failure, is there within the time."""
        try:
            self.exception(max(0.0, timeout_s))
        except TimeoutError:
            return False
        return True


def as_error(kind: str, message: str) -> RillError:
    """A refusal of the hub, by the name of a RillError, as the exception it stands for."""
    cls = vars(errors).get(kind, RunError)
    assert isinstance(cls, type) and issubclass(cls, RillError)
    return cls(message)
