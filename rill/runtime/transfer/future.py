"""The one kind of future here, concurrent.futures.Future, from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str, future: Future[T] | None = None) -> Future[T]:
    """Run `work` in a daemon thread: what hangs hangs nobody else, and never keeps the process from ending."""
    result: Future[T] = future if future is not None else Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001  boundary: handed to whoever waits on the future
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return result
