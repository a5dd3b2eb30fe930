"""Device memory that is given back and taken again at the same addresses, so that captured graphs outlive a release.

    with pool.use():   tensors made here lie in ranges of addresses that the pool reserves
    pool.give_back()   the memory behind them goes to whoever wants it; tensors, views and graphs stay as they are
    pool.take_back()   other memory behind the same addresses; what it holds is undefined

CUDA's calls for virtual memory, through ctypes, behind torch's own allocator (torch.cuda.MemPool).
"""

from __future__ import annotations

import ctypes
import logging
import struct
from contextlib import AbstractContextManager

import torch

from rill.errors import EngineError
from rill.models.ops.cuda_driver import call_driver

log = logging.getLogger(__name__)

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
_GRANULE = 2 << 20
"""Memory is mapped in multiples of this; torch asks for such sizes anyway."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class DevicePool:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, int] = {}
        """Bytes of a range, by its address."""
        self._handles: dict[int, int] = {}
        """Of the memory behind a range that has some."""
        callbacks = _Allocate(self._allocate), _Free(self._free)
        allocate, free = (ctypes.cast(each, ctypes.c_void_p).value or 0 for each in callbacks)
        allocator = torch._C._cuda_customAllocator(allocate, free)
        self._pool = torch.cuda.MemPool(allocator)
        # For ever: torch may call them for as long as one of their tensors lives, and while the interpreter ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((callbacks, allocator, self._pool)))

    def use(self) -> AbstractContextManager[None]:
        """For what this thread allocates."""
        return torch.cuda.use_mem_pool(self._pool, self._device)

    def give_back(self) -> None:
        torch.cuda.synchronize(self._device)
        for address in list(self._handles):
            self._unmap(address)

    def take_back(self) -> None:
        """Where somebody else holds the memory now: EngineError; to be called again once it is free."""
        for address in self._sizes.keys() - self._handles.keys():
            try:
                self._map(address)
            except EngineError as error:
                what = f"{self._sizes[address] >> 20} MiB that were released cannot be had again ({error})"
                raise EngineError(
                    f"{what}: somebody else holds them; free them and restore() again"
                ) from error

    def _map(self, address: int) -> None:
        size, handle = self._sizes[address], ctypes.c_ulonglong()
        # CUmemAllocationProp: its type, handles, location, Windows' data, flags; CUmemAccessDesc: location, flags
        properties = struct.pack("iiiiQ8x", _PINNED, 0, _ON_DEVICE, self._device.index, 0)
        access = struct.pack("iii", _ON_DEVICE, self._device.index, _READ_AND_WRITE)
        call_driver("cuMemCreate", ctypes.byref(handle), size, properties, 0)
        call_driver("cuMemMap", address, size, 0, handle.value, 0)
        call_driver("cuMemSetAccess", address, size, access, 1)
        self._handles[address] = handle.value

    def _unmap(self, address: int) -> None:
        call_driver("cuMemUnmap", address, self._sizes[address])
        call_driver("cuMemRelease", self._handles.pop(address))

    def _allocate(self, num_bytes: int, device: int, stream: int) -> int:
        """Called by torch. 0 is out of memory to it."""
        address, size = ctypes.c_ulonglong(), -(-num_bytes // _GRANULE) * _GRANULE
        try:
            call_driver("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
            self._sizes[address.value] = size
            self._map(address.value)
        except EngineError as error:
            log.warning("%d MiB of device memory were refused: %s", size >> 20, error)
            if self._sizes.pop(address.value, None):
                call_driver("cuMemAddressFree", address.value, size)
            return 0
        return address.value

    def _free(self, address: int, num_bytes: int, device: int, stream: int) -> None:
        if address in self._handles:
            self._unmap(address)
        call_driver("cuMemAddressFree", address, self._sizes.pop(address))
