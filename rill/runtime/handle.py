"""What a group call gives at once: the results to come, one per rank.

`wait` gives the results or raises the first failure as soon as it is known, so that a rank which waits for a dead
one does not hold up the caller. `outcomes` waits for everybody and raises nothing. Any number of threads may ask, any
number of times: everybody gets the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rill.errors import PeerDiedError, RillError, StuckError
from rill.runtime.address import WorkerAddress
from rill.runtime.process.waits import waiting

DEFAULT_WAIT_S = 3600.0


class Outcome:
    """One rank's answer, or why there is none. It is read once, in the thread that first wants it; what reading gave or
    raised is kept for those who ask later."""

    __slots__ = ("_failure", "_lock", "_read", "_value", "is_error", "seconds", "timers")

    def __init__(
        self, is_error: bool, seconds: float, timers: Mapping[str, float], read: Callable[[], Any]
    ) -> None:
        """`seconds`: inside the method, on the worker. `timers`: seconds by the name given to `Worker.timer`, summed
        over the call. `read` gives the result; for a failure, the error to raise."""
        self.is_error = is_error
        self.seconds = seconds
        self.timers = timers
        self._read: Callable[[], Any] | None = read
        self._lock = threading.Lock()
        self._value: Any = None
        self._failure: Exception | None = None

    @property
    def value(self) -> Any:
        return None if self.is_error else self.read()

    @property
    def error(self) -> RillError | None:
        return self.read() if self.is_error else None

    def read(self) -> Any:
        """The value or the error."""
        with self._lock:
            if self._read is not None:
                try:
                    self._value = self._read()
                except Exception as error:  # noqa: BLE001  boundary: kept, and raised for everybody who asks
                    self._failure = error
                self._read = None
        if self._failure is not None:
            raise self._failure
        return self._value


class Handle:
    def __init__(
        self,
        method: str,
        targets: Sequence[WorkerAddress],
        diagnose: Callable[[str, float], StuckError] = lambda message, _: StuckError(message),
    ) -> None:
        """`diagnose(message, deadline)` makes the error of a deadline."""
        self.method = method
        self.targets = tuple(targets)
        self._outcomes: list[Outcome | None] = [None] * len(targets)
        self._num_left = len(targets)
        self._failed = False
        self._lock = threading.Lock()
        self._gates: list[tuple[threading.Lock, bool]] = []
        """Those who wait, each at a lock of its own, and whether they wait for all. A Condition costs a call more than
        all the rest of this."""
        self._diagnose = diagnose
        self._started_s = time.monotonic()

    def wait(self, timeout_s: float = DEFAULT_WAIT_S) -> list[Any]:
        """The results in the order of ranks. Raises WorkerError or PeerDiedError as soon as one rank failed,
        and StuckError past the deadline."""
        self._wait(timeout_s, for_all=False)
        if self._failed:
            errors = [one.read() for one in self._outcomes if one is not None and one.is_error]
            for other in errors[1:]:
                note = f"also failed: {str(other).splitlines()[0]}"
                if note not in getattr(errors[0], "__notes__", ()):  # whoever asked before has left it
                    errors[0].add_note(note)
            raise errors[0]
        return [one.read() for one in self._outcomes if one is not None]

    def outcomes(self, timeout_s: float = DEFAULT_WAIT_S) -> list[Outcome]:
        """What became of every rank, failures included. Raises only StuckError."""
        self._wait(timeout_s, for_all=True)
        return [one for one in self._outcomes if one is not None]

    def ended(self, timeout_s: float) -> bool:
        """Wait until every rank has answered or failed; False past the time, which is no error here."""
        return self._came(timeout_s, for_all=True)

    def so_far(self) -> list[Outcome | None]:
        """What became of the ranks that have answered or failed; None for the others. Waits for nothing."""
        return list(self._outcomes)

    def done(self) -> bool:
        return self._num_left == 0

    def fill(self, index: int, outcome: Outcome) -> None:
        """Called by whoever reads the answers. Only the first answer of a rank counts."""
        with self._lock:
            if self._outcomes[index] is not None:
                return
            self._outcomes[index] = outcome
            self._failed = self._failed or outcome.is_error
            self._num_left -= 1
            for gate in [gate for gate in self._gates if self._is_over(for_all=gate[1])]:
                self._gates.remove(gate)
                gate[0].release()

    def lose(self, index: int, why: str) -> None:
        """Called where an answer will not come: "died during a call"."""
        error = PeerDiedError(f"{self.targets[index].name} {why}")
        self.fill(index, Outcome(True, 0.0, {}, lambda: error))

    def _is_over(self, *, for_all: bool) -> bool:
        """Whether all have answered, or it is known what `wait` gives: one has failed."""
        return self._num_left == 0 or (self._failed and not for_all)

    def _came(self, timeout_s: float, *, for_all: bool) -> bool:
        """Wait, in the stuck-run report's sight."""
        if self._is_over(for_all=for_all):
            return True
        with waiting(f"results of {self.method}", lambda: next(iter(self._missing()), "")):
            with self._lock:
                if self._is_over(for_all=for_all):
                    return True
                gate = (threading.Lock(), for_all)
                gate[0].acquire()
                self._gates.append(gate)
            if gate[0].acquire(timeout=max(0.0, min(timeout_s, threading.TIMEOUT_MAX))):
                return True
        with self._lock:
            if gate in self._gates:
                self._gates.remove(gate)
            return self._is_over(for_all=for_all)

    def _wait(self, timeout_s: float, *, for_all: bool) -> None:
        if not self._came(timeout_s, for_all=for_all):
            waited_s = time.monotonic() - self._started_s
            missing = f"{self.method} has not ended on {', '.join(self._missing())} within {timeout_s:g} s"
            raise self._diagnose(f"{missing} (called {waited_s:.1f} s ago)", timeout_s)

    def _missing(self) -> list[str]:
        return [t.name for t, one in zip(self.targets, self._outcomes, strict=True) if one is None]
