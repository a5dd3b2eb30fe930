"""Giving device memory back without losing a tensor's identity.

A tensor's storage is emptied in place and filled again later, so that every view, optimizer state and module
parameter that shares it stays valid. Callers: whoever takes turns on a shared device (TrainEngine, ScoreModel, robots'
trainer and policy); Optimizer for the pinned memory its offloaded state rests in.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

_ALIGN_BYTES = 4096


class Shelf:
    """Host copies of emptied storages.

    Pinned memory is dear to make, so a storage keeps its host buffer for the next time: from the second turn on a
    switch costs its transfers and nothing else. The buffers of one turn lie in one slab.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        """By the storage's address."""
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._buffers: dict[int, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(host.nbytes for _, host in self._kept.values())

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Copy to host memory and empty on the device. Host tensors and tensors already here are left alone."""
        storages = _device_storages(tensors)
        self._make_buffers(storages)
        for storage in storages:
            host = self._buffers[storage._cdata]
            host.copy_(_bytes_of(storage), non_blocking=True)
            self._kept[storage._cdata] = (storage, host)
        if storages:
            torch.cuda.synchronize()
        for storage in storages:
            storage.resize_(0)

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Empty on the device what the caller can compute again; take_all() gives the memory back, not the values."""
        for storage in _device_storages(tensors):
            self._dropped.append((storage, storage.nbytes()))
            storage.resize_(0)

    def take_all(self) -> None:
        """Bring everything back, bit for bit."""
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
        for storage, host in self._kept.values():
            storage.resize_(host.nbytes)
            _bytes_of(storage).copy_(host, non_blocking=True)
        if self._kept:
            torch.cuda.synchronize()
        self._kept.clear()
        self._dropped.clear()

    def host_of(self, tensor: Tensor) -> Tensor | None:
        """The same values in the host copy, which stays as it is until the storage is put here again. None: it has none
        now."""
        kept = self._kept.get(tensor.untyped_storage()._cdata)
        if kept is None:
            return None
        typed = kept[1].view(tensor.dtype)  # a part of a slab, whose beginning as_strided counts from
        offset = typed.storage_offset() + tensor.storage_offset()
        return typed.as_strided(tensor.shape, tensor.stride(), offset)

    def _make_buffers(self, storages: Sequence[torch.UntypedStorage]) -> None:
        missing = [s for s in storages if not self._has_buffer(s)]
        if not missing:
            return
        sizes = [-(-s.nbytes() // _ALIGN_BYTES) * _ALIGN_BYTES for s in missing]
        slab, start = _pinned_slab(sum(sizes)), 0
        for storage, size in zip(missing, sizes, strict=True):
            self._buffers[storage._cdata] = slab[start : start + storage.nbytes()]
            start += size

    def _has_buffer(self, storage: torch.UntypedStorage) -> bool:
        # A storage that is gone may have left its address to another one.
        buffer = self._buffers.get(storage._cdata)
        return buffer is not None and buffer.nbytes == storage.nbytes()


def pinned_like(tensor: Tensor) -> Tensor:
    """Pinned host memory for a tensor's values, exactly its size; torch's own allocator rounds up to powers of two."""
    slab = _pinned_slab(-(-max(tensor.nbytes, 1) // _ALIGN_BYTES) * _ALIGN_BYTES)
    return slab[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _device_storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, those on the host and the empty ones left out."""
    storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
    return [s for s in storages.values() if s.device.type != "cpu" and s.nbytes() > 0]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _pinned_slab(num_bytes: int) -> Tensor:
    """Host memory in huge pages, touched by all threads at once and then pinned: several times faster than letting
    the driver allocate it page by page."""
    pages = mmap.mmap(-1, num_bytes)
    pages.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.from_numpy(np.frombuffer(pages, dtype=np.uint8)).zero_()
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = slab.data_ptr()
    error = int(cuda.cudaHostRegister(address, num_bytes, 0))
    if error:
        log.warning("%.1f GB of host memory could not be pinned (CUDA error %d)", num_bytes / 1e9, error)
    else:
        weakref.finalize(pages, cuda.cudaHostUnregister, address)
    return slab
