"""Payloads between nodes: a server of this node's store over TCP, and the reader that fetches from the others.

One server per node, started by the cluster where there is more than one node; it publishes its address under
"store/<node>". A payload moves in chunks with a few requests ahead, so both ends hold a bounded number of bytes
however large it is and however many readers there are.

Payloads are not encrypted (session_key.py). A request carries a MAC with a fresh nonce, so that only processes of the
session are served; an answer carries a MAC over its part of the payload's header, the only part that is unpickled.
"""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from rill.errors import PeerDiedError, RunError, StuckError
from rill.runtime.transfer.segments import unlink

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext
    from rill.runtime.process.session_key import SessionKey
    from rill.runtime.transfer.ref import Ref

CHUNK_BYTES = 4 * 1024 * 1024
_MAX_REQUEST_BYTES = 64 * 1024
_NONCE_BYTES = 16
_CHUNKS_AHEAD = 3
_FETCH_WAIT_S = 120.0


def key_of(context: RuntimeContext) -> SessionKey:
    """The session's key, which every session of several nodes has."""
    assert context.key is not None, "payloads of other nodes in a session that has one node"
    return context.key


class StoreServer:
    """Serves `context.node_id`'s payloads. Start one per node; `close` ends its thread."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._key = key_of(context)
        self._zmq = zmq.Context()
        self._socket = self._zmq.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 2 * _CHUNKS_AHEAD)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        port = self._socket.bind_to_random_port(f"tcp://{context.host}")
        self.endpoint = f"tcp://{context.host}:{port}"
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="rill-store-server", daemon=True)
        self._thread.start()
        hub = context.hub
        hub.on("store_unlink", lambda order: unlink(context.shm_dir, order))
        hub.call("registry", "register", {"serves_store": True}, 30.0)
        hub.call("registry", "publish", [f"store/{context.node_id}", self.endpoint, True], 30.0)

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder()
        store = self._context.store
        while not self._is_closing:
            if not self._socket.poll(200):
                continue
            reader, *request = self._socket.recv_multipart()
            if len(request) != 2 or not self._key.is_mac(request[1], request[0]):
                continue  # not of this session; it gets no answer
            raw = request[0]
            name, offset, num_bytes, signed_bytes, _nonce = decoder.decode(raw)
            try:
                chunk: Any = store.view(name, offset, num_bytes)
                status = b"1"
            except PeerDiedError as error:
                chunk, status = memoryview(str(error).encode()), b"0"
                signed_bytes = len(chunk)
            code = self._key.mac(raw, status, chunk[:signed_bytes])
            self._socket.send_multipart([reader, status, code, chunk], copy=num_bytes < 65536)
        self._socket.close()
        self._zmq.term()


class RemoteReader:
    """Fetches payloads from other nodes' servers; one connection per server and thread, opened at first use."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._local = threading.local()
        self._encoder = msgspec.msgpack.Encoder()

    def fetch(self, ref: Ref) -> bytearray:
        """The whole payload, laid out as in its slot."""
        node_id, name, offset, header_bytes = ref.node_id, ref.segment, ref.offset, ref.header_bytes
        total = ref.num_bytes
        key = key_of(self._context)
        socket = self._socket_to(node_id)
        data = bytearray(total)
        view = memoryview(data)
        starts = list(range(0, total, CHUNK_BYTES))
        asked: list[bytes] = []
        for n, start in enumerate(starts):
            while len(asked) < min(len(starts), n + _CHUNKS_AHEAD):
                begin = starts[len(asked)]
                num_bytes = min(CHUNK_BYTES, total - begin)
                signed_bytes = max(0, min(header_bytes - begin, num_bytes))
                nonce = secrets.token_bytes(_NONCE_BYTES)
                raw = self._encoder.encode((name, offset + begin, num_bytes, signed_bytes, nonce))
                socket.send_multipart([raw, key.mac(raw)])
                asked.append(raw)
            if not socket.poll(int(1000 * _FETCH_WAIT_S)):
                self._forget(node_id)
                raise StuckError(
                    f"{self._context.address.name}: node {node_id} sent no part of {name} within {_FETCH_WAIT_S:g} s"
                )
            status, code, frame = socket.recv_multipart(copy=False)
            signed = frame.buffer[: max(0, header_bytes - start)] if status.bytes == b"1" else frame.buffer
            if not key.is_mac(code.bytes, asked[n], status.bytes, signed):
                self._forget(node_id)
                raise RunError(
                    f"{self._context.address.name}: what came for {name} was not sent by {node_id} as it is:"
                    " something on the network between the nodes changed it or answered in its place"
                )
            if status.bytes != b"1":
                self._forget(node_id)
                raise PeerDiedError(f"{self._context.address.name}: {frame.bytes.decode()}")
            view[start : start + len(frame.buffer)] = frame.buffer
        return data

    def _socket_to(self, node_id: str) -> zmq.Socket[bytes]:
        sockets = self._local.__dict__.setdefault("sockets", {})
        if node_id not in sockets:
            endpoint = self._context.hub.fetch(f"store/{node_id}", _FETCH_WAIT_S)
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            sockets[node_id] = socket
        opened: zmq.Socket[bytes] = sockets[node_id]
        return opened

    def _forget(self, node_id: str) -> None:
        self._local.sockets.pop(node_id).close()
