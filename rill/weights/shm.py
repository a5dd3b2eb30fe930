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
import shutil
import struct
import tempfile
import uuid
import weakref
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.types import PolicyVersion
from rill.weights.base import (
    BucketSpec,
    Publisher,
    Receiver,
    TensorSpec,
    TransportConfig,
    WeightManifest,
    with_source,
)

STAMP = struct.Struct("<q")
NOT_READABLE = -1
SHARED_MEMORY = Path("/dev/shm")


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
        parent = config.folder or (str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else tempfile.gettempdir())
        self._folder = Path(parent) / f"rill-weights-{uuid.uuid4().hex[:12]}"
        self._folder.mkdir(parents=True)
        self._maps: dict[str, mmap.mmap] = {}
        self._num_published = 0
        # Segments outlive a process that is not closed in order; a finalizer covers the ordinary ends.
        self._cleanup = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def begin(self, version: PolicyVersion) -> None:
        del version
        self._slot = self._num_published % 2
        _write_stamp(self._folder / f"slot{self._slot}.stamp", NOT_READABLE)

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        path = self._folder / f"slot{self._slot}-{index:05d}"
        known = self._maps.get(path.name)
        if known is None or len(known) != num_bytes:
            known = self._maps[path.name] = _create(path, num_bytes)
        return torch.frombuffer(known, dtype=torch.uint8)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        return with_source(bucket, f"slot{self._slot}-{bucket.index:05d}")

    def location(self, version: PolicyVersion) -> str:
        return str(self._folder)

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        _write_stamp(self._folder / f"slot{self._slot}.stamp", int(manifest.version))
        self._num_published += 1
        return manifest

    def close(self) -> None:
        self._cleanup()
        self._maps.clear()


class ShmReceiver(Receiver):
    transport = "shm"

    def __init__(self, config: ShmTransport.Config) -> None:
        super().__init__(config)
        self._maps: dict[tuple[str, int, int], mmap.mmap] = {}

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        self._check_stamp(manifest, bucket)
        path = Path(manifest.location) / bucket.source
        try:
            status = path.stat()
        except FileNotFoundError:
            raise WeightSyncError(
                f"{path} is gone: the publisher has ended, or runs on another machine (`shm` serves one machine; "
                'use "http" or "distributed" between machines)'
            ) from None
        key = (str(path), status.st_ino, status.st_size)
        if key not in self._maps:
            if status.st_size == 0:
                return torch.empty(0, dtype=torch.uint8)
            with path.open("r+b") as file:
                self._maps[key] = mmap.mmap(file.fileno(), status.st_size)
        return torch.frombuffer(self._maps[key], dtype=torch.uint8)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        self._check_stamp(manifest, bucket)

    def close(self) -> None:
        self._maps.clear()

    def _check_stamp(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        slot, _, _ = bucket.source.partition("-")
        stamp = _read_stamp(Path(manifest.location) / f"{slot}.stamp")
        if stamp != int(manifest.version):
            holds = "nothing readable" if stamp == NOT_READABLE else f"version {stamp}"
            raise WeightSyncError(
                f"version {manifest.version}: {slot} of {manifest.location} holds {holds}: the publisher has gone on "
                "to newer weights; pull the newest manifest"
            )


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


def _write_stamp(path: Path, value: int) -> None:
    path.write_bytes(STAMP.pack(value))


def _read_stamp(path: Path) -> int:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return NOT_READABLE
    return int(STAMP.unpack(data)[0]) if len(data) == STAMP.size else NOT_READABLE
