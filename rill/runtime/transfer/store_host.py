"""The process that serves one node's payloads to the other nodes. Where a run has one node there is none.

It holds no payload of its own: it maps what the node's workers wrote, so a worker's death loses nothing. It may be
killed at any moment; the agent starts it again, under a new identity, and readers ask the hub for its new address.
"""

from __future__ import annotations

import os
import pickle
import signal

from rill.runtime import context as runtime_context
from rill.runtime.address import Site, WorkerAddress
from rill.runtime.context import RuntimeContext
from rill.runtime.process.agent import read_all
from rill.runtime.process.call import Calls
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.transfer.store_server import StoreServer

STORE_GROUP = "store-"
"""Followed by the node's id: the name of the server in the hub and at its agent."""


def main(start: int | bytes) -> None:
    """Entry of the process; `start` is a pickled Site or the descriptor of a file that holds one."""
    site = pickle.loads(read_all(start) if isinstance(start, int) else start)
    assert isinstance(site, Site)
    mailbox = Mailbox(f"ipc://{site.session_dir}/store-{os.getpid()}")
    address = WorkerAddress(
        f"{STORE_GROUP}{site.node_id}",
        0,
        site.node_id,
        os.getpid(),
        mailbox.endpoint,
        incarnation=os.getpid(),
    )
    context = RuntimeContext(site, address, mailbox, Calls(mailbox, address))
    runtime_context.install(context)
    StoreServer(context)
    while True:
        signal.pause()  # until the agent ends the session
