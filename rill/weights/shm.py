"""Same machine: buckets are segments of shared memory, written once and read in place without a copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.runtime.transfer.segments import Segment
from rill.weights.base import Receiver, TransportConfig
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest
from rill.weights.slots import Mapped, SlotPublisher, check_stamp


class ShmPublisher(SlotPublisher):
    transport = "shm"

    def __init__(self, config: ShmTransport.Config) -> None:
        super().__init__(config, config.folder)
        self._folder = Path(self.folder)
        self._segments: dict[str, Segment] = {}

    def place_of(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def new_buffer(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        path = self._folder / f"{self.slot}-{index:05d}"
        if path.name in self._segments:
            self._segments.pop(path.name).discard(path)
        try:
            segment = self._segments[path.name] = Segment(path, num_bytes, create=True)
        except OSError as error:
            raise WeightSyncError(
                f"{num_bytes} bytes of shared memory for weights could not be had at {path.parent}: {error}; "
                "enlarge it (containers: --shm-size), or set `folder` of the shm transport to a roomier place"
            ) from error
        return torch.frombuffer(segment.map, dtype=torch.uint8)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        return replace(bucket, source=f"{self.slot}-{bucket.index:05d}")

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        self._discard(f"{self.slot}-", first=len(manifest.buckets))
        return super().finish(manifest)

    def close(self) -> None:
        self._discard("")
        super().close()

    def _discard(self, slot: str, first: int = 0) -> None:
        """Give the memory of buckets back now, though receivers may have it mapped."""
        for name in [n for n in self._segments if n.startswith(slot) and int(n.partition("-")[2]) >= first]:
            self._segments.pop(name).discard(self._folder / name)


class ShmReceiver(Receiver):
    transport = "shm"

    def __init__(self, config: ShmTransport.Config) -> None:
        super().__init__(config)
        self._mapped: Mapped[Segment] = Mapped()

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        self._check_slot(manifest, bucket)
        path = Path(manifest.location) / bucket.source
        try:
            status = path.stat()
            # A bucket of another size is another file at the same place.
            key = (bucket.source, status.st_ino, status.st_size)
            segment = self._mapped.get(manifest, key, lambda: Segment(path, 0, create=False))
        except FileNotFoundError:
            raise WeightSyncError(
                f"{path} is gone: the publisher has ended, or runs on another machine (`shm` serves one machine; "
                'use "tcp" or "distributed" between machines)'
            ) from None
        return torch.frombuffer(segment.map, dtype=torch.uint8)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        self._check_slot(manifest, bucket)

    def close(self) -> None:
        self._mapped.clear()

    def _check_slot(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        slot, _, _ = bucket.source.partition("-")
        check_stamp(manifest.location, int(slot), manifest.version)


class ShmTransport:
    class Config(TransportConfig):
        type: Literal["shm"] = "shm"
        folder: str = ""
        """Where the segments lie. Empty: the system's shared memory, or its temporary folder where there is none."""

    publisher = ShmPublisher
    receiver = ShmReceiver
