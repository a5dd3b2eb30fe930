"""Channel payloads that stay on the GPU: a CUDA IPC handle travels, the consumer copies on the device.

For channels made with `offload=False`, where producers and consumers share GPUs. The producer keeps the tensor until
the item is finished; it goes with the producer's process, unlike payloads in shared memory.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from typing import Any

from rill.errors import UnsupportedError
from rill.runtime.context import current
from rill.runtime.transfer.cuda_ipc import import_copy

_exported: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


class GpuExport:
    """The device hook of one put; collects what must stay alive."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, tensor: Any) -> tuple[Any, tuple[Any, ...]] | None:
        from torch.multiprocessing.reductions import reduce_tensor

        address = current().address
        index = tensor.device.index or 0
        if tensor.device.type != "cuda" or index >= len(address.gpus):
            return None
        tensor = tensor.contiguous()
        self.kept.append(tensor)
        token = secrets.token_hex(8)
        _exported[token] = tensor
        _, arguments = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return _open_on_gpu, (address.name, token, address.gpus[index], arguments)


def gpu_export() -> GpuExport | None:
    """A hook, where this process can have GPU tensors at all."""
    return GpuExport() if "torch" in sys.modules else None


def _open_on_gpu(producer: str, token: str, gpu: int, arguments: tuple[Any, ...]) -> Any:
    here = current().address
    if token in _exported:  # this process is the producer: CUDA opens no handle of its own
        return _exported[token].clone()
    if gpu not in here.gpus:
        raise UnsupportedError(
            f"{here.name} cannot read a tensor that {producer} keeps on GPU {gpu}: it sees {list(here.gpus)};"
            " create the channel with offload=True"
        )
    return import_copy(gpu, arguments)
