"""Same process: buckets are snapshots in ordinary (or device) memory, found by their publisher."""

from __future__ import annotations

import weakref
from typing import Literal

import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.weights.base import Receiver, TransportConfig
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest, with_source
from rill.weights.slots import SlotPublisher


class InprocTransport:
    class Config(TransportConfig):
        type: Literal["inproc"] = "inproc"

    @staticmethod
    def publisher(config: Config) -> InprocPublisher:
        return InprocPublisher(config)

    @staticmethod
    def receiver(config: Config) -> InprocReceiver:
        return InprocReceiver(config)


class InprocPublisher(SlotPublisher):
    transport = "inproc"
    keeps_buckets = True

    def __init__(self, config: InprocTransport.Config) -> None:
        super().__init__(config)
        _PUBLISHERS[self.stamps.folder] = self

    def new_buffer(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        return with_source(bucket, str(self.slot))


_PUBLISHERS: weakref.WeakValueDictionary[str, InprocPublisher] = weakref.WeakValueDictionary()


class InprocReceiver(Receiver):
    transport = "inproc"
    has_all_buckets = True

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        publisher = _PUBLISHERS.get(manifest.location)
        if publisher is None:
            raise WeightSyncError(
                f"{manifest.location} is not in this process: `inproc` serves trainer and engine in one process only; "
                'use "shm" between processes'
            )
        publisher.stamps.check(int(bucket.source), manifest.version)
        return publisher.buffers[int(bucket.source)][bucket.index]

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        publisher = _PUBLISHERS.get(manifest.location)
        if publisher is not None:
            publisher.stamps.check(int(bucket.source), manifest.version)
