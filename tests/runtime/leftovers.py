"""What a session may not leave behind, however it ended: processes, shared memory, sockets, temporary files.

Everything started inside `nothing_left()` carries a mark in its environment and has a temporary directory of its own:
what other tests on the machine do at the same time is not taken for it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rill.runtime.cluster import Cluster
from rill.runtime.process.waits import dump

MARK = "RILL_TEST_MARK"
SHM = Path("/dev/shm")
GONE_WITHIN_S = 30.0


class Room:
    """The marked surroundings of one test."""

    def __init__(self, temp_dir: Path) -> None:
        self.temp_dir = temp_dir
        self.mark = f"{time.time_ns()}"
        self.sessions: set[str] = set()

    def note_sessions(self) -> None:
        """Remember the sessions that are there now: their shared memory bears their names."""
        self.sessions |= {path.name.lstrip(".") for path in self.temp_dir.glob("*rill-session-*")}

    def leftovers(self) -> list[str]:
        """Whatever is still there."""
        self.note_sessions()
        found = marked_processes(self.mark)
        found += [str(path) for path in self.temp_dir.iterdir() if not is_pythons_own(path)]
        found += [str(path) for path in SHM.iterdir() if path.name.lstrip(".") in self.sessions]
        sockets = Path("/proc/net/unix").read_text().splitlines()
        return found + [line for line in sockets if str(self.temp_dir) in line]


def is_pythons_own(path: Path) -> bool:
    """What `tempfile` writes to see whether a folder can be written to; it stays where a process dies just then."""
    return path.is_file() and path.read_bytes() in (b"blat", b"")


@contextmanager
def nothing_left() -> Iterator[Room]:
    """What runs inside must have left nothing a moment after the end of the block."""
    with (
        tempfile.TemporaryDirectory(prefix="rill-t-") as folder,  # short: there are sockets inside
        pytest.MonkeyPatch.context() as patch,
    ):
        room = Room(Path(folder))
        patch.setenv(MARK, room.mark)
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield room
        assert becomes_true(lambda: not room.leftovers(), GONE_WITHIN_S), room.leftovers()


def marked_processes(mark: str) -> list[str]:
    """The command lines of living processes with this mark, other than the test's own."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid() and is_running(int(folder.name)):
            try:
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                    found.append(f"process {folder.name}: {(folder / 'cmdline').read_text()}")
            except OSError:
                continue
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def becomes_true(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def own_waits() -> list[list[str]]:
    """What the calling thread, or a task of its loop, waits for: what, and on whom. Threads that earlier tests of this
    process have left behind are not looked at."""
    mine = threading.current_thread().name
    return [[what, on] for what, on, _, thread in dump()["waits"] if thread == mine]


def hub_pid(cluster: Cluster) -> int:
    """A cluster's hub; it may be between two lives, or end while it is looked at."""
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            agent = psutil.Process(cluster._nodes["node0"].agent_pid)  # type: ignore[attr-defined]
            for process in agent.children():
                if process.name() == "hub":
                    return int(process.pid)
        time.sleep(0.02)
    raise AssertionError("no hub")
