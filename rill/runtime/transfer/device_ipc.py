"""Tensors on a device between two processes of a node of which the receiver sees the sender's device: a handle travels.

The receiver opens the handle and copies to its own device. The sender's memory stays its own: a send returns once the
receiver has copied. What a handle is, the accelerator knows (rill.runtime.device); weights use the same handles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rill.runtime.device.accelerator import accelerator, accelerator_of
from rill.runtime.transfer import wire

if TYPE_CHECKING:
    from rill.runtime.address import WorkerAddress


def shares_a_device(me: WorkerAddress, peer: WorkerAddress) -> bool:
    return me.node_id == peer.node_id and bool(set(me.gpus) & set(peer.gpus))


class Exporter:
    """The device hook of `wire.encode` for one send."""

    def __init__(self, me: WorkerAddress, peer: WorkerAddress) -> None:
        self._me = me
        self._peer = peer
        self.kind = ""
        """Of what it exported; empty: there was nothing."""

    def __call__(self, tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
        found, index = accelerator_of(tensor), tensor.device.index or 0
        if found is None or not found[1].has_ipc or index >= len(self._me.gpus):
            return None
        if self._me.gpus[index] not in self._peer.gpus:
            return None
        self.kind = found[0]
        return open_copy, (self.kind, found[1].export(tensor))


def open_copy(kind: str, handle: Any) -> Any:
    """Open the sender's memory and copy out of it to this process's own device. The copy is there on return."""
    device = accelerator(kind)
    theirs = device.open(handle)
    mine = theirs.to(wire.decoding_device.get() or theirs.device, copy=True)
    device.synchronize(mine.device)  # the receipt lets the sender change its memory
    return mine
