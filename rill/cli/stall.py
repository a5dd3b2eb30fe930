"""Says that a run has stopped moving, long before the deadline of a step ends it, and who waits for whom.

    loop ── observe, after every step ──▶ StallWatch ◀── once a second ── its thread
                                              │ nothing for longer than any step took
                                              ▼
                       a note on the terminal, and stuck-*.md in the run's logs (rill.runtime.process.report)

It ends nothing: a step may be slow for good reasons. It speaks again each time the silence has doubled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from rill.cli.progress import duration
from rill.errors import RunError
from rill.runtime.context import current
from rill.runtime.process.report import explain

if TYPE_CHECKING:
    from rill.workflows.loop import StepReport

TICK_S = 1.0
START_S = 600.0
"""Before the first report: models are loaded, kernels compiled."""
SILENCE_S = 120.0
FACTOR = 5.0
"""Silence is odd from so many times the longest step, and from SILENCE_S, on."""


def who_waits(message: str) -> str:
    """`message` with what all processes of this run wait for."""
    try:
        return explain(current(), message)
    except RunError:
        return f"{message} (no cluster is running yet)"
    except OSError as error:  # the report could not be written
        return f"{message} (who waits for whom cannot be told: {error})"


class StallWatch:
    """Use as a context manager; `observe` is one of the loop's observers."""

    def __init__(
        self,
        note: Callable[[str], None],
        explained: Callable[[str], str] = who_waits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._note = note
        self._explained = explained
        self._clock = clock
        self._lock = threading.Lock()
        self._last_s = clock()
        self._longest_s: float | None = None
        self._limit_s = START_S
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rill-stall-watch", daemon=True)

    def observe(self, report: StepReport) -> None:
        with self._lock:
            now_s = self._clock()
            if self._longest_s is None:
                self._longest_s = 0.0  # the start was no step
            else:
                self._longest_s = max(self._longest_s, now_s - self._last_s)
            self._last_s = now_s
            self._limit_s = max(SILENCE_S, FACTOR * self._longest_s)

    def check(self) -> None:
        """Speak if it is time to."""
        with self._lock:
            silent_s, longest_s = self._clock() - self._last_s, self._longest_s
            if silent_s < self._limit_s:
                return
            self._limit_s *= 2
        usual = f"; the longest so far took {duration(longest_s)}" if longest_s and longest_s >= 1 else ""
        what = "no first step" if longest_s is None else "no step has ended"
        self._note(self._explained(f"{what} for {duration(silent_s)}{usual}"))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(timeout=30.0)

    def _watch(self) -> None:
        while not self._ended.wait(TICK_S):
            self.check()
