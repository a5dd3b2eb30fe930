"""A Python process that is asked one thing at a time over a socket; what hangs or crashes in it is ended with it.

    parent: Child.ask(request) ── pickle ──▶ child: handle(request) ── the value, or what it raised ──▶ parent

A plain `python -c`: no fork of a process full of threads, and no second import of the user's main script. Used by
rewards/processes.py and robots/process.py. It does not outlive its parent: it reads the end of its socket, and an alarm
that is set before every request ends it where it hangs and nobody can kill it any more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rill.envs.places import described
from rill.errors import RunError, UserError

START_S = 120.0
"""For a child to import what it needs, and to make what it serves."""
ALARM_GRACE_S = 5.0
MAIN = "import sys; sys.path[:] = {path!r}; from rill.envs.child import main; main()"

Handle = Callable[[Any], Any]
Make = Callable[[Any], tuple[Handle, Any]]
"""From a setup: what answers requests, and the first answer."""


class ChildDiedError(RunError):
    """The process is gone."""


class ChildRaisedError(RunError):
    """What was asked of it raised there."""

    def __init__(self, message: str, *, is_users: bool) -> None:
        super().__init__(message)
        self.is_users = is_users
        """A mistake in what the user asked for."""


class Child:
    """Not for several threads at once. `make` is a function of a module, called in the child with `setup`."""

    def __init__(self, make: Make, setup: Any) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", MAIN.format(path=sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._answers = self._socket.makefile("rb")
        self._send((make, setup), START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether it has ended by itself. It is not waited for here: `kill` ends what it has started."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def first(self) -> Any:
        """Waits for what `make` answered."""
        return self._receive(START_S)

    def ask(self, request: Any, timeout_s: float) -> Any:
        """Raises ChildRaisedError; ChildDiedError and TimeoutError, after which it is no more."""
        deadline_s = time.monotonic() + timeout_s
        self._send(request, timeout_s)
        return self._receive(timeout_s, deadline_s)

    def kill(self) -> int:
        """Its exit code. Its whole session goes: it may have started processes of its own."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._answers.close()
        self._socket.close()
        return self._process.wait()

    def _send(self, request: Any, timeout_s: float) -> None:
        data = pickle.dumps((timeout_s, pickle.dumps(request, pickle.HIGHEST_PROTOCOL)))
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error, timeout_s) from error

    def _receive(self, timeout_s: float, deadline_s: float | None = None) -> Any:
        left_s = timeout_s if deadline_s is None else deadline_s - time.monotonic()
        self._socket.settimeout(max(left_s, 1e-3))
        try:
            value, raised, is_users = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # it may die in the middle of its answer
            raise self._lost(error, timeout_s) from error
        if raised is not None:
            raise ChildRaisedError(raised, is_users=is_users)
        return value

    def _lost(self, error: Exception, timeout_s: float) -> Exception:
        code = self.kill()
        if isinstance(error, TimeoutError):
            return TimeoutError(f"did not answer within {timeout_s:g} s")
        return ChildDiedError(f"died (exit code {code})")


def main() -> None:
    """The child's life."""
    end = socket.socket(fileno=int(sys.argv[1]))
    requests, answers = end.makefile("rb"), end.makefile("wb")
    handle: Handle | None = None
    with contextlib.suppress(EOFError, ConnectionError):  # the parent has let go
        while True:
            timeout_s, data = pickle.load(requests)
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_GRACE_S)  # default action: end the process
            value, raised, is_users = None, None, False
            try:
                request = pickle.loads(data)
                if handle is None:
                    make, setup = request
                    handle, value = make(setup)
                else:
                    value = handle(request)
            except BaseException as error:  # noqa: BLE001  boundary: whatever it raises is told to the parent
                is_users = isinstance(error, UserError)
                raised = str(error) if is_users else described(error)
            signal.setitimer(signal.ITIMER_REAL, 0)
            pickle.dump((value, raised, is_users), answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
