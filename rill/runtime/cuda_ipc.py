"""GPU tensors between two processes of a node of which the receiver sees the sender's GPU: a handle travels.

The receiver opens the handle on the sender's GPU and copies: on that device if it is one of its own, else from GPU to
GPU to its own (CUDA uses peer access where the machine has it). The sender's memory stays its own: `Transfer.send`
returns once the receiver has copied.

Opening a handle costs more than the copy, so a receiver keeps the last thing it opened of each sender for LINGER_S: the
same memory sent again is there at once. What the sender frees in that time is its own again when the time is over.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from typing import Any

from rill.runtime.context import WorkerAddress, current
from rill.runtime.landing import landing_for


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
        return import_copy, (self._me.identity, gpu, export(tensor))


def export(tensor: Any) -> tuple[Any, ...]:
    """What `import_copy` needs; the tensor must live until it was imported."""
    # A receiver that has the memory open already waits for no event of ours.
    sys.modules["torch"].cuda.current_stream(tensor.device).synchronize()
    _, arguments = _reductions().reduce_tensor(tensor)
    return tuple(arguments)


_DEVICE_ARGUMENT = 6
"""The place of the device's number in the arguments of torch's rebuild_cuda_tensor."""
LINGER_S = 0.2


class _Opened:
    """The last tensor on the memory of each sender, kept open for a while. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[str, tuple[float, Any]] = {}
        """By sender: until when, and the tensor. One each: what a sender has freed must not pile up here."""
        self._closer: threading.Thread | None = None

    def keep(self, sender: str, tensor: Any) -> None:
        with self._changed:
            if not self._tensors:
                self._changed.notify_all()
            self._tensors[sender] = (time.monotonic() + LINGER_S, tensor)
            if self._closer is None:
                self._closer = threading.Thread(target=self._close_idle, name="rill-cuda-ipc", daemon=True)
                self._closer.start()

    def _close_idle(self) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: bool(self._tensors))
                now_s = time.monotonic()
                self._tensors = {sender: kept for sender, kept in self._tensors.items() if kept[0] > now_s}
                self._changed.wait(LINGER_S / 2)


_opened = _Opened()


def import_copy(sender: str, gpu: int, arguments: tuple[Any, ...]) -> Any:
    """Open the memory of `sender` as this process sees the GPU, and copy out of it to a GPU of this process's own."""
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
    _opened.keep(sender, theirs)
    return copied


def _reductions() -> Any:
    return importlib.import_module("torch.multiprocessing.reductions")
