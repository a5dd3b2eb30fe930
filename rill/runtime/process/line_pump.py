"""Who reads the answers of a process's calls: the thread that waits for one, as long as there is one.

    thread in Handle.wait ─┬─ leads:   epoll ─▶ reads lines ─▶ fills handles, its own and others'
                           └─ follows: sleeps until its handle is settled, or the leader leaves and names it
    pump thread            dozes while anybody leads; leads itself when calls are out and nobody waits for them

So an answer costs one wake-up, of the thread that wants it, and calls nobody waits for are read all the same (their
processes must not stand still because our end of the line is full). The pump thread also sends what a line could not
take at once. It looks DOZE_S after a call, then less and less often, and sleeps after IDLE_S without any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from rill.runtime.process.line import Line
from rill.runtime.process.mailbox import Frames

DOZE_S = 0.02
IDLE_S = 0.1
_LEAD_S = 1.0

_log = logging.getLogger(__name__)


class Waiter:
    """A thread that waits for something to be settled. `wake` may come from any thread."""

    __slots__ = ("_gate", "ident")

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self._gate = threading.Lock()
        self._gate.acquire()

    def sleep(self, timeout_s: float) -> None:
        self._gate.acquire(timeout=max(0.0, timeout_s))

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken already
            self._gate.release()


class LinePump:
    """The lines of one process's calls. Thread-safe."""

    def __init__(self, handler: Callable[[Frames], None], is_needed: Callable[[], bool]) -> None:
        """`handler` gets every message; `is_needed()`: whether any answer is still to come."""
        self._handler = handler
        self._is_needed = is_needed
        self._lines: dict[int, Line] = {}
        self._stuck: dict[int, Line] = {}
        self._epoll = select.epoll()
        self._kick = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._kick, select.EPOLLIN)
        self._lead = threading.Lock()
        self._leader: Waiter | None = None
        self._followers: deque[Waiter] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_asleep = False
        self._wake_up = threading.Event()
        self._last_call_s = 0.0
        self._is_closed = False

    def add(self, line: Line) -> None:
        """Read `line` from now on."""
        with self._lock:
            self._lines[line.fileno()] = line
            self._epoll.register(line.fileno(), select.EPOLLIN)

    def drop(self, line: Line) -> None:
        """Close a line: its process is gone."""
        with self._lock:
            for table in (self._lines, self._stuck):
                for fd in [fd for fd, other in table.items() if other is line]:
                    del table[fd]
                    with contextlib.suppress(OSError, ValueError):
                        self._epoll.unregister(fd)
        line.close()

    def flush_later(self, line: Line) -> None:
        """`line` has more to send than its socket takes: send it when there is room. Lines that others read, too."""
        with self._lock:
            fd = line.fileno()
            self._stuck[fd] = line
            if fd in self._lines:
                self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)
            else:
                self._epoll.register(fd, select.EPOLLOUT)
        self.called()

    def called(self) -> None:
        """A call was made: see that somebody reads its answer."""
        self._last_call_s = time.monotonic()
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_closed:
                    self._thread = threading.Thread(target=self._run, name="rill-calls", daemon=True)
                    self._thread.start()
        elif self._is_asleep:
            self._wake_up.set()

    def wait(self, waiters: list[Waiter], is_settled: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `is_settled()`; false past the deadline. Whoever settles it calls `wake(waiters)` afterwards."""
        deadline_s = time.monotonic() + timeout_s
        waiter = Waiter()
        waiters.append(waiter)
        try:
            while not is_settled():
                if time.monotonic() >= deadline_s:
                    self.poll()  # it may lie in a socket
                    return is_settled()
                if not self._try_lead(waiter, is_settled, deadline_s):
                    self._follow(waiter, is_settled, deadline_s)
            return True
        finally:
            waiters.remove(waiter)

    def poll(self) -> None:
        """Read what is there, unless somebody else is reading."""
        if self._lead.acquire(blocking=False):
            try:
                self._read(0.0)
            finally:
                self._step_down()

    def wake(self, waiters: list[Waiter]) -> None:
        """What these wait for is settled."""
        me = threading.get_ident()
        for waiter in list(waiters):
            if waiter.ident == me:
                continue  # it reads the lines itself, and looks before it reads again
            waiter.wake()
            if waiter is self._leader:
                self._interrupt()

    def close(self) -> None:
        """Close the lines. Answers that have not come will not."""
        self._is_closed = True
        self._wake_up.set()
        self._interrupt()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)
        for line in list(self._lines.values()):
            self.drop(line)

    # --- leading ------------------------------------------------------------------------------------------

    def _try_lead(self, waiter: Waiter, is_settled: Callable[[], bool], deadline_s: float) -> bool:
        if not self._lead.acquire(blocking=False):
            return False
        try:
            self._leader = waiter
            while not is_settled():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._read(left_s)
        finally:
            self._leader = None
            self._step_down()
        return True

    def _follow(self, waiter: Waiter, is_settled: Callable[[], bool], deadline_s: float) -> None:
        self._followers.append(waiter)
        try:
            # In the line first, then another try: a leader that leaves in between sees one or the other.
            if not self._try_lead(waiter, is_settled, deadline_s):
                waiter.sleep(deadline_s - time.monotonic())
        finally:
            with contextlib.suppress(ValueError):
                self._followers.remove(waiter)

    def _step_down(self) -> None:
        self._lead.release()
        try:
            self._followers[0].wake()
        except IndexError:
            if self._is_asleep and self._is_needed():
                self._wake_up.set()

    def _read(self, timeout_s: float) -> None:
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._kick:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._kick)
                continue
            if events & select.EPOLLOUT:
                self._flush(fd)
            line = self._lines.get(fd)
            if line is not None and events & ~select.EPOLLOUT:
                try:
                    messages = line.read()
                except EOFError:
                    self.drop(line)
                    continue
                for frames in messages:
                    self._guarded(frames)

    def _guarded(self, frames: Frames) -> None:
        try:
            self._handler(frames)
        except Exception:  # noqa: BLE001  the thread that reads serves everybody: one bad message must not end its wait
            _log.exception("an answer could not be read")

    def _flush(self, fd: int) -> None:
        line = self._stuck.get(fd)
        if line is None or not line.flush():
            return
        with self._lock, contextlib.suppress(OSError, ValueError):
            if not line.is_stuck:  # a sender that got stuck meanwhile waits for this lock to say so
                self._stuck.pop(fd, None)
                if fd in self._lines:
                    self._epoll.modify(fd, select.EPOLLIN)
                else:
                    self._epoll.unregister(fd)

    def _interrupt(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._kick, 1)

    # --- the pump thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            quiet_s = time.monotonic() - self._last_call_s
            if self._must_lead():
                self._lead_for_nobody()
            elif quiet_s > IDLE_S:
                self._sleep()
            else:
                time.sleep(max(DOZE_S, quiet_s))

    def _must_lead(self) -> bool:
        return self._leader is None and (bool(self._stuck) or self._is_needed())

    def _lead_for_nobody(self) -> None:
        if not self._lead.acquire(blocking=False):
            time.sleep(DOZE_S)
            return
        try:
            while self._must_lead() and not self._followers and not self._is_closed:
                self._read(_LEAD_S)
        finally:
            self._step_down()
        time.sleep(DOZE_S)

    def _sleep(self) -> None:
        self._is_asleep = True
        self._wake_up.clear()
        if not (self._must_lead() or self._is_closed or time.monotonic() - self._last_call_s <= IDLE_S):
            self._wake_up.wait(1.0)
        self._is_asleep = False
