"""The process that serves one node's payloads to the other nodes. Where a run has one node there is none.

It holds no payload of its own: it maps what the node's workers wrote, so a worker's death loses nothing. Its address is
known by its name in the hub. It may be killed at any moment; the agent starts it again, under a new identity, and
readers ask the hub for its new address. Of a payload only the header, which is unpickled, is signed: see tcp.py.
"""

from __future__ import annotations

import os
import pickle
import signal
from typing import Any

from rill.runtime.address import STORE_GROUP, Site
from rill.runtime.hub.client import HubClient
from rill.runtime.transfer.segments import unlink
from rill.runtime.transfer.store import Store
from rill.runtime.transfer.tcp import ByteServer


def main(start: bytes) -> None:
    site = pickle.loads(start)
    assert isinstance(site, Site)
    serve_store(site, os.getpid())
    while True:
        signal.pause()  # until the agent ends the session


def serve_store(site: Site, launch: int) -> tuple[ByteServer, HubClient]:
    """Serve the payloads of the site's node from now on."""
    assert site.key is not None, "a store server in a session that has one node"
    identity = f"{STORE_GROUP}{site.node_id}[0]#{launch}"
    # A store of its own, which outlives the owners of what it maps: their payloads may still be asked for.
    store = Store(site.shm_dir, site.node_id, identity)

    def carry_out(order: tuple[str, list[str]]) -> None:
        unlink(site.shm_dir, *order)
        store.drop_unlinked()

    def read(name: str, offset: int, num_bytes: int) -> tuple[Any, int]:
        return store.view(name, offset, num_bytes), offset + num_bytes

    server = ByteServer(site.host, site.key, read)
    hub = HubClient(site.hub_endpoint, identity, site.key, server.endpoint)
    hub.on("store_unlink", carry_out)
    return server, hub.start()
