"""Where in the user's own code something went wrong: the file and line to put into a message.

Frames of rill, of installed packages and of the standard library are passed over: nobody can mend those.
"""

from __future__ import annotations

import asyncio
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from types import CodeType, TracebackType
from typing import Any

from rill.errors import in_words
from rill.runtime.process.waits import frames_of

_PATHS = sysconfig.get_paths()
_NOT_THE_USERS = tuple(
    f"{folder}/"
    for folder in {_PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], str(Path(__file__).parents[1])}
)


def described(error: BaseException) -> str:
    """The error in one line, with the user's place in the code where there is one."""
    place = place_of(error.__traceback__)
    return f"{in_words(error)} ({place})" if place else in_words(error)


def place_of(traceback: TracebackType | None) -> str | None:
    """ "my_env.py:12 in run": the innermost of the user's own frames."""
    return _innermost((frame.f_code, line) for frame, line in walk_tb(traceback))


def place_of_task(task: asyncio.Task[Any]) -> str | None:
    """Where a task that has not ended waits."""
    return _innermost((frame.f_code, frame.f_lineno) for frame in frames_of(task))


def _innermost(places: Iterable[tuple[CodeType, int]]) -> str | None:
    found = [(c, line) for c, line in places if not c.co_filename.startswith(("<frozen", *_NOT_THE_USERS))]
    if not found:
        return None
    code, line = found[-1]
    path = Path(code.co_filename)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{short}:{line} in {code.co_name}"
