"""What a group call gives at once: the results to come, one per rank.

`wait` gives the results or raises the first failure as soon as it is known, so that a rank which waits for a dead
one does not hold up the caller. `outcomes` waits for everybody and raises nothing. Any number of threads may ask, any
number of times: everybody gets the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from rill.errors import RillError, StuckError, WorkerError
from rill.runtime.address import WorkerAddress
from rill.runtime.process.waits import waiting

DEFAULT_WAIT_S = 3600.0

Reduction: TypeAlias = Literal["max", "min", "mean"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank's part of a call ended."""

    value: Any
    error: RillError | None
    seconds: float
    """Time inside the method, on the worker."""
    timers: Mapping[str, float]
    """Seconds by the name given to `Worker.timer`, summed over the call."""


class Reply:
    """One rank's answer as it arrived; decoded once, in the thread that first wants it. What decoding gave or raised is
    kept for those who ask later."""

    __slots__ = ("_address", "_decode", "_failure", "_lock", "_value", "is_error", "seconds", "timers")

    def __init__(
        self,
        is_error: bool,
        seconds: float,
        timers: Mapping[str, float],
        decode: Callable[[], Any],
        address: WorkerAddress,
    ) -> None:
        self.is_error = is_error
        self.seconds = seconds
        self.timers = timers
        self._decode: Callable[[], Any] | None = decode
        self._address = address
        self._lock = threading.Lock()
        self._value: Any = None
        self._failure: Exception | None = None

    def value(self) -> Any:
        """The result; for a failure, the error to raise."""
        with self._lock:
            if self._decode is not None:
                try:
                    value = self._decode()
                    self._value = self._error(*value) if self.is_error else value
                except Exception as error:  # noqa: BLE001  boundary: kept, and raised for everybody who asks
                    self._failure = error
                self._decode = None
        if self._failure is not None:
            raise self._failure
        return self._value

    def outcome(self) -> Outcome:
        value = self.value()
        if self.is_error:
            return Outcome(None, value, self.seconds, self.timers)
        return Outcome(value, None, self.seconds, self.timers)

    def _error(self, message: str, remote_traceback: str, cause: BaseException | None) -> WorkerError:
        address = self._address
        error = WorkerError(
            message, group=address.group, rank=address.rank, remote_traceback=remote_traceback
        )
        error.__cause__ = cause
        return error


class Lost:
    """In the place of an answer that will not come."""

    __slots__ = ("_error",)
    is_error = True
    seconds = 0.0
    timers: Mapping[str, float] = MappingProxyType({})

    def __init__(self, error: RillError) -> None:
        self._error = error

    def value(self) -> RillError:
        return self._error

    def outcome(self) -> Outcome:
        return Outcome(None, self._error, self.seconds, self.timers)


class Handle:
    """The outcome of one call on several ranks."""

    def __init__(
        self,
        method: str,
        targets: Sequence[WorkerAddress],
        diagnose: Callable[[str, float], StuckError] = lambda message, _: StuckError(message),
    ) -> None:
        """`diagnose(message, deadline)` makes the error of a deadline."""
        self.method = method
        self.targets = tuple(targets)
        self._slots: list[Reply | Lost | None] = [None] * len(targets)
        self._num_left = len(targets)
        self._failed = False
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._started_s = time.monotonic()
        self._diagnose = diagnose

    def wait(self, timeout_s: float = DEFAULT_WAIT_S) -> list[Any]:
        """The results in the order of ranks. Raises WorkerError or PeerDiedError as soon as one rank failed,
        and StuckError past the deadline."""
        self._wait_for(lambda: self._failed or self._num_left == 0, timeout_s)
        if self._failed:
            errors = [slot.value() for slot in self._slots if slot is not None and slot.is_error]
            for other in errors[1:]:
                errors[0].add_note(f"also failed: {str(other).splitlines()[0]}")
            raise errors[0]
        return [slot.value() for slot in self._slots if slot is not None]

    def outcomes(self, timeout_s: float = DEFAULT_WAIT_S) -> list[Outcome]:
        """What became of every rank, failures included. Raises only StuckError."""
        self._wait_for(lambda: self._num_left == 0, timeout_s)
        return [slot.outcome() for slot in self._slots if slot is not None]

    def ended(self, timeout_s: float) -> bool:
        """Wait until every rank has answered or failed; False past the time, which is no error here."""
        if self._num_left == 0:
            return True
        with waiting(f"results of {self.method}", self._waits_on), self._changed:
            return self._changed.wait_for(lambda: self._num_left == 0, timeout_s)

    def so_far(self) -> list[Outcome | None]:
        """What became of the ranks that have answered or failed; None for the others. Waits for nothing."""
        return [None if slot is None else slot.outcome() for slot in self._slots]

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        return self._num_left == 0

    def seconds(self, reduce: Reduction = "max", timer: str | None = None) -> float:
        """Time inside the method, or inside its timer `timer`, over the ranks. Waits for nothing: call it after."""
        if timer is None:
            return _reduce([reply.seconds for reply in self._finished()], reduce)
        values = [reply.timers[timer] for reply in self._finished() if timer in reply.timers]
        if not values:
            known = sorted({name for reply in self._finished() for name in reply.timers})
            raise RillError(f"no timer {timer!r} in {self.method}: timers are {', '.join(known) or 'none'}")
        return _reduce(values, reduce)

    def timers(self, reduce: Reduction = "max") -> dict[str, float]:
        """Every timer of the call by name, in seconds, reduced over the ranks that used it."""
        names = sorted({name for reply in self._finished() for name in reply.timers})
        return {name: self.seconds(reduce, name) for name in names}

    def on_done(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback` once every rank has answered or failed; it must not block."""
        with self._changed:
            if self._num_left > 0:
                self._callbacks.append(callback)
                return
        callback(self)

    def fill(self, index: int, outcome: Reply | Lost) -> None:
        """Called by whoever reads the answers. Only the first outcome of a rank counts."""
        with self._changed:
            if self._slots[index] is not None:
                return
            self._slots[index] = outcome
            self._failed = self._failed or outcome.is_error
            self._num_left -= 1
            is_done = self._num_left == 0
            if is_done or self._failed:
                self._changed.notify_all()
        if is_done:
            for callback in self._callbacks:
                callback(self)

    def _wait_for(self, is_settled: Callable[[], bool], timeout_s: float) -> None:
        if is_settled():
            return
        with waiting(f"results of {self.method}", self._waits_on), self._changed:
            in_time = self._changed.wait_for(is_settled, timeout_s)
        if not in_time:
            raise self._stuck(timeout_s)

    def _finished(self) -> list[Reply | Lost]:
        if self._num_left:
            raise StuckError(f"{self.method} still runs on {', '.join(self._missing())}: wait for it first")
        return [slot for slot in self._slots if slot is not None]

    def _waits_on(self) -> str:
        """For the stuck-run report: the first rank that has not answered."""
        return next(iter(self._missing()), "")

    def _missing(self) -> list[str]:
        return [target.name for target, slot in zip(self.targets, self._slots, strict=True) if slot is None]

    def _stuck(self, timeout_s: float) -> StuckError:
        waited_s = time.monotonic() - self._started_s
        message = (
            f"{self.method} has not ended on {', '.join(self._missing())} within {timeout_s:g} s "
            f"(called {waited_s:.1f} s ago)"
        )
        return self._diagnose(message, timeout_s)


def _reduce(values: Sequence[float], reduce: Reduction) -> float:
    if reduce == "mean":
        return sum(values) / len(values)
    return max(values) if reduce == "max" else min(values)
