"""A line between two processes of a node: whole messages over a Unix stream socket, with no thread in between.

Calls and their answers take lines, because every hop between threads on the way costs more than the call: what a caller
writes wakes the called process's main thread, and its answer wakes the thread that waits for it (`line_pump.py`).

A message is its length, the number and sizes of its frames, and the frames. `send` never blocks: what the socket does
not take is kept here and goes out when there is room. Whoever reads a line reads it alone.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rill.runtime.process.mailbox import Frames

_LENGTH = struct.Struct("<QI")  # bytes after this, number of frames
_READ_BYTES = 64 * 1024
_JOINED_BYTES = 64 * 1024
"""Messages up to this size are copied into one piece: one system call, no vector."""


class Line:
    """One end. Any thread may send; one at a time may read."""

    def __init__(self, sock: socket.socket, on_stuck: Callable[[Line], None]) -> None:
        """`on_stuck(self)` is called when a message did not fit into the socket: `flush` is due when it does."""
        sock.setblocking(False)
        self._sock = sock
        self._on_stuck = on_stuck
        self._lock = threading.Lock()
        self._out: deque[memoryview] = deque()
        self._rest = b""
        self._body = bytearray()
        """A message that is longer than a read, as far as it has come."""
        self._num_filled = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_stuck(self) -> bool:
        """Whether something waits for room in the socket."""
        return bool(self._out)

    def send(self, frames: Sequence[Any]) -> None:
        """Send or keep a message. To a process that is gone it does nothing: its death is reported elsewhere."""
        sizes = [len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames]
        num_bytes = sum(sizes)
        head = _LENGTH.pack(num_bytes + 8 * len(sizes), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        num_bytes += len(head)
        with self._lock:
            if self._out:
                self._out.append(memoryview(b"".join((head, *frames))))
                return
            is_joined = num_bytes <= _JOINED_BYTES
            try:
                if is_joined:
                    num_sent = self._sock.send(b"".join((head, *frames)))
                else:
                    num_sent = self._sock.sendmsg([head, *frames][:512])
            except BlockingIOError:
                num_sent = 0
            except OSError:  # closed at either end
                return
            if num_sent < num_bytes:
                self._out.append(memoryview(b"".join((head, *frames)))[num_sent:])
                self._on_stuck(self)

    def flush(self) -> bool:
        """Send what is kept; whether nothing is left."""
        with self._lock:
            try:
                while self._out:
                    num_sent = self._sock.send(self._out[0])
                    if num_sent < len(self._out[0]):
                        self._out[0] = self._out[0][num_sent:]
                    else:
                        self._out.popleft()
            except BlockingIOError:
                return False
            except OSError:
                self._out.clear()
            return True

    def read(self) -> list[Frames]:
        """The messages that have come whole since the last time. EOFError: the other end is closed."""
        try:
            if self._body:
                num_read = self._sock.recv_into(memoryview(self._body)[self._num_filled :])
                if num_read == 0:
                    raise EOFError
                self._num_filled += num_read
                if self._num_filled < len(self._body):
                    return []
                body, self._body = self._body, bytearray()
                return [_cut_view(memoryview(body))]
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        return self._cut(self._rest + data if self._rest else data)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._out.clear()
            self._sock.close()

    def _cut(self, data: bytes) -> list[Frames]:
        messages: list[Frames] = []
        start = 0
        while len(data) - start >= _LENGTH.size:
            num_bytes, num_frames = _LENGTH.unpack_from(data, start)
            end = start + _LENGTH.size + num_bytes
            if end > len(data):
                if num_bytes > _READ_BYTES:
                    self._body = bytearray(_LENGTH.size + num_bytes)
                    self._num_filled = len(data) - start
                    self._body[: self._num_filled] = data[start:]
                    start = len(data)
                break
            place = start + _LENGTH.size
            sizes = struct.unpack_from(f"<{num_frames}Q", data, place)
            place += 8 * num_frames
            frames: Frames = []
            for size in sizes:
                frames.append(data[place : place + size])
                place += size
            messages.append(frames)
            start = end
        self._rest = data[start:]
        return messages


def _cut_view(body: memoryview) -> Frames:
    """A large message's frames are writable views of the memory it was read into; small ones are bytes."""
    _, num_frames = _LENGTH.unpack_from(body)
    sizes = struct.unpack_from(f"<{num_frames}Q", body, _LENGTH.size)
    place = _LENGTH.size + 8 * num_frames
    frames: Frames = []
    for size in sizes:
        frame = body[place : place + size]
        frames.append(frame if size >= _READ_BYTES else bytes(frame))
        place += size
    return frames
