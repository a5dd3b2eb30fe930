"""Same process: buckets are snapshots in ordinary (or device) memory, found by an id.

Two sets of buffers take turns, so an engine can still read version n while n + 1 is written.
"""

from __future__ import annotations

import itertools
from typing import Literal

import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.types import PolicyVersion
from rill.weights.base import Publisher, Receiver, TransportConfig
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest, with_source

_STORES: dict[str, dict[PolicyVersion, list[Tensor]]] = {}
_IDS = itertools.count()


class InprocTransport:
    class Config(TransportConfig):
        type: Literal["inproc"] = "inproc"

    @staticmethod
    def publisher(config: Config) -> InprocPublisher:
        return InprocPublisher(config)

    @staticmethod
    def receiver(config: Config) -> InprocReceiver:
        return InprocReceiver(config)


class InprocPublisher(Publisher):
    transport = "inproc"
    keeps_buckets = True

    def __init__(self, config: InprocTransport.Config) -> None:
        super().__init__(config)
        self._id = f"inproc-{next(_IDS)}"
        self._store: dict[PolicyVersion, list[Tensor]] = {}
        self._writing: list[Tensor] = []
        self._spare: list[Tensor] = []
        _STORES[self._id] = self._store

    def begin(self, version: PolicyVersion) -> None:
        del version
        if len(self._store) >= 2:
            self._spare = self._store.pop(min(self._store))
        self._writing = []

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        if index < len(self._spare):
            spare = self._spare[index]
            if spare.numel() == num_bytes and spare.device == device:
                return spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        self._writing.append(buffer_B)
        return with_source(bucket, str(bucket.index))

    def location(self, version: PolicyVersion) -> str:
        return self._id

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        self._store[manifest.version] = self._writing
        return manifest

    def close(self) -> None:
        _STORES.pop(self._id, None)


class InprocReceiver(Receiver):
    transport = "inproc"
    has_all_buckets = True

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        store = _STORES.get(manifest.location)
        if store is None:
            raise WeightSyncError(
                f"{manifest.location} is not in this process: `inproc` serves trainer and engine in one process only; "
                'use "shm" between processes'
            )
        buffers = store.get(manifest.version)
        if buffers is None:
            raise WeightSyncError(
                f"version {manifest.version} is gone: two newer versions have been published"
            )
        return buffers[int(bucket.source)]
