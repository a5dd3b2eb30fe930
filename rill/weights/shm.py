"""Same machine: buckets are files in shared memory, written once and read in place without a copy.

Two slots take turns. A slot's stamp says which version lies in it; it is cleared before the first byte of a new
version is written and set after the last, and a reader looks at it before and after every bucket:

    publisher   stamp ← none │ write buckets │ stamp ← version        (slot = publishes mod 2)
    receiver    stamp = version? │ map, verify, hand on │ stamp = version still?

So a reader that is overtaken by two publishes learns of it, and never hands on bytes of two versions.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.types import PolicyVersion
from rill.weights.base import Publisher, Receiver, TransportConfig
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest, with_source
from rill.weights.slots import SlotStamps


class ShmTransport:
    class Config(TransportConfig):
        type: Literal["shm"] = "shm"
        folder: str = ""
        """Where the segments lie. Empty: the system's shared memory, or its temporary folder where there is none."""

    @staticmethod
    def publisher(config: Config) -> ShmPublisher:
        return ShmPublisher(config)

    @staticmethod
    def receiver(config: Config) -> ShmReceiver:
        return ShmReceiver(config)


class ShmPublisher(Publisher):
    transport = "shm"

    def __init__(self, config: ShmTransport.Config) -> None:
        super().__init__(config)
        self._stamps = SlotStamps.create(config.folder)
        self._folder = Path(self._stamps.folder)
        self._maps: dict[str, mmap.mmap] = {}
        self._num_published = 0

    @property
    def _slot(self) -> int:
        return self._num_published % 2

    def begin(self, version: PolicyVersion) -> None:
        self._stamps.clear(self._slot)

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        path = self._folder / f"{self._slot}-{index:05d}"
        known = self._maps.get(path.name)
        if known is None or len(known) != num_bytes:
            known = self._maps[path.name] = _create(path, num_bytes)
        return torch.frombuffer(known, dtype=torch.uint8)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        return with_source(bucket, f"{self._slot}-{bucket.index:05d}")

    def location(self, version: PolicyVersion) -> str:
        return str(self._folder)

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        self._stamps.set(self._slot, manifest.version)
        self._num_published += 1
        return manifest

    def close(self) -> None:
        self._stamps.close()
        self._maps.clear()


class ShmReceiver(Receiver):
    transport = "shm"

    def __init__(self, config: ShmTransport.Config) -> None:
        super().__init__(config)
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        self._check_slot(manifest, bucket)
        path = Path(manifest.location) / bucket.source
        try:
            status = path.stat()
        except FileNotFoundError:
            raise WeightSyncError(
                f"{path} is gone: the publisher has ended, or runs on another machine (`shm` serves one machine; "
                'use "http" or "distributed" between machines)'
            ) from None
        known = self._maps.get(str(path))
        if known is None or known[0] != status.st_ino or len(known[1]) != status.st_size:
            if status.st_size == 0:
                return torch.empty(0, dtype=torch.uint8)
            with path.open("r+b") as file:
                known = self._maps[str(path)] = (status.st_ino, mmap.mmap(file.fileno(), status.st_size))
        return torch.frombuffer(known[1], dtype=torch.uint8)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        self._check_slot(manifest, bucket)

    def close(self) -> None:
        self._maps.clear()

    def _check_slot(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        slot, _, _ = bucket.source.partition("-")
        SlotStamps(manifest.location).check(int(slot), manifest.version)


def _create(path: Path, num_bytes: int) -> mmap.mmap:
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # a reader's map of the old file stays valid
    with path.open("w+b") as file:
        try:
            # Reserved now: writing to shared memory that is full would kill the process with a bus error.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise WeightSyncError(
                f"{num_bytes} bytes of shared memory for weights could not be had at {path.parent}: {error}; "
                "enlarge it (containers: --shm-size), or set `folder` of the shm transport to a roomier place"
            ) from error
        return mmap.mmap(file.fileno(), num_bytes)
