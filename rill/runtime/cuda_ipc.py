"""GPU tensors between two processes that see the same GPU: a handle travels, the receiver copies on the device.

The sender's memory stays its own: `Transfer.send` returns once the receiver has copied. Processes that do not share
the GPU go through the host (wire.py without a hook).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rill.runtime.context import WorkerAddress, current


class Exporter:
    """Exports the tensors of one send."""

    def __init__(self, me: WorkerAddress, peer: WorkerAddress) -> None:
        self._me = me
        self._peer = peer
        self.num_exported = 0

    def export(self, tensor: Any) -> tuple[Any, tuple[Any, ...]]:
        """The device hook of `wire.encode`."""
        gpu = self._me.gpus[tensor.device.index or 0] if self._me.gpus else -1
        if tensor.device.type != "cuda" or gpu not in self._peer.gpus:
            return _on_host, (tensor.cpu(),)
        self.num_exported += 1
        _, arguments = _reductions().reduce_tensor(tensor)
        return import_copy, (gpu, arguments)


def exporter_for(me: WorkerAddress, peer: WorkerAddress) -> Exporter | None:
    """An exporter where both processes are on one node and see a GPU in common."""
    if "torch" not in sys.modules or me.node_id != peer.node_id or not set(me.gpus) & set(peer.gpus):
        return None
    return Exporter(me, peer)


_DEVICE_ARGUMENT = 6
"""The place of the device's number in the arguments of torch's rebuild_cuda_tensor."""


def import_copy(gpu: int, arguments: tuple[Any, ...]) -> Any:
    """Open the sender's memory as this process sees the GPU, and copy out of it."""
    import torch

    here = current().address.gpus.index(gpu)
    arguments = (*arguments[:_DEVICE_ARGUMENT], here, *arguments[_DEVICE_ARGUMENT + 1 :])
    theirs = _reductions().rebuild_cuda_tensor(*arguments)
    copied = theirs.clone()
    torch.cuda.current_stream(copied.device).synchronize()  # the receipt lets the sender change its memory
    return copied


def _reductions() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions")


def _on_host(tensor: Any) -> Any:
    device = current().torch_device
    return tensor if device is None else tensor.to(device)
