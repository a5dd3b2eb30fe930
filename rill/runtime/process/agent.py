"""The agent of one node: the process that starts, watches and ends every other process of a session there.

    driver ──pipe──▶ agent ──fork, exec──▶ hub, workers …
           ◀─exit events       ◀──SIGCHLD────

Started by `LocalNode`, here or inside a Ray actor. One single-threaded loop. Guarantees:
- When the driver's end of the pipe closes, or the driver is gone (kill -9 included), every process of the session is
  killed, with all that it started, and the session's folders are removed.
- When the agent itself is killed, the kernel kills its children (PR_SET_PDEATHSIG). A child's process group ends with
  the child; what escapes from it is adopted (PR_SET_CHILD_SUBREAPER) and ends with the session.
- A child marked `restart` (the hub, a store server) is started again whenever it ends, unless again and again.

The worker's main, and `preload`, are imported once, here, and children are forked with them in place: they start in
milliseconds and share memory. The main reads no environment when it is loaded (no numpy, no torch). A worker whose
environment speaks to the loader or the interpreter (LD_*, PYTHON*) is a fresh process instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rill.errors import in_words
from rill.runtime.process.session import hold_session, remove_session
from rill.runtime.process.threads import loading_for_workers

TICK_S = 1.0
MAX_RESTARTS_PER_MINUTE = 120
LOG_TAIL_BYTES = 4096

WORKER_MAIN = "rill.runtime.process.worker_main"
NEEDS_FRESH_PROCESS = ("LD_", "PYTHON", "MALLOC_")
"""Variables that are read before Python code runs."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def allow_many_files() -> None:
    """Raise this process's limit of open files as far as it may: a run has some per worker. Children inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def bootstrap(entry: str, argument: str, sys_path: list[str]) -> list[str]:
    """The command line of a fresh interpreter that calls `entry` with what the expression `argument` gives."""
    module, _, function = entry.partition(":")
    code = (
        f"import sys; sys.path[:] = {sys_path!r}; from {module} import {function} as main; main({argument})"
    )
    return [sys.executable, "-c", code]


# --- what driver and agent say to each other, over a pipe -----------------------------------------------------
# The first request is an AgentSpec. Then: a Start; a key, to kill that process and its group; None, to end the session.


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start a process and call it `key`; whenever it ends, an Exited comes back."""

    key: str
    entry: str
    """"module:function", called with `payload`."""
    payload: bytes
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: str
    restart: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    key: str
    pid: int
    how: str
    """In words, with the end of what it printed."""
    is_service: bool
    """`Start.restart` asks for another in its place."""
    is_restarted: bool
    """It was started."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    session_dir: str
    shm_dir: str
    sys_path: list[str]
    preload: tuple[str, ...] = ()


# --- the agent --------------------------------------------------------------------------------------------


class Agent:
    def __init__(self, spec: AgentSpec, control: Connection[Any, Any]) -> None:
        self.spec = spec
        self.control = control
        self.children: dict[int, tuple[Start, list[float]]] = {}
        """pid -> what it was started for, and when that was started."""
        self.pid, self.parent_pid = os.getpid(), os.getppid()
        self.wake_read, self.wake_write = os.pipe()
        for fd in (self.wake_read, self.wake_write):
            os.set_blocking(fd, False)

    def run(self) -> None:
        """Until the driver says so or is gone."""
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self.wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle
        _import_for_workers([WORKER_MAIN])
        while os.getppid() == self.parent_pid:
            readable = wait([self.control, self.wake_read], TICK_S)
            if self.wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self.wake_read, 4096)
            self._reap()
            if self.control in readable:
                try:
                    request = self.control.recv()
                except (EOFError, OSError):
                    break
                if request is None:
                    break
                self._handle(request)
        self._end()

    def _handle(self, request: Start | str) -> None:
        if isinstance(request, Start):
            try:
                if not request.restart:  # services need none of it, and workers wait for them
                    _import_for_workers(self.spec.preload)
                self._start(request, [])
            except Exception as error:  # noqa: BLE001  boundary: the others of the session are not to end with it
                self._tell(Exited(request.key, 0, _not_started(error), request.restart, False))
        else:
            for pid, (started, _) in self.children.items():
                if started.key == request:
                    _kill_child(pid)

    def _start(self, request: Start, starts_s: list[float]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(request)
        self.children[pid] = (request, [*starts_s, time.monotonic()])

    def _become(self, request: Start) -> None:
        """In the child: take the request's surroundings, then run the entry, here or in a fresh interpreter."""
        exit_code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:  # the agent ended before we asked
                os._exit(0)
            _redirect(request.log_path)
            os.environ.update(request.env)
            if any(name.startswith(NEEDS_FRESH_PROCESS) for name in request.env):
                fd = os.memfd_create("rill-start", 0)
                os.write(fd, request.payload)
                os.lseek(fd, 0, os.SEEK_SET)
                command = bootstrap(request.entry, f"open({fd}, 'rb').read()", self.spec.sys_path)
                os.execv(command[0], command)
            self.control.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            _prctl(_PR_SET_NAME, request.key.encode()[:15])  # what `ps` shows; the kernel keeps 15 characters
            module, _, function = request.entry.partition(":")
            getattr(importlib.import_module(module), function)(request.payload)
            exit_code = 0
        except SystemExit as ending:
            exit_code = ending.code if isinstance(ending.code, int) else 1
        except BaseException:  # noqa: BLE001  the boundary of a forked child: it must never return into the agent's loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(exit_code)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            if pid in self.children:
                _kill_group(pid)  # before it is waited for: until then its number is nobody else's
            status = os.waitpid(pid, 0)[1]
            child = self.children.pop(pid, None)
            if child is None:
                continue  # an adopted process
            request, starts_s = child
            how = _how(os.waitstatus_to_exitcode(status), request.log_path)
            recent = [start_s for start_s in starts_s if time.monotonic() - start_s < 60.0]
            is_restarted = request.restart and len(recent) < MAX_RESTARTS_PER_MINUTE
            if is_restarted:
                try:
                    self._start(request, recent)
                except OSError as error:
                    how, is_restarted = f"{how}\n{_not_started(error)}", False
            self._tell(Exited(request.key, pid, how, request.restart, is_restarted))

    def _tell(self, event: Exited) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.send(event)

    def _end(self) -> None:
        """Kill every process of the session, remove its folders, exit."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for pid in self.children:
            _kill_child(pid)
        deadline_s = time.monotonic() + 5.0
        while time.monotonic() < deadline_s:
            for pid in _own_children():  # includes what was adopted
                _kill_child(pid)
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.005)
            except ChildProcessError:
                break
        remove_session(Path(self.spec.session_dir), Path(self.spec.shm_dir))
        os._exit(0)


def main(fd: int) -> None:
    """Entry of the agent's process; `fd` is its end of the pipe, the first message its spec."""
    os.set_inheritable(fd, False)
    control: Connection[Any, Any] = Connection(fd)
    try:
        spec = control.recv()
    except (EOFError, OSError):  # no cluster came of it
        return
    assert isinstance(spec, AgentSpec)
    allow_many_files()
    with hold_session(Path(spec.session_dir), Path(spec.shm_dir)):
        Agent(spec, control).run()


def main_ahead(fd: int, modules: Sequence[str]) -> None:
    """Entry of an agent's process whose cluster is still to come: what workers need is imported meanwhile."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(Exception):  # boundary: told when a worker is started, which needs it
        _import_for_workers(modules)
    _prctl(_PR_SET_PDEATHSIG, 0)
    main(fd)


def _import_for_workers(modules: Sequence[str]) -> None:
    """Once, for the processes that are forked from here on."""
    if all(module in sys.modules for module in modules):
        return
    with loading_for_workers():
        for module in modules:
            importlib.import_module(module)
    # What is imported now is never garbage: leave its pages untouched, and so shared, in the workers.
    gc.collect()
    gc.freeze()


def _redirect(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)


def _own_children() -> list[int]:
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def _kill_child(pid: int) -> None:
    """A child that is not waited for yet, and what it has started. Just forked, it has no group of its own so far."""
    _kill_group(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    """What a child that may be gone has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _not_started(error: Exception) -> str:
    return f"it could not be started ({in_words(error)})"


def _how(exit_code: int, log_path: str) -> str:
    how = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
    try:
        with open(log_path, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
    except OSError:
        return how
    return f"{how}\n--- end of its log ---\n{tail}" if tail else how
