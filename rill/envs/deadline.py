"""The deadline of a turn or a tool's call: `with Deadline(seconds): await …`, or TimeoutError.

What asyncio.timeout does, at a quarter of its cost: the calls of thousands of episodes share one timer per event loop,
which looks at all of them every TICK_S. A deadline is noticed that much late at most.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakKeyDictionary

TICK_S = 0.05


class Deadline:
    """For the task that enters it, once."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_expired = False

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        watched = _watched.get(loop)
        if watched is None:
            watched = _watched[loop] = set()
            loop.call_later(TICK_S, _look, loop, watched)
        task = asyncio.current_task(loop)
        assert task is not None, "a deadline belongs to a task"
        self.task, self._num_cancels, self._watched = task, task.cancelling(), watched
        self.until_s = loop.time() + self.timeout_s
        watched.add(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._watched.discard(self)
        # Somebody else may have cancelled the task too: that is not for us to swallow.
        is_ours = self.is_expired and self.task.uncancel() <= self._num_cancels
        if is_ours and kind is asyncio.CancelledError:
            raise TimeoutError from error


_watched: WeakKeyDictionary[asyncio.AbstractEventLoop, set[Deadline]] = WeakKeyDictionary()


def _look(loop: asyncio.AbstractEventLoop, watched: set[Deadline]) -> None:
    now_s = loop.time()
    for deadline in [each for each in watched if each.until_s <= now_s]:
        watched.discard(deadline)
        deadline.is_expired = True
        deadline.task.cancel()
    if watched:
        loop.call_later(TICK_S, _look, loop, watched)
    else:
        del _watched[loop]  # until the next call
