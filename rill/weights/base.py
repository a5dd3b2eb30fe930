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

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from rill.config import PartConfig
from rill.errors import WeightSyncError
from rill.registry import Registry
from rill.types import PolicyVersion
from rill.weights.buckets import (
    NamedTensors,
    fill,
    full_tensor,
    is_finite,
    layout,
    plan_buckets,
    start_all_finite,
    views_of,
)
from rill.weights.checksum import start_checksum, start_sampled_checksum
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest

TRANSPORTS = Registry(
    "weight transport",
    {
        "auto": "rill.weights.auto:AutoTransport",
        "shm": "rill.weights.shm:ShmTransport",
        "cuda_ipc": "rill.weights.cuda_ipc:CudaIpcTransport",
        "distributed": "rill.weights.distributed:DistributedTransport",
        "disk": "rill.weights.disk:DiskTransport",
        "tcp": "rill.weights.tcp:TcpTransport",
    },
)


LOOPBACK = "127.0.0.1"


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

    def seated(self, *, rank: int, num_receivers: int) -> Self:
        """As one end has it: rank 0 publishes, receivers count from 1. Most transports need not know."""
        return self

    def reached_at(self, host: str) -> Self:
        """As the publisher has it, on a machine that others reach under this address. Most need not know."""
        return self


_Begun = tuple[list[TensorSpec], Callable[[], BucketSpec]]
"""A bucket in its buffer, and the call that waits for what was asked about it and seals it."""


