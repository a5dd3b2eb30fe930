"""What this process waits for, by thread, and what its threads are doing: the raw material of a stuck-run report.

Every wait that can last says its name with `waiting(what, on)`. When somebody asks (a note on the topic "dump"), the
process answers with its open waits and the Python stacks of all its threads.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rill.runtime.hub_client import HubClient

DUMP, DUMPED = "dump", "dumped"


@dataclass(frozen=True, slots=True)
class Wait:
    """One thread's open wait."""

    what: str
    """For people: "take from channel 'prompts'"."""
    on: str
    """For the graph: "channel:prompts", "locks:…", or a worker's name."""
    since_s: float


_open: dict[int, list[Wait]] = {}


@contextmanager
def waiting(what: str, on: str) -> Iterator[None]:
    """Name the wait that this thread is about to enter."""
    waits = _open.setdefault(threading.get_ident(), [])
    waits.append(Wait(what, on, time.monotonic()))
    try:
        yield
    finally:
        waits.pop()
        if not waits:
            _open.pop(threading.get_ident(), None)


def dump() -> dict[str, Any]:
    """This process's waits and stacks, ready to travel."""
    now_s = time.monotonic()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {}
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if not name.startswith("rill-hub"):
            stacks[name] = "".join(traceback.format_stack(frame)[-12:])
    waits = [
        [wait.what, wait.on, now_s - wait.since_s, names.get(ident, str(ident))]
        for ident, of_thread in list(_open.items())
        for wait in list(of_thread)
    ]
    return {"waits": waits, "stacks": stacks}


def answer_dumps(hub: HubClient) -> None:
    """Have `hub`'s process answer when its waits are asked for."""
    hub.on_note(DUMP, lambda sender, _: hub.notify(sender, DUMPED, dump()))
