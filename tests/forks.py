"""Processes that are forked from one which has imported already what they need: each starts seconds sooner.

    test ──socket──▶ source ──fork──▶ agents of clusters, ranks of trainers …
         ◀──pid────

The source is a process of its own, for two reasons: torch refuses a backward pass in the fork of a process that made
one, and a thread of the test's process could hold a lock at the fork. What it forks ends as the same would that was
started anew: it holds a pipe whose other end is the test's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any
from unittest import mock

from rill.runtime.process import agent, backend
from rill.workflows import PRELOAD

MODULES = (*PRELOAD, "tests.training.tiny", "torch.distributed.tensor.parallel")
MOST_BYTES = 1 << 17


class Forked:
    """A process of the source's, with what tests use of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = -1
        with contextlib.suppress(ProcessLookupError):
            self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """None while it runs; how it ended the source does not say."""
        return None if self._is_running(0.0) else 0

    def wait(self, timeout: float | None = None) -> None:
        if self._is_running(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def _is_running(self, timeout_s: float | None) -> bool:
        if self._fd < 0:
            return False
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return True
        os.close(self._fd)
        self._fd = -1
        return False


def fork(target: str, *arguments: Any, fds: Sequence[int]) -> Forked:
    """Call `module:function(*arguments, *fds)` in a process with this one's folder, environment and open files `fds`,
    whose numbers are others there."""
    state = (target, arguments, os.getcwd(), dict(os.environ), list(sys.path))
    with _asking:
        door = _source()
        socket.send_fds(door, [pickle.dumps(state)], fds)
        answer = door.recv(32)
    assert answer, "the process that others are forked from is gone: its error is in the output"
    return Forked(int(answer))


@contextlib.contextmanager
def forked_agents() -> Iterator[None]:
    """Clusters that are opened here have an agent from the source."""

    def start(entry: str, *arguments: object) -> tuple[Connection[Any, Any], Any]:
        control, theirs = Pipe()
        process = fork("tests.forks:be_agent", entry, arguments, fds=[theirs.fileno()])
        theirs.close()
        return control, process

    with mock.patch.object(backend, "_start_agent", start):
        yield


def be_agent(entry: str, arguments: Sequence[object], fd: int) -> None:
    getattr(agent, entry)(fd, *arguments)


_asking = threading.Lock()


@functools.cache
def _source() -> socket.socket:
    """Ends when this process does, whose end of the socket is the only one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = agent.bootstrap("tests.forks:main", str(theirs.fileno()), list(sys.path))
    subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    theirs.close()
    return ours


def main(fd: int) -> None:
    door = socket.socket(fileno=fd)
    door.set_inheritable(False)
    agent._import_for_workers(MODULES)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        state, fds, _, _ = socket.recv_fds(door, MOST_BYTES, 8)
        if not state:
            os._exit(0)  # at once: what was imported need not be taken apart
        pid = os.fork()
        if pid == 0:
            door.close()
            _become(*pickle.loads(state), fds)
        for one in fds:
            os.close(one)
        door.send(str(pid).encode())


def _become(
    target: str,
    arguments: Sequence[Any],
    folder: str,
    environment: dict[str, str],
    path: list[str],
    fds: Sequence[int],
) -> None:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        module, _, function = target.partition(":")
        getattr(importlib.import_module(module), function)(*arguments, *fds)
    except BaseException:  # a forked child never returns into its parent's loop
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
