"""What a group call gives at once: the results to come, one per rank.

`wait` gives the results or raises the first failure as soon as it is known, so that a rank which waits for a dead
one does not hold up the caller. `outcomes` waits for everybody and raises nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from rill.errors import RillError, StuckError
from rill.runtime.call import Outcome, Reply
from rill.runtime.context import WorkerAddress
from rill.runtime.waits import waiting

DEFAULT_WAIT_S = 3600.0

Reduction: TypeAlias = Literal["max", "min", "mean"]


class Handle:
    """The outcome of one call on several ranks."""

    def __init__(
        self,
        method: str,
        targets: Sequence[WorkerAddress],
        diagnose: Callable[[str, float], StuckError] = lambda message, _: StuckError(message),
    ) -> None:
        """`diagnose(message, deadline)` makes the error of a passed deadline."""
        self.method = method
        self.targets = tuple(targets)
        self._slots: list[Outcome | Reply | None] = [None] * len(targets)
        self._num_left = len(targets)
        self._failed = False
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[Handle], None]] = []
        self._started_s = time.monotonic()
        self._diagnose = diagnose

    def wait(self, timeout_s: float = DEFAULT_WAIT_S) -> list[Any]:
        """The results in the order of ranks. Raises WorkerError or PeerDiedError as soon as one rank failed,
        and StuckError past the deadline."""
        with self._changed:
            in_time = self._failed or self._num_left == 0
            if not in_time:
                with waiting(f"results of {self.method}", self._waits_on()):
                    in_time = self._changed.wait_for(lambda: self._failed or self._num_left == 0, timeout_s)
        if not in_time:
            raise self._stuck(timeout_s)
        outcomes = [self._open(index) for index in range(len(self._slots)) if self._slots[index] is not None]
        errors = [outcome.error for outcome in outcomes if outcome.error is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"also failed: {str(other).splitlines()[0]}")
            raise errors[0]
        return [outcome.value for outcome in outcomes]

    def outcomes(self, timeout_s: float = DEFAULT_WAIT_S) -> list[Outcome]:
        """What became of every rank, failures included. Raises only StuckError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_left == 0, timeout_s):
                raise self._stuck(timeout_s)
        return [self._open(index) for index in range(len(self._slots))]

    def so_far(self) -> list[Outcome | None]:
        """What became of the ranks that have answered or failed; None for the others. Waits for nothing."""
        return [None if slot is None else self._open(index) for index, slot in enumerate(list(self._slots))]

    def done(self) -> bool:
        """Whether every rank has answered or failed."""
        with self._changed:
            return self._num_left == 0

    def seconds(self, reduce: Reduction = "max", timer: str | None = None) -> float:
        """Time inside the method, or inside its timer `timer`, over the ranks. Waits for nothing: call it after."""
        if timer is None:
            return _reduce([outcome.seconds for outcome in self._finished()], reduce)
        values = [outcome.timers[timer] for outcome in self._finished() if timer in outcome.timers]
        if not values:
            known = sorted({name for outcome in self._finished() for name in outcome.timers})
            raise RillError(f"no timer {timer!r} in {self.method}: timers are {', '.join(known) or 'none'}")
        return _reduce(values, reduce)

    def timers(self, reduce: Reduction = "max") -> dict[str, float]:
        """Every timer of the call by name, in seconds, reduced over the ranks that used it."""
        names = sorted({name for outcome in self._finished() for name in outcome.timers})
        return {name: self.seconds(reduce, name) for name in names}

    def on_done(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback` once every rank has answered or failed; it must not block."""
        with self._changed:
            if self._num_left > 0:
                self._callbacks.append(callback)
                return
        callback(self)

    def fill(self, outcomes: Sequence[tuple[int, Reply | RillError]]) -> None:
        """Called by the process's inbox, once per rank."""
        with self._changed:
            for index, outcome in outcomes:
                if isinstance(outcome, Reply):
                    self._slots[index] = outcome
                    self._failed = self._failed or outcome.is_error
                else:
                    self._slots[index] = Outcome(None, outcome, 0.0, {})
                    self._failed = True
            self._num_left -= len(outcomes)
            is_done = self._num_left == 0
            if is_done or self._failed:
                self._changed.notify_all()
        if is_done:
            for callback in self._callbacks:
                callback(self)

    def _open(self, index: int) -> Outcome:
        slot = self._slots[index]
        assert slot is not None
        if isinstance(slot, Reply):
            slot = self._slots[index] = slot.open()
        return slot

    def _finished(self) -> list[Outcome]:
        if self._num_left:
            raise StuckError(f"{self.method} still runs on {', '.join(self._missing())}: wait for it first")
        return [self._open(index) for index in range(len(self._slots))]

    def _waits_on(self) -> str:
        """For the stuck-run report: the first rank that has not answered."""
        return next(t.name for t, slot in zip(self.targets, self._slots, strict=True) if slot is None)

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
