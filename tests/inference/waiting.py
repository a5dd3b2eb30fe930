"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(
    check: Callable[[], bool], wait_s: float = 30.0, what: str = "it did not happen in time"
) -> None:
    deadline = time.monotonic() + wait_s
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
