"""What a receiver must know about one published version: which tensors lie where. Small; holds no weights.

Made by a Publisher, handed to every engine. On its way it is sealed: whoever only passes it on (the driver, once a
step) reads its version and size and does not build a record for every tensor of the model.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rill.errors import WeightSyncError
from rill.types import PolicyVersion
from rill.weights.canary import CanaryProof


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bucket: int
    offset: int
    num_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One buffer of the transfer."""

    index: int
    num_bytes: int
    checksum: int | None = None
    """Of every byte, where the publisher verifies in full."""
    sampled_checksum: int | None = None
    """Of some places, where the publisher verifies by samples."""
    source: str = ""
    """Where the transport keeps it: a segment, a file, an address."""
    handle: bytes = b""
    """A pickled handle, for transports that need one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Everything a receiver must know about one published version. Small and picklable; holds no weights."""

    version: PolicyVersion
    transport: str
    location: str
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...]
    base_version: PolicyVersion | None = None
    """Set when the buckets hold differences to this version. None: whole weights."""
    is_collective: bool = False
    """Both ends move at once: the publisher serves, and all engines pull together."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    owner: str = ""
    """The publishing process, as its cluster knows it: receivers that hear of its death let go of its memory."""
    key: bytes = field(default=b"", repr=False)
    """What the publisher's server asks for and signs with. Never shown."""

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def in_bucket(self, index: int) -> list[TensorSpec]:
        return [spec for spec in self.tensors if spec.bucket == index]

    def seal(self, proof: CanaryProof | None = None) -> SealedManifest:
        return SealedManifest(
            version=self.version,
            num_bytes=self.num_bytes,
            is_collective=self.is_collective,
            content=pickle.dumps(self, protocol=5),
            proof=pickle.dumps(proof, protocol=5),
        )

    def check(self) -> None:
        """A manifest that contradicts itself was damaged on its way."""
        names = [spec.name for spec in self.tensors]
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if twice:
            raise WeightSyncError(f"version {self.version}: {sorted(twice)[0]!r} is listed more than once")
        if [bucket.index for bucket in self.buckets] != list(range(len(self.buckets))):
            found = [bucket.index for bucket in self.buckets]
            raise WeightSyncError(f"version {self.version}: buckets are missing or out of order: {found}")
        for spec in self.tensors:
            if not 0 <= spec.bucket < len(self.buckets):
                raise WeightSyncError(f"version {self.version}: {spec.name!r} lies in no bucket")
            size = math.prod(spec.shape) * spec.torch_dtype.itemsize
            if spec.num_bytes != size or spec.offset + size > self.buckets[spec.bucket].num_bytes:
                raise WeightSyncError(
                    f"version {self.version}: {spec.name!r} does not fit its place in the bucket"
                )


class SealedManifest(NamedTuple):
    """A manifest on its way, with what engines that took it must answer. `open` and `open_proof` give them back.

    A tuple: cheap to read and to write, at every step and in every engine's process.
    """

    version: PolicyVersion
    num_bytes: int
    is_collective: bool
    content: bytes
    proof: bytes

    def open(self) -> WeightManifest:
        manifest = pickle.loads(self.content)
        assert isinstance(manifest, WeightManifest)
        return manifest

    def open_proof(self) -> CanaryProof | None:
        proof = pickle.loads(self.proof)
        assert proof is None or isinstance(proof, CanaryProof)
        return proof

    def with_content(self, manifest: WeightManifest) -> SealedManifest:
        """Another way to the same weights, with the same proof."""
        assert manifest.version == self.version
        return manifest.seal()._replace(proof=self.proof)
