"""Where in the user's own code something went wrong: the file and line to put into a message.

Frames of rill, of installed packages and of the standard library are passed over: nobody can mend those.
"""

from __future__ import annotations

import asyncio
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Any

_PATHS = sysconfig.get_paths()
_NOT_THE_USERS = tuple(
    f"{folder}/"
    for folder in {_PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], str(Path(__file__).parents[1])}
)


def described(error: BaseException) -> str:
    """The error in one line, with the user's place in the code where there is one."""
    place = place_of(error.__traceback__)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({place})" if place else text


def place_of(traceback: TracebackType | None) -> str | None:
    """ "my_env.py:12 in run": the innermost of the user's own frames."""
    found = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_the_users(code.co_filename):
            found = f"{_short(code.co_filename)}:{traceback.tb_lineno} in {code.co_name}"
        traceback = traceback.tb_next
    return found


def place_of_task(task: asyncio.Task[Any]) -> str | None:
    """Where a task that has not ended waits."""
    found = None
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        if frame is not None and _is_the_users(frame.f_code.co_filename):
            found = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    return found


def _is_the_users(filename: str) -> bool:
    return not filename.startswith(("<frozen", *_NOT_THE_USERS))


def _short(filename: str) -> str:
    """Relative to the current folder where it lies inside."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
