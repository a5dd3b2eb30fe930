"""The process that serves one node's payloads to the other nodes. Where a run has one node there is none.

It holds no payload of its own: it maps what the node's workers wrote, so a worker's death loses nothing. It may be
killed at any moment; the agent starts it again, under a new identity, and readers ask the hub for its new address.
"""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import dataclass
from pathlib import Path

from rill.runtime import context as runtime_context
from rill.runtime.context import RuntimeContext, WorkerAddress
from rill.runtime.process.agent import read_all
from rill.runtime.process.call import CallBook
from rill.runtime.process.mailbox import Mailbox
from rill.runtime.process.session_key import SessionKey
from rill.runtime.transfer.store_server import StoreServer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHostSpec:
    """All that the process is told at its start."""

    session_id: str
    session_dir: str
    shm_dir: str
    node_id: str
    host: str
    num_nodes: int
    hub_endpoint: str
    key: SessionKey | None


def main(start: int | bytes) -> None:
    """Entry of the process; `start` is a pickled StoreHostSpec or the descriptor of a file that holds one."""
    spec = pickle.loads(read_all(start) if isinstance(start, int) else start)
    assert isinstance(spec, StoreHostSpec)
    mailbox = Mailbox(f"ipc://{spec.session_dir}/store-{os.getpid()}")
    address = WorkerAddress(
        f"store-{spec.node_id}", 0, spec.node_id, os.getpid(), mailbox.endpoint, incarnation=os.getpid()
    )
    context = RuntimeContext(
        session_id=spec.session_id,
        session_dir=Path(spec.session_dir),
        shm_dir=Path(spec.shm_dir),
        node_id=spec.node_id,
        address=address,
        hub_endpoint=spec.hub_endpoint,
        mailbox=mailbox,
        calls=CallBook(mailbox, address),
        host=spec.host,
        num_nodes=spec.num_nodes,
        key=spec.key,
    )
    runtime_context.install(context)
    StoreServer(context)
    while True:
        signal.pause()  # until the agent ends the session
