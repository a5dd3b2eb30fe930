"""Over a file system: one folder per version, visible only when whole.

    HOST-USER/rill-session-weights-…/v0000000007/bucket-00000.safetensors … manifest.json     (a difference: ….delta)

Every publisher has a folder of its own: one that is started again publishes versions that the one before it has, too.
A version is written beside its place and renamed into it, so a reader sees all of it or nothing. With `delta` on, every
`full_every`-th version is whole and the others hold differences to the one before; a reader that has missed some walks
the chain from what it holds, or from the last whole version. Old folders are removed once no chain needs them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from rill.errors import WeightSyncError
from rill.runtime.process.scratch import ScratchFolder
from rill.types import PolicyVersion
from rill.weights import delta
from rill.weights.base import Publisher, Receiver, TransportConfig
from rill.weights.buckets import view_of
from rill.weights.delta import Codec
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest


class FileConfig(TransportConfig):
    """What the disk and tcp transports share."""

    delta: bool = False
    """Send differences to the version before instead of whole weights, where the layout has not changed."""
    full_every: int = Field(default=16, ge=1)
    """With `delta`: every so many versions are whole ones."""
    block_bytes: int = Field(default=4_096, ge=64, multiple_of=64)
    """With `delta`: a block in which nothing changed costs one bit."""
    codec: Codec = Codec.ZLIB
    """With `delta`: how differences are compressed; "zstd" needs the zstandard package."""


class DiskPublisher(Publisher):
    transport = "disk"

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config)
        folder = config.folder if isinstance(config, DiskTransport.Config) else ""
        self.config = config
        place = Path(folder or tempfile.gettempdir()).expanduser()
        if folder:  # not all file systems tell one machine of another's locks: each sweeps its own
            place /= f"{socket.gethostname()}-{os.getuid()}"
        self._scratch = ScratchFolder("weights", place)
        self.folder = self._scratch.path
        if folder:
            shutil.copymode(place, self.folder)  # readers may be other users
        self._writing = self.folder
        self._buffers: list[Tensor] = []
        self._previous: list[Tensor] = []
        self._previous_tensors: tuple[TensorSpec, ...] = ()
        self._num_since_full = 0
        self._full_versions: list[PolicyVersion] = []

    def begin(self, version: PolicyVersion) -> None:
        if self._writing != self.folder:
            shutil.rmtree(self._writing, ignore_errors=True)  # left by a publish that failed half-way
        self._writing = self.folder / f".writing-{version}-{uuid.uuid4().hex[:8]}"
        self._writing.mkdir()
        self._buffers = []

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        if self.config.delta:
            self._buffers.append(buffer_B)  # written in finish(): is the layout the same?
        else:
            self._write_full(bucket.index, buffer_B, specs)
        return replace(bucket, source=f"bucket-{bucket.index:05d}.safetensors")

    def location(self, version: PolicyVersion) -> str:
        return str(self.folder)

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        if self.config.delta:
            manifest = self._write_buckets(manifest)
        (self._writing / "manifest.json").write_text(manifest_to_json(manifest), encoding="utf-8")
        self._writing.rename(self.folder / version_folder(manifest.version))
        self._writing = self.folder
        self._num_since_full += 1
        if manifest.base_version is None:
            self._full_versions.append(manifest.version)
            self._num_since_full = 0
        self._previous, self._previous_tensors = self._buffers, manifest.tensors
        self._prune()
        return manifest

    def close(self) -> None:
        self._scratch.close()

    def _write_buckets(self, manifest: WeightManifest) -> WeightManifest:
        is_new = manifest.tensors != self._previous_tensors
        is_full = is_new or self._num_since_full + 1 >= self.config.full_every
        for index, buffer_B in enumerate(self._buffers):
            specs = manifest.in_bucket(index)
            if is_full:
                self._write_full(index, buffer_B, specs)
                continue
            payload = delta.encode(
                buffer_B,
                self._previous[index],
                width=specs[0].torch_dtype.itemsize,
                block_bytes=self.config.block_bytes,
                codec=self.config.codec,
            )
            (self._writing / f"bucket-{index:05d}.delta").write_bytes(payload)
        manifest = replace(manifest, extra={"delta": True})  # receivers keep their buckets for the next one
        if is_full:
            return manifest
        renamed = tuple(replace(b, source=f"bucket-{b.index:05d}.delta") for b in manifest.buckets)
        return replace(manifest, buckets=renamed, base_version=self.version)

    def _write_full(self, index: int, buffer_B: Tensor, specs: list[TensorSpec]) -> None:
        tensors = {spec.name: view_of(buffer_B, spec) for spec in specs}
        save_file(tensors, self._writing / f"bucket-{index:05d}.safetensors")

    def _prune(self) -> None:
        """Keep everything since the whole version before the last: the newest chain, and the one being read."""
        if len(self._full_versions) < 3:
            return
        self._full_versions = self._full_versions[-2:]
        for place in self.folder.glob("v*"):
            if int(place.name[1:]) < self._full_versions[0]:
                shutil.rmtree(place, ignore_errors=True)


class DiskReceiver(Receiver):
    transport = "disk"

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config)
        self._held: list[Tensor] = []
        self._held_version: PolicyVersion | None = None

    def fetch(self, location: str, name: str) -> bytes | bytearray:
        """The bytes of one file of the transfer."""
        path = Path(location) / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise WeightSyncError(f"{path} cannot be read: {error}") from error

    def buckets(self, manifest: WeightManifest) -> Iterator[tuple[BucketSpec, Tensor]]:
        chain = [manifest]
        while (base := chain[-1].base_version) is not None and base != self._held_version:
            text = self.fetch(manifest.location, f"{version_folder(base)}/manifest.json")
            chain.append(manifest_from_json(text, manifest))
        for step in reversed(chain):
            keeps, whole = step.extra.get("delta") is True, []
            for bucket in step.buckets:
                buffer_B = self.read(step, bucket)
                if keeps:
                    whole.append(buffer_B)
                if step is manifest:
                    yield bucket, buffer_B
                else:
                    self._start_check(step, bucket, buffer_B)()
            self._held, self._held_version = whole, step.version if keeps else None

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        """Where it is a difference, to what is held."""
        data = self.fetch(manifest.location, f"{version_folder(manifest.version)}/{bucket.source}")
        if manifest.base_version is None:
            return _unpack(data, manifest, bucket)
        if bucket.index >= len(self._held):
            raise WeightSyncError(f"version {manifest.version}: bucket {bucket.index} differs from nothing")
        return delta.decode(data, self._held[bucket.index])


def _unpack(data: bytes | bytearray, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
    where = f"version {manifest.version}, {bucket.source}"
    try:
        tensors = load(bytes(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise WeightSyncError(f"{where}: not a whole safetensors file: {error}") from error
    buffer_B = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for spec in manifest.in_bucket(bucket.index):
        tensor = tensors.get(spec.name)
        if tensor is None or tuple(tensor.shape) != spec.shape or tensor.dtype is not spec.torch_dtype:
            got = "nothing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
            raise WeightSyncError(
                f"{where}: {spec.name!r} should be {spec.shape} {spec.dtype}, the file has {got}"
            )
        view_of(buffer_B, spec).copy_(tensor)
    return buffer_B


def version_folder(version: PolicyVersion) -> str:
    return f"v{version:010d}"


def manifest_to_json(manifest: WeightManifest) -> str:
    fields = asdict(manifest)
    for bucket in fields["buckets"]:
        del bucket["handle"]
    fields["key"] = manifest.key.hex()
    return json.dumps(fields)


def manifest_from_json(text: bytes | bytearray, newer: WeightManifest) -> WeightManifest:
    """`newer` is the manifest that led here: both lie at the same place."""
    try:
        fields: dict[str, Any] = json.loads(text)
        tensors = tuple(TensorSpec(**{**t, "shape": tuple(t["shape"])}) for t in fields.pop("tensors"))
        buckets = tuple(BucketSpec(**b) for b in fields.pop("buckets"))
        del fields["key"]
        manifest = WeightManifest(**fields, tensors=tensors, buckets=buckets)
    except (ValueError, KeyError, TypeError) as error:
        raise WeightSyncError(f"a manifest before version {newer.version} is damaged: {error}") from error
    manifest.check()
    return replace(manifest, location=newer.location, transport=newer.transport, key=newer.key)


class DiskTransport:
    class Config(FileConfig):
        type: Literal["disk"] = "disk"
        folder: str = ""
        """Seen by trainer and engines. Empty: that of temporary files. What is written there is removed at the end, and
        what a kill has left of it by the same user's next run on the machine."""

    publisher = DiskPublisher
    receiver = DiskReceiver
