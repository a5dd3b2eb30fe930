"""Jobs that must keep an order among themselves and wait for nobody else: one thread per lane, while it has work.

Asynchronous sends are lanes by (group, rank, tag), sends over device links are lanes by receiver: a peer that
is slow, or dead, holds up its own lane and no other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]
_LINGER_S = 0.5
"""A lane without work keeps its thread for so long."""


class Lanes:
    """Thread-safe. Jobs see to their own errors: they raise nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: dict[Hashable, deque[Job]] = {}
        """By lane; a job stays in front while it runs. A lane is here as long as its thread lives."""

    def submit(self, lane: Hashable, job: Job) -> None:
        """Run `job` after those that were submitted to this lane before."""
        with self._changed:
            if lane in self._jobs:
                self._jobs[lane].append(job)
                self._changed.notify_all()
                return
            self._jobs[lane] = deque([job])
        threading.Thread(target=self._run, args=(lane,), name=self._name, daemon=True).start()

    def is_busy(self, lane: Hashable) -> bool:
        """Whether a job of this lane runs or waits."""
        return bool(self._jobs.get(lane))

    def _run(self, lane: Hashable) -> None:
        jobs = self._jobs[lane]
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(jobs), _LINGER_S):
                    del self._jobs[lane]
                    return
            jobs[0]()
            with self._changed:
                jobs.popleft()
