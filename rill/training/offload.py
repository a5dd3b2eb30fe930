"""Giving device memory back without losing a tensor's identity.

A tensor's storage is emptied in place and filled again later, so that every view, optimizer state and module
parameter that shares it stays valid. Callers: TrainEngine.offload/onload, in turns on a shared device.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor


class OffloadLevel(IntEnum):
    """What offload() gives back; each level includes the ones before it."""

    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3


class Shelf:
    """Host copies of emptied storages. Pinned memory is dear to allocate, so a tensor keeps its host buffer for the
    next time: from the second turn on, a switch costs two transfers and nothing else."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._buffers: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        return sum(host.nbytes() for _, host in self._kept.values())

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Copy to host memory and empty on the device. Host tensors and tensors already here are left alone."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu" or storage.nbytes() == 0:
                continue
            host = self._buffer(id(tensor), storage.nbytes())
            host.copy_(storage, non_blocking=True)
            self._kept[id(tensor)] = (storage, host)
        if self._kept:
            torch.cuda.synchronize()
        for storage, host in self._kept.values():
            if storage.nbytes() == host.nbytes():
                storage.resize_(0)

    def take_all(self) -> None:
        """Bring everything back, bit for bit."""
        for storage, host in self._kept.values():
            storage.resize_(host.nbytes())
            storage.copy_(host, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        self._kept.clear()

    def _buffer(self, key: int, num_bytes: int) -> torch.UntypedStorage:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.nbytes() != num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
            self._buffers[key] = buffer
        return buffer
