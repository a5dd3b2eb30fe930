"""Deadlines around user code.

    with Deadline(seconds): await …       of a turn or a tool's call: in the same task, or TimeoutError
    await within(seconds, begun(f))     of an episode, a session, a reward: in a task of its own, or Late

Deadline does what asyncio.timeout does, at a fraction of its cost: the calls of thousands of episodes share one timer
per event loop, which looks at all of them every TICK_S. A deadline is noticed that much late at most.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from rill.envs.places import described, place_of_task

T = TypeVar("T")
TICK_S = 0.05


class Late(Exception):
    """Something was not finished in its time."""


class Quit(Exception):
    """User code ended as only a program should, by sys.exit(), or with a cancellation that nobody asked for."""


def is_own(error: BaseException, num_cancels: int = 0) -> bool:
    """Whether user code has raised this by itself. A cancellation comes from elsewhere where the running task has been
    cancelled more often than `num_cancels` times."""
    if not isinstance(error, asyncio.CancelledError):
        return not isinstance(error, GeneratorExit)
    task = asyncio.current_task()
    return task is not None and task.cancelling() <= num_cancels


async def contained(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """What user code returns. sys.exit() and the like are a Quit: in a task of their own they would end the loop."""
    try:
        return await function(*args)
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise Quit(described(error)) from error


def begun(function: Callable[..., Awaitable[T]], *args: Any) -> asyncio.Task[T]:
    """User code in a task of its own, for `within`."""
    return asyncio.ensure_future(contained(function, *args))


async def within(timeout_s: float, task: asyncio.Task[T], *, grace_s: float = 5.0) -> T:
    """The result, or Late. One that does not heed its cancellation is left behind."""
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=grace_s)
        raise
    if done:
        try:
            return task.result()
        except asyncio.CancelledError as error:
            raise Quit(described(error)) from error
    place = place_of_task(task)
    task.cancel()
    await asyncio.wait({task}, timeout=grace_s)
    raise Late(f"not finished within {timeout_s:g} s{f', waits in {place}' if place else ''}")


class Deadline:
    """For the task that enters it, once. `num_cancels`: how often that had been cancelled before."""

    __slots__ = ("_watch", "is_expired", "num_cancels", "task", "timeout_s", "until_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.is_expired = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "a deadline belongs to a task"
        watch: _Watch | None = getattr(_here, "watch", None)
        if watch is None or watch.loop is not task.get_loop():
            watch = _here.watch = _Watch(task.get_loop())
        self.task, self.num_cancels, self._watch = task, task.cancelling(), watch
        self.until_s = watch.add(self) + self.timeout_s

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._watch.deadlines.discard(self)
        # Somebody else may have cancelled the task too: that is not for us to swallow.
        is_ours = self.is_expired and self.task.uncancel() <= self.num_cancels
        if is_ours and kind is asyncio.CancelledError:
            raise TimeoutError from error


class _Watch:
    """Looks at the deadlines of one event loop for as long as there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.deadlines: set[Deadline] = set()
        self._is_looking = False

    def add(self, deadline: Deadline) -> float:
        """The time."""
        self.deadlines.add(deadline)
        if not self._is_looking:
            self._is_looking = True
            self.loop.call_later(TICK_S, self._look)
        return self.loop.time()

    def _look(self) -> None:
        now_s = self.loop.time()
        for deadline in [each for each in self.deadlines if each.until_s <= now_s]:
            self.deadlines.discard(deadline)
            deadline.is_expired = True
            deadline.task.cancel()
        self._is_looking = bool(self.deadlines)
        if self._is_looking:
            self.loop.call_later(TICK_S, self._look)


_here = threading.local()
"""A thread runs one event loop at a time."""
