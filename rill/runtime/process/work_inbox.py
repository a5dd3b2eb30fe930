"""Where a process's ordered calls arrive: lines from callers on its node, encrypted TCP from others.

A process's main thread reads it by itself, so a call runs without a hop between threads. Messages of one caller arrive
in order.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from rill.runtime.process.line import Line
from rill.runtime.process.line_pump import LinePump
from rill.runtime.process.mailbox import Frames, bind_tcp, receive
from rill.runtime.process.session_key import SessionKey

_BACKLOG = 4096


class WorkInbox:
    """Bound at once; a caller's messages wait until they are read."""

    def __init__(
        self,
        path: str,
        pump: LinePump,
        *,
        context: zmq.Context[Any],
        tcp_host: str | None,
        key: SessionKey | None,
    ) -> None:
        """Listen at `path`, and at a free port of `tcp_host` where other nodes call this process. `pump` sends the
        answers that a line could not take at once."""
        self.path = path
        self.tcp_endpoint = ""
        self._pump = pump
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._lines: dict[int, Line] = {}
        self._arrived: deque[tuple[Frames, Line | None]] = deque()
        self._far: zmq.Socket[bytes] | None = None
        if tcp_host is not None:
            self._far = context.socket(zmq.PULL)
            self._far.setsockopt(zmq.RCVHWM, 0)
            self.tcp_endpoint = bind_tcp(self._far, tcp_host, key)
            self._epoll.register(self._far.fileno(), select.EPOLLIN)

    def next(self) -> tuple[Frames, Line | None]:
        """The next message, and the line to answer on where it came by one. Waits: a worker without calls is idle."""
        while not self._arrived:
            self._read_far()  # its descriptor tells of changes, not of what is left
            for fd, _ in self._epoll.poll() if not self._arrived else ():
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._lines:
                    self._read(self._lines[fd])
        return self._arrived.popleft()

    def close(self) -> None:
        """Stop listening. What was answered is on its way."""
        self._epoll.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        for line in self._lines.values():
            line.close()
        if self._far is not None:
            self._far.close(linger=0)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                line = Line(sock, self._pump.flush_later)
                self._lines[sock.fileno()] = line
                self._epoll.register(sock, select.EPOLLIN)

    def _read(self, line: Line) -> None:
        try:
            self._arrived.extend((frames, line) for frames in line.read())
        except EOFError:  # the caller is gone
            del self._lines[line.fileno()]
            self._epoll.unregister(line.fileno())
            self._pump.drop(line)  # with the answers that it did not take

    def _read_far(self) -> None:
        if self._far is not None:
            with contextlib.suppress(zmq.Again):
                while True:
                    self._arrived.append((receive(self._far, zmq.NOBLOCK), None))


def connect(path: str, on_stuck: Callable[[Line], None]) -> Line | None:
    """A line to the process that listens at `path`; None where it is gone."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return Line(sock, on_stuck)
