"""What a driver and the agent of a node say to each other, over a socketpair: requests one way, events the other."""

from __future__ import annotations

import pickle
import signal
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Request: start a process and call it `key`."""

    key: str
    entry: str
    """"module:function", called with `payload`."""
    payload: bytes
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: str
    restart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Request: kill the process group of `key`."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Request: end everything, remove the session's folders, exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """Event: the process ended."""

    key: str
    pid: int
    exit_code: int
    """Negative: killed by that signal."""
    log_tail: str
    is_restarted: bool
    """Whether another was started in its place at once, as `Start.restart` asks."""

    def how(self) -> str:
        """In words, with the end of what it printed."""
        code = self.exit_code
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}\n--- end of its log ---\n{self.log_tail}" if self.log_tail else how


Request = Start | Kill | Shutdown


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an agent needs to know from its start."""

    session_dir: str
    shm_dir: str
    sys_path: list[str]
    preload: tuple[str, ...] = ()


def send_message(sock: socket.socket, message: object) -> None:
    """One length-prefixed pickle. Both ends are ours and on one machine."""
    data = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(sock: socket.socket) -> object:
    """The next message; EOFError when the other end is closed."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return pickle.loads(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            part = sock.recv(num_bytes - len(data))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError("the other end is closed")
        data += part
    return bytes(data)
