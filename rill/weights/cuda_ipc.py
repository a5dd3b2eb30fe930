"""Same GPU (or peers with access to each other): handles travel, bytes stay on the device.

The publisher gathers into device buckets that it owns and hands out their CUDA IPC handles; a receiver maps them,
verifies them on the device and copies device to device. Two sets take turns, as in shared memory (slots.py).
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rill.errors import UnsupportedError, WeightSyncError
from rill.runtime.device.accelerator import CUDA, accelerator
from rill.weights.base import Receiver, TransportConfig, Verify
from rill.weights.buckets import ViewCache
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest
from rill.weights.slots import Mapped, SlotPublisher, check_stamp


class CudaIpcPublisher(SlotPublisher):
    transport = "cuda_ipc"
    keeps_buckets = True

    def __init__(self, config: CudaIpcTransport.Config) -> None:
        _require_cuda()
        super().__init__(config)
        self._handles: dict[tuple[int, int], bytes] = {}
        self._views = ViewCache()

    def place_of(self, device: torch.device) -> torch.device:
        return device if device.type == CUDA else torch.device(CUDA, torch.cuda.current_device())

    def new_buffer(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, _ = accelerator(CUDA).memory_bytes(str(device))
            raise WeightSyncError(
                f"{num_bytes} bytes for weights could not be had on {device}, which has {free} free: cuda_ipc keeps "
                'two copies of the weights there; use "shm", or leave it more memory'
            ) from error

    def views(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        return self._views(buffer_B, specs)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        key = (buffer_B.data_ptr(), buffer_B.numel())
        if key not in self._handles:
            # A handle is made once per buffer: each one that torch makes holds a reference until it is received.
            self._handles[key] = pickle.dumps(accelerator(CUDA).export(buffer_B))
        return replace(bucket, source=str(self.slot), handle=self._handles[key])

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        torch.cuda.synchronize()  # the handle carries no order: all copies must have ended before it is used
        return super().finish(manifest)

    def close(self) -> None:
        self._handles.clear()
        self._views.clear()
        super().close()


class CudaIpcReceiver(Receiver):
    transport = "cuda_ipc"
    has_all_buckets = True

    def __init__(self, config: CudaIpcTransport.Config) -> None:
        super().__init__(config)
        _require_cuda()
        self._views = ViewCache()
        self._mapped: Mapped[Tensor] = Mapped(self._views.clear)

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        if bucket.index == 0:  # all buckets of a version lie in one slot
            check_stamp(manifest.location, int(bucket.source), manifest.version)
        return self._mapped.get(manifest, bucket.handle, lambda: self._map(bucket))

    def _map(self, bucket: BucketSpec) -> Tensor:
        try:
            mapped: Tensor = accelerator(CUDA).open(pickle.loads(bucket.handle))
        except (RuntimeError, UnsupportedError) as error:
            raise WeightSyncError(
                f"bucket {bucket.index} cannot be mapped from the publisher's GPU: {error}; both ends must see the "
                'same device, in different processes (in one process use "shm")'
            ) from error
        return mapped

    def views(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        return self._views(buffer_B, specs)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        if bucket.index == len(manifest.buckets) - 1:
            # The consumer's copies run on the device, one after the other: once the last has ended and the slot still
            # holds this version, all of them read what was published.
            accelerator(CUDA).synchronize(None)
            check_stamp(manifest.location, int(bucket.source), manifest.version)

    def close(self) -> None:
        self._mapped.clear()


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError('the cuda_ipc transport needs a CUDA device: use "shm" on this machine')


class CudaIpcTransport:
    class Config(TransportConfig):
        type: Literal["cuda_ipc"] = "cuda_ipc"
        bucket_bytes: int = 256 * 2**20
        """Device copies are fast: larger buckets, fewer handles."""
        verify: Verify = Verify.SAMPLED
        """The bytes stay where they were written; what is left to catch is a wrong place, or a newer version."""

    publisher = CudaIpcPublisher
    receiver = CudaIpcReceiver
