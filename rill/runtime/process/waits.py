"""What this process waits for, by thread, and what its threads are doing: the raw material of a stuck-run report.

Every wait that can last says its name with `waiting(what, on)`. When somebody asks (report.py), the process answers
with its open waits and the Python stacks of all its threads, and of the tasks of its event loops.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

before: list[Callable[[], None]] = []
"""Called by a thread that is about to wait."""
after: list[Callable[[str, float], None]] = []
"""Called with what it waited on, and for how long."""


def left_s(deadline_s: float) -> float:
    """The seconds until a moment of time.monotonic(), 0 after it."""
    return max(0.0, deadline_s - time.monotonic())


class waiting:  # noqa: N801  used as `with waiting(...)`; a class because it stands in every call's way
    """Name the wait that this thread, or a task in it, is about to enter."""

    __slots__ = ("_since_s", "on", "what")

    def __init__(self, what: str, on: str | Callable[[], str]) -> None:
        """`what` for people: "take from channel 'prompts'". `on` for the graph: "channel:prompts", "locks:…", or a
        worker's name; a function is asked when somebody wants to know."""
        self.what = what
        self.on = on
        self._since_s = 0.0

    def __enter__(self) -> None:
        for hook in before:
            hook()
        self._since_s = time.monotonic()
        _open[self] = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        del _open[self]
        on = self.on if isinstance(self.on, str) else "calls"
        for hook in after:
            hook(on, time.monotonic() - self._since_s)

    def row(self, now_s: float) -> list[Any]:
        return [self.what, self.on if isinstance(self.on, str) else self.on(), now_s - self._since_s]


_open: dict[waiting, int] = {}
"""The waits of all threads, each with its thread, in the order in which they began."""
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
MAX_PLACES = 12
"""At which tasks wait, shown of one process: those with the most tasks."""


def watch_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Show this loop's tasks, too: a thread's stack says only that its loop is idle."""
    _loops.add(loop)


def dump() -> dict[str, Any]:
    """This process's waits and stacks, ready to travel."""
    now_s = time.monotonic()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith("rill-hub"):
            stacks[name] = "".join(traceback.format_stack(frame)[-12:])
    waits = [[*wait.row(now_s), names.get(ident, str(ident))] for wait, ident in list(_open.items())]
    if tasks := _task_stacks():
        stacks["tasks"] = tasks
    return {"waits": waits, "stacks": stacks}


def _task_stacks() -> str:
    """Where the tasks of the watched loops wait, outermost frame first; alike ones are counted."""
    counts: Counter[str] = Counter()
    for loop in list(_loops):
        if not loop.is_closed():
            counts.update("".join(map(_line, frames_of(task))) for task in asyncio.all_tasks(loop))
    shown = [f"{count} task(s) at\n{stack}" for stack, count in counts.most_common(MAX_PLACES)]
    return "\n".join(shown)


def frames_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Where a task that has not ended waits, outermost first."""
    waited: Any = task.get_coro()
    while waited is not None:
        frame = getattr(waited, "cr_frame", None) or getattr(waited, "gi_frame", None)
        if frame is not None:
            yield frame
        waited = getattr(waited, "cr_await", None) or getattr(waited, "gi_yieldfrom", None)


def _line(frame: FrameType) -> str:
    return f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
