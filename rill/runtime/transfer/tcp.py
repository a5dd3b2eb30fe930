"""Bytes over TCP: a server of named bytes, and the client that fetches them in chunks.

    client ──[request, MAC]──▶ server          request: name, offset, bytes wanted, bytes to be signed, a fresh nonce
           ◀─[status, MAC, size, chunk]──      a few requests ahead of the answers, whatever the size of the whole

Only requests with the key's MAC are answered, and an answer's MAC covers the request, the status, the size and the
signed part of the chunk: what is unpickled or trusted is signed; nothing is encrypted. Serves payloads
(store_server.py) and weights (rill.weights.tcp). Reading is repeatable: a client that hears nothing asks where the
server is now, connects anew and goes on where it was, until its deadline.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq

from rill.errors import PeerDiedError, RillError, RunError, StuckError
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer.memory_copy import digest

CHUNK_BYTES = 4 * 1024 * 1024
_AHEAD = 3
_MAX_REQUEST_BYTES = 64 * 1024
_MAX_DIGESTS = 100_000
_POLL_S = 1.0
_PATIENCE_S = 8.0
"""After so long without a word the same server is asked again; each time twice as long."""
_SIZE = struct.Struct("<Q")
_FOUND, _MISSING = b"1", b"0"

Read: TypeAlias = Callable[[str, int, int], tuple[Any, int]]
"""(name, offset, bytes wanted) -> (those bytes, or fewer at the end; the size of the whole). RillError: not there."""


class Request(NamedTuple):
    name: str
    offset: int
    num_bytes: int
    signed_bytes: int
    nonce: bytes


class ByteServer:
    """Serves what `read` gives, on one address, in a thread of its own."""

    def __init__(
        self, host: str, key: SessionKey, read: Read, *, port: int = 0, is_fixed: bool = False
    ) -> None:
        """Port 0: a free one. OSError where the address cannot be had. `is_fixed`: what a name stands for never
        changes, so that it is hashed once, however many fetch it."""
        self._key = key
        self._read = read
        self._is_fixed = is_fixed
        self._digests: dict[Request, bytes] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 2 * _AHEAD)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(error.errno, str(error)) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = f"tcp://{host}:{bound.rpartition(':')[2]}"
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rill-byte-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(Request)
        while not self._is_closing.is_set():
            if not self._socket.poll(100):
                continue
            reader, *frames = self._socket.recv_multipart()
            if len(frames) != 2 or not self._key.is_mac(frames[1], frames[0]):
                continue  # a stranger: no answer
            self._answer(reader, frames[0], decoder.decode(frames[0]))
        self._socket.close()
        self._context.term()

    def _answer(self, reader: bytes, raw: bytes, request: Request) -> None:
        try:
            chunk, size = self._read(request.name, request.offset, min(request.num_bytes, CHUNK_BYTES))
            status, signed = _FOUND, self._digest_of(request, chunk)
        except RillError as error:
            chunk, size, status = memoryview(str(error).encode()), 0, _MISSING
            signed = digest(chunk)
        packed = _SIZE.pack(size)
        code = self._key.mac(raw, status, packed, signed)
        self._socket.send_multipart([reader, status, code, packed, chunk], copy=len(chunk) < 65536)

    def _digest_of(self, request: Request, chunk: Any) -> bytes:
        place = request._replace(nonce=b"")
        known = self._digests.get(place)
        if known is None:
            known = digest(memoryview(chunk)[: request.signed_bytes])
            if self._is_fixed:
                if len(self._digests) >= _MAX_DIGESTS:
                    self._digests.clear()
                self._digests[place] = known
        return known


class ByteClient:
    """Fetches from one server, wherever it is at the moment. Thread-safe: each thread has a connection of its own."""

    def __init__(self, key: SessionKey, find: Callable[[float], str], what: str, *, timeout_s: float) -> None:
        """`find(timeout_s)` gives the server's endpoint; `what` names the server; `timeout_s`: without any progress."""
        self._key = key
        self._find = find
        self._what = what
        self._timeout_s = timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._local = threading.local()

    def fetch(
        self, name: str, offset: int = 0, num_bytes: int | None = None, signed_bytes: int | None = None
    ) -> bytearray:
        """`num_bytes` from `offset` (None: all there are), of which the first `signed_bytes` (None: all) are signed."""
        try:
            return _Fetch(self, name, offset, num_bytes, signed_bytes).run()
        except BaseException:
            self.close()  # answers may still come on this connection, and must not meet the next request
            raise

    def _connection(self, timeout_s: float) -> tuple[zmq.Socket[bytes], str]:
        known: tuple[zmq.Socket[bytes], str] | None = self._local.__dict__.get("connection")
        if known is None:
            endpoint = self._find(timeout_s)
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            known = self._local.connection = (socket, endpoint)
        return known

    def close(self) -> None:
        """The calling thread's connection; those of other threads go with them."""
        known = self._local.__dict__.pop("connection", None)
        if known is not None:
            known[0].close()


