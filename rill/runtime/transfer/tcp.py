"""Bytes over TCP: a server of named bytes, and the client that fetches them in chunks.

    client ──[request, MAC]──▶ server          request: name, offset, bytes wanted, bytes to be signed, a fresh nonce
           ◀─[status, MAC, size, chunk]──      a few at a time, whatever the size of the whole

Only requests with the key's MAC are answered, and an answer's MAC covers the request, the status, the size and the
signed part of the chunk: what is unpickled or trusted is signed; nothing is encrypted. Serves payloads
(store.py) and weights (rill.weights.tcp). Reading is repeatable: a client that hears nothing asks where the
server is now, connects anew and goes on where it was, until its deadline.
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import msgspec
import zmq

from rill.errors import PeerDiedError, RillError, RunError, StuckError
from rill.runtime.process.session_key import SessionKey
from rill.runtime.process.waits import left_s
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
"""(name, offset, bytes wanted) -> (those bytes, or fewer at the end; the size of the whole). An error: not there."""


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
        except (RillError, OSError) as error:  # a file that is removed this moment must not end the server
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
        """`find(timeout_s)` gives the server's endpoint; `what` names the server; `timeout_s`: for a chunk."""
        self._key = key
        self._find = find
        self._what = what
        self._timeout_s = timeout_s
        self._encoder = msgspec.msgpack.Encoder()
        self._local = threading.local()
        self._ahead = ThreadPoolExecutor(_AHEAD, "rill-fetch")

    def fetch(
        self, name: str, offset: int = 0, num_bytes: int | None = None, signed_bytes: int | None = None
    ) -> bytearray:
        """`num_bytes` from `offset` (None: all there are), of which the first `signed_bytes` (None: all) are signed.
        Several chunks at a time, once the size is known."""

        def ask(start: int, wanted: int) -> tuple[memoryview, int]:
            signed = wanted if signed_bytes is None else max(0, min(signed_bytes - start, wanted))
            return self._chunk(Request(name, offset + start, wanted, signed, secrets.token_bytes(16)))

        def fill(start: int) -> None:
            chunk, _ = ask(start, min(CHUNK_BYTES, len(data) - start))
            data[start : start + len(chunk)] = chunk

        first = memoryview(b"")
        if num_bytes is None:
            first, size = ask(0, CHUNK_BYTES)
            num_bytes = size - offset
        data = bytearray(num_bytes)
        data[: len(first)] = first
        starts = range(len(first), num_bytes, CHUNK_BYTES)
        each = self._ahead.map if len(starts) > 1 else map
        for _ in each(fill, starts):
            pass
        return data

    def _chunk(self, request: Request) -> tuple[memoryview, int]:
        """The bytes, and the size of the whole. Asked again where the server has moved, or is silent for long."""
        raw = self._encoder.encode(request)
        deadline_s = time.monotonic() + self._timeout_s
        patience_s = _PATIENCE_S
        try:
            while (left := left_s(deadline_s)) > 0:
                socket, endpoint = self._connection(left)
                with contextlib.suppress(zmq.Again):  # given up: something else answered there
                    socket.send_multipart([raw, self._key.mac(raw)], zmq.NOBLOCK)
                again_s = min(deadline_s, time.monotonic() + patience_s)
                while (left := left_s(again_s)) > 0:
                    if socket.poll(1 + int(1000 * min(left, _POLL_S))):
                        return self._opened(request, raw, socket.recv_multipart(copy=False))
                    with contextlib.suppress(StuckError):
                        if self._find(_POLL_S) != endpoint:
                            break
                else:
                    patience_s *= 2
                self._disconnect()
        except BaseException:
            self._disconnect()  # an answer may still come on this connection, and must not meet the next request
            raise
        raise StuckError(
            f"{self._what} sent no part of {request.name} within {self._timeout_s:g} s: is it gone, or is the network "
            "between the nodes cut?"
        )

    def _opened(self, request: Request, raw: bytes, frames: list[Any]) -> tuple[memoryview, int]:
        status, code, packed, chunk = frames if len(frames) == 4 else 4 * [zmq.Frame()]
        is_found = status.bytes == _FOUND
        signed = digest(chunk.buffer[: request.signed_bytes] if is_found else chunk.buffer)
        if not self._key.is_mac(code.bytes, raw, status.bytes, packed.bytes, signed):
            raise RunError(
                f"what came for {request.name} was not sent by {self._what} as it is: something on the network "
                "between the nodes changed it or answered in its place"
            )
        if not is_found:
            raise PeerDiedError(f"{self._what}: {chunk.bytes.decode()}")
        return chunk.buffer, _SIZE.unpack(packed.bytes)[0]

    def _connection(self, timeout_s: float) -> tuple[zmq.Socket[bytes], str]:
        known: tuple[zmq.Socket[bytes], str] | None = self._local.__dict__.get("connection")
        if known is None:
            endpoint = self._find(timeout_s)
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            known = self._local.connection = (socket, endpoint)
        return known

    def _disconnect(self) -> None:
        known = self._local.__dict__.pop("connection", None)
        if known is not None:
            known[0].close()

    def close(self) -> None:
        """Connections of other threads go with them."""
        self._disconnect()
        self._ahead.shutdown(wait=False)
