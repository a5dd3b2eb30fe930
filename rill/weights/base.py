"""How trained weights reach engines: the trainer publishes a version, engines pull it.

    trainer ── named tensors ──▶ Publisher ── buckets over a transport ──▶ Receiver ── tensors ──▶ engine.update_weights
                                     └────────── WeightManifest (small) ──────────▲

Callers: trainer workers (publish), rollout workers (pull), rill.weights.sync (both ends' bookkeeping). Neither side
knows the other; training and inference meet here and nowhere else.

Guarantees of every transport, kept by the two base classes:
- versions grow: a receiver never goes back, and never takes one version for another;
- every tensor of the manifest arrives exactly once, with its shape and dtype;
- every bucket's bytes are those that were published: size and checksum are compared before a tensor is handed on;
- weights that are not finite are refused at the source, by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from rill.config import PartConfig
from rill.errors import WeightSyncError
from rill.registry import Registry
from rill.types import PolicyVersion
from rill.weights.checksum import checksum, sampled_checksum
from rill.weights.resharding import ShardSpec, full_tensor, shard_of

TRANSPORTS = Registry(
    "weight transport",
    {
        "inproc": "rill.weights.inproc:InprocTransport",
        "shm": "rill.weights.shm:ShmTransport",
        "cuda_ipc": "rill.weights.cuda_ipc:CudaIpcTransport",
        "distributed": "rill.weights.distributed:DistributedTransport",
        "disk": "rill.weights.disk:DiskTransport",
        "http": "rill.weights.http:HttpTransport",
    },
)

ALIGNMENT = 64
"""Tensors start at multiples of this inside a bucket, so that any dtype can be viewed in place."""

NamedTensors = Iterable[tuple[str, Tensor]]


class Verify(StrEnum):
    FULL = "full"  # every byte
    SAMPLED = "sampled"  # about 64 KiB of every bucket, other places every version
    OFF = "off"


class TransportConfig(PartConfig):
    """What every transport has."""

    bucket_bytes: int = Field(default=64 * 2**20, ge=1)
    """Tensors travel in buckets of about this size; a larger tensor is a bucket of its own."""
    verify: Verify = Verify.FULL
    """How much of the received bytes is compared with what was published."""
    check_finite: bool = True
    """Refuse to publish weights with NaN or infinity in them."""


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
    checksum: int
    sampled_checksum: int
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
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    def in_bucket(self, index: int) -> list[TensorSpec]:
        return [spec for spec in self.tensors if spec.bucket == index]

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


class Publisher(ABC):
    """The trainer's side. One per run, on the rank that gathers; the other ranks call `take_part`."""

    transport: str

    def __init__(self, config: TransportConfig) -> None:
        self.settings = config
        self.version: PolicyVersion | None = None

    def publish(self, named_tensors: NamedTensors, version: PolicyVersion) -> WeightManifest:
        """Make this version available. The tensors may change as soon as this returns."""
        if self.version is not None and version <= self.version:
            raise WeightSyncError(
                f"version {version} was to be published after {self.version}: versions only grow"
            )
        self.begin(version)
        tensors: list[TensorSpec] = []
        buckets: list[BucketSpec] = []
        seen: set[str] = set()
        for members in plan_buckets(named_tensors, self.settings.bucket_bytes):
            for name, tensor in members:
                self._check_member(name, tensor, seen)
            specs, num_bytes = layout(members, len(buckets))
            buffer_B = self.allocate(len(buckets), num_bytes, members[0][1].device)
            fill(buffer_B, members, specs)
            bucket = BucketSpec(
                index=len(buckets),
                num_bytes=num_bytes,
                checksum=checksum(buffer_B),
                sampled_checksum=sampled_checksum(buffer_B, int(version)),
            )
            buckets.append(self.seal(bucket, buffer_B, specs))
            tensors += specs
        if not buckets:
            raise WeightSyncError(f"version {version}: there were no tensors to publish")
        manifest = WeightManifest(
            version=version,
            transport=self.transport,
            location=self.location(version),
            tensors=tuple(tensors),
            buckets=tuple(buckets),
        )
        manifest = self.finish(manifest)
        self.version = version
        return manifest

    def serve(self, manifest: WeightManifest, timeout_s: float = 600.0) -> None:
        """Take part in the receivers' pulls, for transports where both ends move at once. Others return at once."""
        del manifest, timeout_s

    def close(self) -> None:
        """Give back memory, files and ports."""

    # --- what a transport writes ---------------------------------------------------------------------------

    def begin(self, version: PolicyVersion) -> None:
        """Called before the first bucket."""
        del version

    @abstractmethod
    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        """The uint8 buffer that bucket `index` is gathered in."""

    @abstractmethod
    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        """The bucket is whole: make it reachable and say where."""

    @abstractmethod
    def location(self, version: PolicyVersion) -> str: ...

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        """All buckets are sealed: make the version visible."""
        return manifest

    def _check_member(self, name: str, tensor: Tensor, seen: set[str]) -> None:
        if name in seen:
            raise WeightSyncError(f"{name!r} was given twice for one version")
        seen.add(name)
        if self.settings.check_finite and tensor.is_floating_point() and not is_finite(tensor):
            raise WeightSyncError(
                f"{name!r} has values that are not finite: these weights must not be published"
            )


