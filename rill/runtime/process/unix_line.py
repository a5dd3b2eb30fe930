"""Messages to processes of the same node: Unix stream sockets, a connection each way, made by the sender.

    a thread ──UnixLine.send()──▶ socket ──────────────────────────▶ UnixSockets.serve() ──▶ take(message)
                    └─ what the socket does not take: backlog ─▶ UnixSockets.serve(), once it can be written

On the wire a message is its length and its bytes. No sender waits: for a process that does not read the backlog grows.
Where a connection breaks, or nobody listens, what was under way is lost, and the next message makes a new connection;
peer.py asks for what was lost and sends it again.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from socket import AF_UNIX, MSG_NOSIGNAL, SHUT_RDWR, SOCK_NONBLOCK, SOCK_STREAM, socket

_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 1 << 40
"""What claims to be longer is no message."""
_CHUNK_BYTES = 1 << 16
_MAX_WRITES = 64
"""To one process in one turn: the others wait."""

_log = logging.getLogger(__name__)


class UnixSockets:
    """All Unix sockets of a mailbox. One thread serves them; to lines any thread may write."""

    def __init__(self, path: str, take: Callable[[bytearray], None]) -> None:
        self._path, self._take = path, take
        self._epoll = select.epoll()
        self._on_ready: dict[int, Callable[[], None]] = {}
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._incoming: set[socket] = set()
        self._listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK)
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
        """End the serving thread's turn; nobody can connect any more."""
        self._listener.shutdown(SHUT_RDWR)

    def drain(self, timeout_s: float) -> None:
        """Hear nobody any more, and write what waits, for so long at most. The serving thread has ended."""
        for one in (self._listener, *self._incoming):
            self._hang_up(one)
        with contextlib.suppress(FileNotFoundError):  # its folder was removed
            os.unlink(self._path)
        deadline_s = time.monotonic() + timeout_s
        while self._on_ready and (left_s := deadline_s - time.monotonic()) > 0:
            self.serve(left_s)

    def close(self) -> None:
        """After the lines."""
        self._epoll.close()

    def watch(self, fd: int, on_ready: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Have the serving thread call `on_ready` when there is something to do, now and then also when not."""
        if fd not in self._on_ready:
            self._on_ready[fd] = on_ready
            self._epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Before it is closed: a forked process may hold it open."""
        if self._on_ready.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _accept(self) -> None:
        try:
            while True:
                one, _ = self._listener.accept()
                one.setblocking(False)
                self._incoming.add(one)
                self.watch(one.fileno(), functools.partial(self._read, one, bytearray()))
        except BlockingIOError:
            return  # no more of them
        except OSError as error:
            # It is closed; or no descriptor is left, and the one who waits is asked for again and again.
            time.sleep(0.05 if error.errno in (errno.EMFILE, errno.ENFILE) else 0.0)

    def _read(self, one: socket, pending: bytearray) -> None:
        """`pending`: the beginning of a message that has not arrived in full."""
        try:
            num_bytes = one.recv_into(self._chunk)
        except BlockingIOError:
            return
        except OSError:
            num_bytes = 0
        pending += self._chunk[:num_bytes]
        at = 0
        while len(pending) >= (begin := at + _LENGTH.size):
            (length,) = _LENGTH.unpack_from(pending, at)
            if length > _MAX_BYTES:
                _log.warning("a connection was closed: it brought bytes that are no message")
                num_bytes = 0
            if len(pending) < begin + length:
                break
            at = begin + length
            self._take(pending[begin:at])
        del pending[:at]
        if not num_bytes:
            self._hang_up(one)

    def _hang_up(self, one: socket) -> None:
        self._incoming.discard(one)
        self.unwatch(one.fileno())
        one.close()


class UnixLine:
    """The sending end. One thread sends at a time; the lock is between it and the one that serves."""

    def __init__(self, owner: UnixSockets, path: str) -> None:
        self._owner, self._path = owner, path
        self._lock = threading.RLock()
        self._socket: socket | None = None
        self._backlog: deque[memoryview] = deque()

    def send(self, data: bytes) -> None:
        data = _LENGTH.pack(len(data)) + data
        with self._lock:
            if not self._backlog and self._socket is not None:  # mostly the socket takes all of it
                with contextlib.suppress(OSError):
                    data = data[self._socket.send(data, MSG_NOSIGNAL) :]
            if data:
                self._backlog.append(memoryview(data))
                if len(self._backlog) == 1:
                    self._write()

    def close(self, _linger_ms: int = 0) -> None:
        """What is not written is lost: UnixSockets.drain() comes before. Who sends again connects anew."""
        with self._lock:
            self._backlog.clear()
            if self._socket is not None:
                self._owner.unwatch(self._socket.fileno())
                self._socket.close()
                self._socket = None

    def _write(self) -> None:
        backlog = self._backlog
        with self._lock:
            try:
                for _ in range(min(len(backlog), _MAX_WRITES)):
                    num_bytes = (self._socket or self._connect()).send(backlog[0], MSG_NOSIGNAL)
                    backlog[0] = backlog[0][num_bytes:]
                    if backlog[0]:
                        break
                    backlog.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self.close()
            if self._socket is None:
                return
            if backlog:
                self._owner.watch(self._socket.fileno(), self._write, select.EPOLLOUT)
            else:
                self._owner.unwatch(self._socket.fileno())

    def _connect(self) -> socket:
        self._socket = made = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK)
        if error := made.connect_ex(self._path):  # also: too many wait to be accepted
            raise ConnectionError(error)
        return made