class Publisher(ABC):
    """The trainer's side. One per run, on the rank that gathers; the other ranks call `take_part`."""

    transport: str
    keeps_buckets = False
    """All buffers of a version are there at once, so that a GPU may fill and sum up all before the host waits."""

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
        begun: Iterable[_Begun] = self._gather(named_tensors, version)
        for specs, sealed in list(begun) if self.keeps_buckets else begun:
            buckets.append(sealed())
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

    def for_one(self, manifest: WeightManifest) -> WeightManifest:
        """The newest version, as a single engine can pull it while the others and the trainer go on."""
        return manifest

    def close(self) -> None:
        """Give back memory, files and ports."""

    # --- what a transport writes ---------------------------------------------------------------------------

    def begin(self, version: PolicyVersion) -> None:
        """Called before the first bucket."""

    @abstractmethod
    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        """The uint8 buffer that bucket `index` is gathered in."""

    def views(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        """The places of a bucket's tensors in its buffer."""
        return views_of(buffer_B, specs)

    @abstractmethod
    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        """The bucket is whole: make it reachable and say where."""

    @abstractmethod
    def location(self, version: PolicyVersion) -> str: ...

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        """All buckets are sealed: make the version visible."""
        return manifest

    def _gather(self, named_tensors: NamedTensors, version: PolicyVersion) -> Iterator[_Begun]:
        seen: set[str] = set()
        for index, members in enumerate(plan_buckets(named_tensors, self.settings.bucket_bytes)):
            for name, _ in members:
                if name in seen:
                    raise WeightSyncError(f"{name!r} was given twice for one version")
                seen.add(name)
            yield self._begin_bucket(index, members, version)

    def _begin_bucket(self, index: int, members: list[tuple[str, Tensor]], version: PolicyVersion) -> _Begun:
        """Fill a bucket and have its device work out what is asked about it."""
        specs, num_bytes = layout(members, index)
        buffer_B = self.allocate(index, num_bytes, members[0][1].device)
        fill(buffer_B, members, specs, self.views(buffer_B, specs))
        verify = self.settings.verify
        are_finite = start_all_finite(buffer_B, members) if self.settings.check_finite else lambda: True
        checksum = start_checksum(buffer_B) if verify is Verify.FULL else None
        sampled = start_sampled_checksum(buffer_B, int(version)) if verify is Verify.SAMPLED else None

        def sealed() -> BucketSpec:
            if not are_finite():
                bad = next(name for name, tensor in members if not is_finite(tensor))
                raise WeightSyncError(
                    f"{bad!r} has values that are not finite: these weights must not be published"
                )
            bucket = BucketSpec(
                index=index,
                num_bytes=num_bytes,
                checksum=checksum and checksum(),
                sampled_checksum=sampled and sampled(),
            )
            return self.seal(bucket, buffer_B, specs)

        return specs, sealed


class Receiver(ABC):
    """The engine's side. Yields tensors that stay valid until the next one is asked for from another bucket."""

    transport: str
    has_all_buckets = False
    """read() of every bucket works at once, so that a GPU may verify all of them before the host waits."""

    def __init__(self, config: TransportConfig) -> None:
        self.settings = config
        self.version: PolicyVersion | None = None

    def pull(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the version, verified. The receiver's version changes when the last one has been taken."""
        self._check_manifest(manifest)
        delivered: set[str] = set()
        buckets = (
            (b, buffer_B, self._start_check(manifest, b, buffer_B)) for b, buffer_B in self.buckets(manifest)
        )
        for bucket, buffer_B, check in list(buckets) if self.has_all_buckets else buckets:
            check()
            specs = manifest.in_bucket(bucket.index)
            for spec, whole in zip(specs, self.views(buffer_B, specs), strict=True):
                yield spec.name, whole
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

    def views(self, buffer_B: Tensor, specs: list[TensorSpec]) -> list[Tensor]:
        """A bucket's tensors in its buffer."""
        return views_of(buffer_B, specs)

    def bucket_taken(self, manifest: WeightManifest, bucket: BucketSpec) -> None:
        """The consumer is done with the bucket's tensors."""

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

    def _start_check(
        self, manifest: WeightManifest, bucket: BucketSpec, buffer_B: Tensor
    ) -> Callable[[], None]:
        """The call that it returns waits for the answer, and raises unless these are the published bytes."""
        where = f"version {manifest.version}, bucket {bucket.index} of {len(manifest.buckets)}"
        if buffer_B.numel() != bucket.num_bytes:
            raise WeightSyncError(
                f"{where}: {buffer_B.numel()} bytes arrived, {bucket.num_bytes} were published"
            )
        verify = self.settings.verify
        if verify is Verify.OFF:
            return lambda: None
        if verify is Verify.SAMPLED and bucket.sampled_checksum is not None:
            found, published = (
                start_sampled_checksum(buffer_B, int(manifest.version)),
                bucket.sampled_checksum,
            )
        elif bucket.checksum is not None:
            found, published = start_checksum(buffer_B), bucket.checksum
        else:
            raise WeightSyncError(
                f"{where} comes without the checksum that verify={verify} compares: set the same on both sides"
            )

        def check() -> None:
            if found() != published:
                raise WeightSyncError(
                    f"{where}: the bytes that arrived over {manifest.transport} at {manifest.location} are not those "
                    "that were published (checksum differs): the transfer was damaged, out of order or stale"
                )

        return check


def seated(config: PartConfig, *, rank: int, num_receivers: int) -> TransportConfig:
    assert isinstance(config, TransportConfig), f"{config.type} is no transport"
    return config.seated(rank=rank, num_receivers=num_receivers)


def open_publisher(config: PartConfig, *, host: str = LOOPBACK) -> Publisher:
    """host: the address under which other machines reach this one."""
    assert isinstance(config, TransportConfig), f"{config.type} is no transport"
    publisher: Publisher = TRANSPORTS.load(config.type).publisher(config.reached_at(host))
    return publisher


def open_receiver(config: PartConfig) -> Receiver:
    receiver: Receiver = TRANSPORTS.load(config.type).receiver(config)
    return receiver


def take_part(named_tensors: NamedTensors) -> int:
    """For ranks that do not publish: walk through the gathers so that they complete. Returns how many there were."""
    return sum(1 for _name, tensor in named_tensors if full_tensor(tensor) is not None)
