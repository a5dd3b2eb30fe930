"""Messages to processes of the same node: Unix stream sockets, a connection each way, made by the sender.

    any thread ──UnixLine.send()──▶ socket ──────────────────────────▶ UnixSockets.serve() ──▶ take(message)
                     └─ what the socket does not take: backlog ─▶ UnixSockets.serve(), once it can be written

On the wire a message is its length and its bytes. No sender waits: for a process that does not read the backlog grows.
Where a connection breaks, or nobody listens, what was under way is lost, and the next message makes a new connection;
peer.py asks for what was lost and sends it again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

Socket: TypeAlias = sockets.socket

_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 1 << 40
"""What claims to be longer is no message."""
_CHUNK_BYTES = 1 << 18
_MAX_WRITES = 64
"""Of one line in one turn: the others wait."""

_log = logging.getLogger(__name__)


class UnixSockets:
    """All Unix sockets of a mailbox. One thread serves them; lines are written by any."""

    def __init__(self, path: str, take: Callable[[bytearray], None]) -> None:
        self._path, self._take = path, take
        self._epoll = select.epoll()
        self._on_ready: dict[int, Callable[[], None]] = {}
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._incoming: set[Socket] = set()
        self._listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(4096)
        self.watch(self._listener.fileno(), self._accept)

    def serve(self, timeout_s: float) -> None:
        """Wait for something to do, and do it: take what has arrived, write what can be written."""
        for fd, _ in self._epoll.poll(timeout_s):
            on_ready = self._on_ready.get(fd)
            if on_ready is not None:  # not closed meanwhile
                on_ready()

    def wake(self) -> None:
        """End the turn of the serving thread, for good: nobody can connect any more."""
        self._listener.shutdown(sockets.SHUT_RDWR)

    def drain(self, timeout_s: float) -> None:
        """Hear nobody any more, and write what waits for so long at most. The serving thread has ended."""
        for socket in (self._listener, *self._incoming):
            self._hang_up(socket)
        with contextlib.suppress(FileNotFoundError):  # its folder was removed
            os.unlink(self._path)
        deadline_s = time.monotonic() + timeout_s
        while self._on_ready and (left_s := deadline_s - time.monotonic()) > 0:
            self.serve(left_s)

    def close(self) -> None:
        """After all lines."""
        self._epoll.close()

    def watch(self, fd: int, on_ready: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call `on_ready` in the serving thread whenever there is something to do; perhaps also when not."""
        self._on_ready[fd] = on_ready
        self._epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Before it is closed: a forked process may hold it open."""
        if self._on_ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # no more of them
            while True:
                socket, _ = self._listener.accept()
                socket.setblocking(False)
                self._incoming.add(socket)
                self.watch(socket.fileno(), functools.partial(self._read, socket, bytearray()))

    def _read(self, socket: Socket, pending: bytearray) -> None:
        """`pending`: the beginning of a message."""
        try:
            num_bytes = socket.recv_into(self._chunk)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        pending += self._chunk[:num_bytes]
        at = 0
        while len(pending) >= at + _LENGTH.size:
            begin = at + _LENGTH.size
            end = begin + _LENGTH.unpack_from(pending, at)[0]
            if end > begin + _MAX_BYTES:
                _log.warning("a connection was closed that brought bytes which are no message")
                num_bytes = 0
            if end > len(pending):
                break
            self._take(pending[begin:end])
            at = end
        del pending[:at]
        if not num_bytes:
            self._hang_up(socket)

    def _hang_up(self, socket: Socket) -> None:
        self._incoming.discard(socket)
        self.unwatch(socket.fileno())
        socket.close()


class UnixLine:
    """The sending end. Thread-safe."""

    def __init__(self, owner: UnixSockets, path: str) -> None:
        self._owner, self._path = owner, path
        self._lock = threading.Lock()
        self._socket: Socket | None = None
        self._is_watched = False
        self._backlog: deque[memoryview] = deque()
        """What is to be written; the first may have been written in part."""

    def send(self, data: bytes) -> None:
        message = memoryview(_LENGTH.pack(len(data)) + data)
        with self._lock:
            self._backlog.append(message)
            if len(self._backlog) == 1:
                self._write()

    def close(self, linger: int = 0) -> None:  # a ZeroMQ socket's; UnixSockets.drain() does it for all
        with self._lock:
            self._hang_up()

    def _write_more(self) -> None:
        with self._lock:
            if self._backlog:
                self._write()

    def _write(self) -> None:
        backlog = self._backlog
        try:
            socket = self._socket or self._connect()
            for _ in range(min(len(backlog), _MAX_WRITES)):
                num_bytes = socket.send(backlog[0], sockets.MSG_NOSIGNAL)
                if num_bytes < len(backlog[0]):
                    backlog[0] = backlog[0][num_bytes:]
                    break
                backlog.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()
            return
        if bool(backlog) != self._is_watched:
            self._is_watched = bool(backlog)
            if backlog:
                self._owner.watch(socket.fileno(), self._write_more, select.EPOLLOUT)
            else:
                self._owner.unwatch(socket.fileno())

    def _connect(self) -> Socket:
        self._socket = socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        socket.setblocking(False)
        if error := socket.connect_ex(self._path):
            raise ConnectionRefusedError(error, os.strerror(error))  # also where too many wait to be heard
        return socket

    def _hang_up(self) -> None:
        self._backlog.clear()
        self._is_watched = False
        if self._socket is not None:
            self._owner.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None
