"""How an object goes from one process to another: the one table of routes, chosen by where both are.

Everything but GPU tensors is decided by the nodes alone; a GPU tensor may take a shorter way of its own:

    from → to                                          object                 its GPU tensors
    the same rank                                      reference              reference
    one node, the receiver sees the sender's GPU       shared memory          CUDA IPC, on the device or GPU to GPU
    one node, both have GPUs                           shared memory          NCCL
    one node, one of them has none                     shared memory          through the host
    two nodes, both have GPUs                          TCP                    NCCL
    two nodes, one of them has none                    TCP                    through the host

A process sees its own GPUs, and with `launch(peer_access=True)` the node's other GPUs of the cluster too.
"""

from __future__ import annotations

import enum

from rill.runtime.context import WorkerAddress


class TensorRoute(enum.Enum):
    """The way of a GPU tensor."""

    CUDA_IPC = "cuda_ipc"
    NCCL = "nccl"
    HOST = "host"


def tensor_route(me: WorkerAddress, peer: WorkerAddress, *, has_link: bool) -> TensorRoute:
    """The table above, for GPU tensors of `me`; `has_link`: whether NCCL can join the two."""
    if me.node_id == peer.node_id and set(me.gpus) & set(peer.gpus):
        return TensorRoute.CUDA_IPC
    return TensorRoute.NCCL if has_link else TensorRoute.HOST
