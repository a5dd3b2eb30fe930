"""Threads for calls that may block, or never return: tools, rewards, games.

A thread that comes back is used again; one that hangs is left alone and keeps neither a place nor the interpreter's
end. Called on the event loop, from any number of loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Work = Callable[[], None]
_idle: queue.SimpleQueue[queue.SimpleQueue[_Work]] = queue.SimpleQueue()
MAX_IDLE = 64


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """The function's result. Cancelled: the call goes on by itself, and nobody hears of it."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        elif isinstance(error, StopIteration):  # a future cannot hold it
            answer.set_exception(RuntimeError(f"StopIteration: {error}"))
        else:
            answer.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*args, **kwargs)
        except BaseException as raised:  # noqa: BLE001  boundary: handed to whoever waits
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    try:
        inbox = _idle.get_nowait()
    except queue.Empty:
        inbox = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), daemon=True, name="rill-env").start()
    inbox.put(work)
    return await answer


def _serve(inbox: queue.SimpleQueue[_Work]) -> None:
    while True:
        inbox.get()()
        if _idle.qsize() >= MAX_IDLE:
            return
        _idle.put(inbox)