class _Fetch:
    def __init__(
        self, client: ByteClient, name: str, offset: int, num_bytes: int | None, signed_bytes: int | None
    ) -> None:
        self._client = client
        self._name = name
        self._offset = offset
        self._total = num_bytes
        self._signed_bytes = signed_bytes
        self._data = bytearray(num_bytes or 0)
        self._done = 0
        self._next = 0
        self._asked: deque[bytes] = deque()
        self._heard_s = time.monotonic()
        self._patience_s = _PATIENCE_S
        self._asked_s = self._heard_s

    def run(self) -> bytearray:
        while self._total is None or self._done < self._total:
            socket, _ = self._client._connection(self._client._timeout_s)
            self._ask(socket)
            if socket.poll(int(1000 * _POLL_S)):
                self._take(socket.recv_multipart(copy=False))
            else:
                self._be_patient()
        return self._data

    def _ask(self, socket: zmq.Socket[bytes]) -> None:
        """Until the size is known one chunk at a time."""
        while len(self._asked) < (_AHEAD if self._total is not None else 1):
            num_bytes = CHUNK_BYTES if self._total is None else min(CHUNK_BYTES, self._total - self._next)
            if num_bytes == 0:
                return
            signed = num_bytes
            if self._signed_bytes is not None:
                signed = max(0, min(self._signed_bytes - self._next, num_bytes))
            place, nonce = self._offset + self._next, secrets.token_bytes(16)
            raw = self._client._encoder.encode(Request(self._name, place, num_bytes, signed, nonce))
            socket.send_multipart([raw, self._client._key.mac(raw)])
            self._asked.append(raw)
            self._next += num_bytes
            self._asked_s = time.monotonic()

    def _take(self, frames: list[Any]) -> None:
        status, code, packed, chunk = frames if len(frames) == 4 else 4 * [zmq.Frame()]
        raw = self._asked.popleft()
        signed_bytes = len(chunk.buffer)
        if status.bytes == _FOUND and self._signed_bytes is not None:
            signed_bytes = max(0, self._signed_bytes - self._done)
        signed = digest(chunk.buffer[:signed_bytes])
        if not self._client._key.is_mac(code.bytes, raw, status.bytes, packed.bytes, signed):
            raise RunError(
                f"what came for {self._name} was not sent by {self._client._what} as it is: something on the network "
                "between the nodes changed it or answered in its place"
            )
        if status.bytes != _FOUND:
            raise PeerDiedError(f"{self._client._what}: {chunk.bytes.decode()}")
        if self._total is None:
            (size,) = _SIZE.unpack(packed.bytes)
            self._total = size - self._offset
            self._data = bytearray(self._total)
            self._next = len(chunk.buffer)
        self._data[self._done : self._done + len(chunk.buffer)] = chunk.buffer
        self._done += len(chunk.buffer)
        self._heard_s = time.monotonic()
        self._patience_s = _PATIENCE_S

    def _be_patient(self) -> None:
        """Nothing came for a moment: has the server moved, was something lost, is it time to give up?"""
        now_s, client = time.monotonic(), self._client
        if now_s - self._heard_s > client._timeout_s:
            raise StuckError(
                f"{client._what} sent no part of {self._name} within {client._timeout_s:g} s: is it gone, "
                "or is the network between the nodes cut?"
            )
        _, endpoint = client._connection(client._timeout_s)
        is_moved = False
        with contextlib.suppress(StuckError):
            is_moved = client._find(_POLL_S) != endpoint
        if is_moved or now_s - self._asked_s > self._patience_s:
            self._patience_s *= 1 if is_moved else 2
            client.close()
            self._asked.clear()
            self._next = self._done