class Receiver(ABC):
    """The engine's side. Yields tensors that stay valid until the next one is asked for from another bucket."""

    transport: str

    def __init__(self, config: TransportConfig) -> None:
        self.settings = config
        self.version: PolicyVersion | None = None

    def pull(
        self, manifest: WeightManifest, shards: Mapping[str, ShardSpec] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the version, verified; `shards` cuts those it names to this rank's slice.

        The receiver's version changes only when the last tensor has been taken.
        """
        self._check_manifest(manifest)
        delivered: set[str] = set()
        for bucket, buffer_B in self.buckets(manifest):
            self._check_bucket(manifest, bucket, buffer_B)
            for spec in manifest.in_bucket(bucket.index):
                whole = view_of(buffer_B, spec)
                yield spec.name, shard_of(spec.name, whole, shards or {})
                delivered.add(spec.name)
            self.bucket_taken(manifest, bucket)
        missing = [spec.name for spec in manifest.tensors if spec.name not in delivered]
        if missing:
            raise WeightSyncError(
                f"version {manifest.version}: {len(missing)} tensors did not arrive, {missing[0]!r} among them"
            )
        self.version = manifest.version

    def close(self) -> None:
        """Let go of memory and connections."""

    @abstractmethod
    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        """The bytes of one bucket, as uint8 of bucket.num_bytes."""

    def buckets(self, manifest: WeightManifest) -> Iterator[tuple[BucketSpec, Tensor]]:
        for bucket in manifest.buckets:
            yield bucket, self.read(manifest, bucket)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        """The consumer is done with the bucket's tensors."""
        del manifest, bucket

    def _check_manifest(self, manifest: WeightManifest) -> None:
        if manifest.transport != self.transport:
            raise WeightSyncError(
                f"version {manifest.version} was published over {manifest.transport!r}, this receiver reads "
                f"{self.transport!r}: set the same transport on both sides"
            )
        if self.version is not None and manifest.version <= self.version:
            raise WeightSyncError(
                f"version {manifest.version} was offered to a receiver that holds {self.version}: versions only grow"
            )
        manifest.check()

    def _check_bucket(self, manifest: WeightManifest, bucket: BucketSpec, buffer_B: Tensor) -> None:
        where = f"version {manifest.version}, bucket {bucket.index} of {len(manifest.buckets)}"
        if buffer_B.numel() != bucket.num_bytes:
            raise WeightSyncError(
                f"{where}: {buffer_B.numel()} bytes arrived, {bucket.num_bytes} were published"
            )
        match self.settings.verify:
            case Verify.FULL:
                is_same = checksum(buffer_B) == bucket.checksum
            case Verify.SAMPLED:
                is_same = sampled_checksum(buffer_B, int(manifest.version)) == bucket.sampled_checksum
            case Verify.OFF:
                is_same = True
        if not is_same:
            raise WeightSyncError(
                f"{where}: the bytes that arrived over {manifest.transport} at {manifest.location} are not those "
                "that were published (checksum differs): the transfer was damaged, out of order or stale"
            )


def open_publisher(config: PartConfig) -> Publisher:
    publisher: Publisher = TRANSPORTS.load(config.type).publisher(config)
    return publisher


def open_receiver(config: PartConfig) -> Receiver:
    receiver: Receiver = TRANSPORTS.load(config.type).receiver(config)
    return receiver


def take_part(named_tensors: NamedTensors) -> int:
    """For ranks that do not publish: walk through the gathers so that they complete. Returns how many there were."""
    return sum(1 for _name, tensor in named_tensors if full_tensor(tensor) is not None)


# --- buckets -----------------------------------------------------------------------------------------------


def plan_buckets(named_tensors: NamedTensors, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors as they come, without holding more than one bucket of them. One device to a bucket."""
    members: list[tuple[str, Tensor]] = []
    size = 0
    for name, given in named_tensors:
        tensor = full_tensor(given).detach()
        num_bytes = _aligned(tensor.numel() * tensor.element_size())
        if members and (size + num_bytes > bucket_bytes or members[0][1].device != tensor.device):
            yield members
            members, size = [], 0
        members.append((name, tensor))
        size += num_bytes
    if members:
        yield members


def layout(members: list[tuple[str, Tensor]], bucket: int) -> tuple[list[TensorSpec], int]:
    specs, offset = [], 0
    for name, tensor in members:
        num_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype,
                bucket=bucket,
                offset=offset,
                num_bytes=num_bytes,
            )
        )
        offset += _aligned(num_bytes)
    return specs, offset


def fill(buffer_B: Tensor, members: list[tuple[str, Tensor]], specs: list[TensorSpec]) -> None:
    """Copy the tensors to their places and zero the gaps, so that equal weights have equal checksums."""
    for (_, tensor), spec in zip(members, specs, strict=True):
        view_of(buffer_B, spec).copy_(tensor)
        buffer_B[spec.offset + spec.num_bytes : spec.offset + _aligned(spec.num_bytes)].zero_()


def view_of(buffer_B: Tensor, spec: TensorSpec) -> Tensor:
    return buffer_B[spec.offset : spec.offset + spec.num_bytes].view(spec.torch_dtype).view(spec.shape)


_INFINITY_BITS: dict[torch.dtype, tuple[str, int]] = {
    torch.bfloat16: ("16", 0x7F80),
    torch.float16: ("16", 0x7C00),
    torch.float32: ("32", 0x7F80_0000),
    torch.float64: ("64", 0x7FF0_0000_0000_0000),
}


def is_finite(tensor: Tensor) -> bool:
    """Without a temporary. On a CPU by the bits: infinity and NaN are the largest numbers of their sign when read
    as integers, and an integer maximum runs at the speed of memory where a float one does not."""
    if tensor.numel() == 0:
        return True
    if tensor.device.type == "cpu" and tensor.dtype in _INFINITY_BITS and tensor.is_contiguous():
        width, infinity = _INFINITY_BITS[tensor.dtype]
        bits = tensor.reshape(-1).view(getattr(torch, f"int{width}")).numpy()
        sign = 1 << (int(width) - 1)
        return bool(bits.max() < infinity) and int(bits.view(f"uint{width}").max()) < (sign | infinity)
    if tensor.dtype.itemsize == 1:  # 8-bit floats have no minimum kernel
        return bool(torch.isfinite(tensor.to(torch.float32)).all())
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _aligned(num_bytes: int) -> int:
    return max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)


def with_source(bucket: BucketSpec, source: str) -> BucketSpec:
    return replace(bucket, source=source)
