"""Payloads between nodes: a server of this node's store over TCP, and the reader that fetches from the others.

One server per node, started by the cluster where there is more than one node; it publishes its address under
"store/<node>". A payload moves in chunks with a few requests ahead, so both ends hold a bounded number of bytes
however large it is and however many readers there are.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from rill.errors import PeerDiedError, StuckError
from rill.runtime.segments import aligned, unlink

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext
    from rill.runtime.store import Ref

CHUNK_BYTES = 4 * 1024 * 1024
_CHUNKS_AHEAD = 3
_FETCH_WAIT_S = 120.0


class StoreServer:
    """Serves `context.node_id`'s payloads. Start one per node; `close` ends its thread."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._zmq = zmq.Context()
        self._socket = self._zmq.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 2 * _CHUNKS_AHEAD)
        self._socket.setsockopt(zmq.LINGER, 0)
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
            reader, raw = self._socket.recv_multipart()
            name, offset, num_bytes = decoder.decode(raw)
            try:
                chunk: Any = store.view(name, offset, num_bytes)
                status = b"1"
            except PeerDiedError as error:
                chunk, status = str(error).encode(), b"0"
            self._socket.send_multipart([reader, status, chunk], copy=num_bytes < 65536)
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
        node_id, _, name, offset, header_bytes, sizes, _ = ref
        total = aligned(header_bytes) + sum(map(aligned, sizes))
        socket = self._socket_to(node_id)
        data = bytearray(total)
        view = memoryview(data)
        starts = list(range(0, total, CHUNK_BYTES))
        asked = 0
        for n, start in enumerate(starts):
            while asked < len(starts) and asked < n + _CHUNKS_AHEAD:
                num_bytes = min(CHUNK_BYTES, total - starts[asked])
                socket.send(self._encoder.encode((name, offset + starts[asked], num_bytes)))
                asked += 1
            if not socket.poll(int(1000 * _FETCH_WAIT_S)):
                self._forget(node_id)
                raise StuckError(
                    f"{self._context.address.name}: node {node_id} sent no part of {name} within {_FETCH_WAIT_S:g} s"
                )
            status, frame = socket.recv_multipart(copy=False)
            if status.bytes != b"1":
                self._forget(node_id)
                raise PeerDiedError(f"{self._context.address.name}: {frame.bytes.decode()}")
            view[start : start + len(frame.buffer)] = frame.buffer
        return data

    def _socket_to(self, node_id: str) -> zmq.Socket[bytes]:
        sockets = self._local.__dict__.setdefault("sockets", {})
        if node_id not in sockets:
            endpoint = self._context.hub.call("registry", "fetch", f"store/{node_id}", _FETCH_WAIT_S)
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(endpoint)
            sockets[node_id] = socket
        opened: zmq.Socket[bytes] = sockets[node_id]
        return opened

    def _forget(self, node_id: str) -> None:
        self._local.sockets.pop(node_id).close()
