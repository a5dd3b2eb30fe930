"""Same GPU (or peers with access to each other): handles travel, bytes stay on the device.

The publisher gathers into device buckets that it owns and hands out their CUDA IPC handles; a receiver maps them,
verifies them on the device and copies device to device. Two sets take turns, as in shared memory, and a stamp in host
shared memory tells a reader that was overtaken.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from rill.errors import UnsupportedError, WeightSyncError
from rill.types import PolicyVersion
from rill.weights.base import Publisher, Receiver, TransportConfig, Verify
from rill.weights.buckets import ViewCache
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest
from rill.weights.slots import SlotStamps


class CudaIpcTransport:
    class Config(TransportConfig):
        type: Literal["cuda_ipc"] = "cuda_ipc"
        bucket_bytes: int = 256 * 2**20
        """Device copies are fast: larger buckets, fewer handles."""
        verify: Verify = Verify.SAMPLED
        """The bytes stay where they were written; what is left to catch is a wrong place, or a newer version."""

    @staticmethod
    def publisher(config: Config) -> CudaIpcPublisher:
        return CudaIpcPublisher(config)

    @staticmethod
    def receiver(config: Config) -> CudaIpcReceiver:
        return CudaIpcReceiver(config)


class CudaIpcPublisher(Publisher):
    transport = "cuda_ipc"
    keeps_buckets = True

    def __init__(self, config: CudaIpcTransport.Config) -> None:
        super().__init__(config)
        _require_cuda()
        self._slots: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._handles: dict[tuple[int, int], bytes] = {}
        self._num_published = 0
        self._stamps = SlotStamps.create()
        self._views = ViewCache()

    @property
    def _slot(self) -> int:
        return self._num_published % 2

    def begin(self, version: PolicyVersion) -> None:
        self._stamps.clear(self._slot)

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        buffers = self._slots[self._slot]
        target = device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
        if index < len(buffers) and buffers[index].numel() == num_bytes and buffers[index].device == target:
            return buffers[index]
        fresh = torch.empty(num_bytes, dtype=torch.uint8, device=target)
        buffers[index : index + 1] = [fresh]
        return fresh

    def views(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        return self._views(buffer_B, specs)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        key = (buffer_B.data_ptr(), buffer_B.numel())
        if key not in self._handles:
            # A handle is made once per buffer: each one that torch makes holds a reference until it is received.
            self._handles[key] = _export(buffer_B)
        return replace(bucket, source=str(self._slot), handle=self._handles[key])

    def location(self, version: PolicyVersion) -> str:
        return self._stamps.folder

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        torch.cuda.synchronize()  # the handle carries no order: all copies must have ended before it is used
        self._stamps.set(self._slot, manifest.version)
        self._num_published += 1
        return manifest

    def close(self) -> None:
        self._stamps.close()
        self._handles.clear()
        self._views.clear()
        self._slots = ([], [])


class CudaIpcReceiver(Receiver):
    transport = "cuda_ipc"
    has_all_buckets = True

    def __init__(self, config: CudaIpcTransport.Config) -> None:
        super().__init__(config)
        _require_cuda()
        self._mapped: dict[bytes, Tensor] = {}
        self._views = ViewCache()

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        if bucket.index == 0:  # all buckets of a version lie in one slot
            SlotStamps(manifest.location).check(int(bucket.source), manifest.version)
        if bucket.handle not in self._mapped:
            try:
                self._mapped[bucket.handle] = _import(bucket.handle)
            except RuntimeError as error:
                raise WeightSyncError(
                    f"bucket {bucket.index} cannot be mapped from the publisher's GPU: {error}; both ends must see the "
                    'same device, in different processes (in one process use "inproc")'
                ) from error
        return self._mapped[bucket.handle]

    def views(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        return self._views(buffer_B, specs)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        if bucket.index == len(manifest.buckets) - 1:
            # The consumer's copies run on the device, one after the other: once the last has ended and the slot still
            # holds this version, all of them read what was published.
            torch.cuda.current_stream().synchronize()
            SlotStamps(manifest.location).check(int(bucket.source), manifest.version)

    def close(self) -> None:
        self._views.clear()
        self._mapped.clear()


def _export(buffer_B: Tensor) -> bytes:
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(buffer_B)  # type: ignore[no-untyped-call]
    return pickle.dumps((rebuild, arguments))


def _import(handle: bytes) -> Tensor:
    rebuild, arguments = pickle.loads(handle)
    tensor: Any = rebuild(*arguments)
    assert isinstance(tensor, Tensor)
    return tensor


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError('the cuda_ipc transport needs a CUDA device: use "shm" on this machine')
