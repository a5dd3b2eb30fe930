"""GPU tensors between two processes of a node of which the receiver sees the sender's GPU: a handle travels.

The receiver opens the handle on the sender's GPU and copies: on that device if it is one of its own, else from GPU to
GPU to its own (CUDA uses peer access where the machine has it). The sender's memory stays its own: `Transfer.send`
returns once the receiver has copied.
"""

from __future__ import annotations

import importlib
from typing import Any

from rill.runtime.context import WorkerAddress, current
from rill.runtime.transfer.landing import landing_for


class Exporter:
    """Exports the tensors of one send."""

    def __init__(self, me: WorkerAddress, peer: WorkerAddress) -> None:
        self._me = me
        self._peer = peer
        self.num_exported = 0

    def __call__(self, tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
        """The device hook of `wire.encode`."""
        if tensor.device.type != "cuda":
            return None
        gpu = self._me.gpus[tensor.device.index or 0]
        if gpu not in self._peer.gpus:
            return None
        self.num_exported += 1
        _, arguments = _reductions().reduce_tensor(tensor)
        return import_copy, (gpu, arguments)


_DEVICE_ARGUMENT = 6
"""The place of the device's number in the arguments of torch's rebuild_cuda_tensor."""


def import_copy(gpu: int, arguments: tuple[Any, ...]) -> Any:
    """Open the sender's memory as this process sees the GPU, and copy out of it to a GPU of this process's own."""
    import torch

    context = current()
    here = context.address.gpus.index(gpu)
    arguments = (*arguments[:_DEVICE_ARGUMENT], here, *arguments[_DEVICE_ARGUMENT + 1 :])
    theirs = _reductions().rebuild_cuda_tensor(*arguments)
    landing = landing_for(theirs)
    if landing is not None:
        copied = landing.detach().copy_(theirs)
    else:
        copied = theirs.clone() if gpu in context.own_gpus else theirs.to(context.torch_device)
    torch.cuda.current_stream(copied.device).synchronize()  # the receipt lets the sender change its memory
    return copied


def _reductions() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions")
