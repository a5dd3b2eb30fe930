"""Worker processes for rewards that may hang while holding the interpreter lock, and can only be stopped by a kill.

Called by RewardRunner from its own threads, one thread to a process:

    thread ── (term, prompt, text, trajectory) ──▶ child: build the reward once, score ──▶ value or error
              └── no answer by the deadline: kill the child's whole session, start another when next needed

The child is a plain `python -c` process (not a fork of a process full of threads, and no re-import of the user's
main script). Its stdout is the answer pipe, so a reward's prints are sent to stderr. An alarm set before every score
ends the child even if its parent has died and cannot kill it any more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from rill.errors import RunError
from rill.registry import Registry

LENGTH = struct.Struct("<Q")
START_TIMEOUT_S = 120.0
MAX_PROCESSES = 64
"""At work at a time, slow ones included."""
ALARM_GRACE_S = 5.0
CHILD = "from rill.envs.rewards.processes import child_main; child_main()"


class RewardTimeoutError(RunError):
    """A reward did not answer within its time limit and was killed."""


class RewardFailedError(RunError):
    """A reward raised, or its process died."""


class RewardProcesses:
    """Killable places to run rewards in: an idle process, or a new one. How many work at a time is the caller's choice.

    `parts` are (registry name or "module:class", config) of the rewards, addressed by their index.
    """

    def __init__(self, parts: Sequence[tuple[str, Any]], *, memory_bytes: int) -> None:
        self._setup = pickle.dumps((list(sys.path), pickle.dumps(list(parts)), memory_bytes))
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._places = threading.Semaphore(MAX_PROCESSES)
        self._is_closed = False

    def score(self, index: int, arguments: Any, timeout_s: float) -> float:
        """Blocks for at most the start of a process plus timeout_s, and for a place where MAX_PROCESSES are at work."""
        if not self._places.acquire(timeout=START_TIMEOUT_S + timeout_s):
            raise RewardTimeoutError(f"all {MAX_PROCESSES} reward processes are busy")
        child: _Child | None = None
        healthy = False
        try:
            try:
                child = self._idle.get_nowait()
            except queue.Empty:
                child = _Child(self._setup)
            value = child.score(index, arguments, timeout_s)
            healthy = True
            return value
        except RewardFailedError:
            healthy = child is not None and child.is_alive
            raise
        finally:
            if child is not None:
                if healthy and not self._is_closed:
                    self._idle.put(child)
                else:
                    child.kill()
            self._places.release()

    def close(self) -> None:
        self._is_closed = True
        while True:
            try:
                self._idle.get_nowait().kill()
            except queue.Empty:
                return


class _Deadline:
    """Of one score."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    def wait(self, pipe: IO[bytes], event: int) -> None:
        """Until the pipe can be read or written."""
        poller = select.poll()
        poller.register(pipe.fileno(), event)
        left_s = self._end_s - time.monotonic()
        if left_s <= 0 or not poller.poll(left_s * 1000):
            raise RewardTimeoutError(f"no score within {self._timeout_s:g} s")


class _Child:
    """One worker process, seen from the parent."""

    def __init__(self, setup: bytes) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # a buffered reader would take bytes that poll() then waits for
            env=environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout
        for pipe in (self._to, self._from):
            os.set_blocking(pipe.fileno(), False)
        ready, reply = self._ask(setup, START_TIMEOUT_S)
        if not ready:
            self.kill()
            raise RewardFailedError(f"the reward could not be built: {reply}")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def score(self, index: int, arguments: Any, timeout_s: float) -> float:
        ok, reply = self._ask(pickle.dumps((index, arguments, timeout_s)), timeout_s)
        if not ok:
            raise RewardFailedError(str(reply))
        return float(reply)

    def kill(self) -> None:
        # The whole session: a reward may have started processes of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    def _ask(self, data: bytes, timeout_s: float) -> tuple[bool, Any]:
        """Send one frame and wait for the answer, both within the deadline."""
        deadline = _Deadline(timeout_s)
        view = memoryview(LENGTH.pack(len(data)) + data)
        try:
            while view:
                deadline.wait(self._to, select.POLLOUT)
                view = view[self._to.write(view) or 0 :]
        except OSError as error:
            raise RewardFailedError(f"the reward process is gone: {error}") from error
        (length,) = LENGTH.unpack(self._read(LENGTH.size, deadline))
        result: tuple[bool, Any] = pickle.loads(self._read(length, deadline))
        return result

    def _read(self, count: int, deadline: _Deadline) -> bytes:
        data = bytearray()
        while len(data) < count:
            deadline.wait(self._from, select.POLLIN | select.POLLHUP)
            chunk = self._from.read(count - len(data))
            if chunk == b"":
                self._process.wait(timeout=10)
                raise RewardFailedError(f"the reward process died with status {self._process.returncode}")
            data += chunk or b""
        return bytes(data)


# --- in the child ------------------------------------------------------------------------------------------


def child_main() -> None:
    """Serve scores until stdin ends."""
    source = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    path, parts, memory_bytes = pickle.loads(_read_frame(source))
    sys.path[:] = path
    from rill.envs.places import described
    from rill.envs.rewards.base import as_score

    try:
        rewards = [_build(name, config) for name, config in pickle.loads(parts)]
    except Exception as error:  # noqa: BLE001  boundary: whatever the reward raises is reported to the parent
        _write_frame(answers, (False, described(error)))
        return
    if memory_bytes:
        limit = _address_space() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _write_frame(answers, (True, None))
    while (frame := _read_frame(source)) != b"":
        index, arguments, timeout_s = pickle.loads(frame)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + ALARM_GRACE_S)  # default action: end the process
        try:
            answer: tuple[bool, Any] = (True, as_score(rewards[index].score(*arguments)))
        except Exception as error:  # noqa: BLE001  boundary: see above
            answer = (False, described(error))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_frame(answers, answer)


def _address_space() -> int:
    """Bytes mapped so far: the libraries that rewards import can map many gigabytes without using them."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _build(name: str, config: Any) -> Any:
    from rill.envs.rewards.base import REWARDS

    registry: Registry = REWARDS
    return registry.load(name)(config)


def _read_frame(source: IO[bytes]) -> bytes:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _write_frame(sink: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    sink.write(LENGTH.pack(len(data)) + data)
    sink.flush()
