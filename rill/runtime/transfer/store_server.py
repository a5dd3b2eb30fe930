"""The server of one node's payloads for the other nodes; started by the cluster where there is more than one node.

It holds no payload of its own: it maps what the node's workers wrote, so a worker's death loses nothing. Its address is
published under "store/<node>". Of a payload only the header, which is unpickled, is signed: see tcp.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rill.runtime.transfer.segments import unlink
from rill.runtime.transfer.store import Store
from rill.runtime.transfer.tcp import ByteServer

if TYPE_CHECKING:
    from rill.runtime.context import RuntimeContext

_HUB_S = 30.0


class StoreServer:
    """Serves `context.node_id`'s payloads."""

    def __init__(self, context: RuntimeContext) -> None:
        assert context.key is not None, "a store server in a session that has one node"
        # A store of its own, which outlives the owners of what it maps: their payloads may still be asked for.
        store = Store(context.shm_dir, context.node_id, context.address.identity)

        def carry_out(order: Any) -> None:
            unlink(context.shm_dir, order)
            store.drop_unlinked()

        def read(name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
            return store.view(name, offset, num_bytes), offset + num_bytes

        self._server = ByteServer(context.host, context.key, read)
        hub = context.hub
        hub.on("store_unlink", carry_out)
        hub.call("registry", "register", {"serves_store": True}, _HUB_S)
        hub.call("registry", "publish", [f"store/{context.node_id}", self.endpoint, True], _HUB_S)

    @property
    def endpoint(self) -> str:
        return self._server.endpoint

    def close(self) -> None:
        self._server.close()
