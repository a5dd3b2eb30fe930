"""Over torch.distributed: every bucket is one broadcast from the publisher to all receivers at once.

    publisher   publish: gather, stage, checksum ──▶ manifest   │ serve:  broadcast 0, 1, 2 …
    receiver                                       manifest ──▶ │ pull:   broadcast 0, 1, 2 … verify each

Both ends join one process group (gloo on CPU, nccl between GPUs). `publish` returns once the weights are staged;
`serve` and the pulls run beside one another afterwards. A pull that finds a damaged bucket still takes part in the
remaining broadcasts before it raises. A receiver that was started again is in no group: it gets the staged weights over
TCP (`for_one`), and the next version names a new group (its generation), which both ends join before they move.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from rill.errors import ConfigError, WeightSyncError
from rill.runtime.transfer import collective
from rill.types import PolicyVersion
from rill.weights.base import Publisher, Receiver, TransportConfig
from rill.weights.buckets import view_of
from rill.weights.manifest import BucketSpec, TensorSpec, WeightManifest
from rill.weights.tcp import TcpPublisher, TcpReceiver, TcpTransport

GENERATION = "generation"
"""In a manifest: which group its version is sent in."""


class DistributedPublisher(Publisher):
    transport = "distributed"

    def __init__(self, config: DistributedTransport.Config) -> None:
        super().__init__(config)
        if config.rank != 0:
            raise WeightSyncError(f"the publisher of a distributed transport is rank 0, not {config.rank}")
        self.config = config
        # Kept for the run: the receivers of every group find each other through it.
        self._store = meet(config)
        self._group: Any = None
        self._generation = 0
        self._staged: list[Tensor] = []
        self._staged_version: PolicyVersion | None = None
        self._aside: TcpPublisher | None = None
        self._late: WeightManifest | None = None

    def begin(self, version: PolicyVersion) -> None:
        self._staged_version = None

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        target = device if self.config.backend == "nccl" else torch.device("cpu")
        if index < len(self._staged):
            spare = self._staged[index]
            if spare.numel() == num_bytes and spare.device == target:
                return spare
        return torch.empty(num_bytes, dtype=torch.uint8, device=target)

    def seal(self, bucket: BucketSpec, buffer_B: Tensor, specs: list[TensorSpec]) -> BucketSpec:
        self._staged[bucket.index : bucket.index + 1] = [buffer_B]
        return replace(bucket, source=str(bucket.index))

    def location(self, version: PolicyVersion) -> str:
        return self.config.address

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        del self._staged[len(manifest.buckets) :]
        self._staged_version = manifest.version
        return replace(manifest, is_collective=True, extra={GENERATION: self._generation})

    def serve(self, manifest: WeightManifest, timeout_s: float = 600.0) -> None:
        """Send every bucket once, to all receivers together."""
        self._check_staged(manifest)
        try:
            self._group = self._group or join(self._store, self.config, int(manifest.extra[GENERATION]))
            for buffer_B in self._staged:
                broadcast(self._group, buffer_B, self.config, f"sending version {manifest.version}")
        except WeightSyncError:
            self._leave()  # a member is lost, and the group with it
            raise

    def for_one(self, manifest: WeightManifest) -> WeightManifest:
        """The staged weights over TCP. Whoever needs them is a new process, so the next version needs a new group."""
        self._check_staged(manifest)
        if self._aside is None:
            host = self.config.address.rpartition(":")[0]
            self._aside = TcpPublisher(TcpTransport.Config(host=host))
        self._leave()
        if self._aside.version == manifest.version:
            assert self._late is not None
            return self._late
        tensors = ((spec.name, view_of(self._staged[spec.bucket], spec)) for spec in manifest.tensors)
        self._late = self._aside.publish(tensors, manifest.version)
        return self._late

    def close(self) -> None:
        self._group = None
        self._staged.clear()
        if self._aside is not None:
            self._aside.close()

    def _check_staged(self, manifest: WeightManifest) -> None:
        if self._staged_version != manifest.version:
            raise WeightSyncError(f"version {manifest.version} is not staged, {self._staged_version} is")

    def _leave(self) -> None:
        """The next version is sent in another group; what is left in the store of this one is in nobody's way."""
        self._group, self._generation = None, self._generation + 1


class DistributedReceiver(Receiver):
    transport = "distributed"

    def __init__(self, config: DistributedTransport.Config) -> None:
        super().__init__(config)
        self.config = config
        self._group: Any = None
        self._generation = -1
        self._store: Any = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._num_taken = 0

    def pull(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        if manifest.transport == TcpReceiver.transport:
            yield from self._pull_alone(manifest)
            return
        self._num_taken = 0
        try:
            self._join(manifest)
            yield from super().pull(manifest)
        finally:
            # The broadcasts are collective: leaving early would leave the publisher and the others waiting.
            for bucket in manifest.buckets[self._num_taken :] if self._group is not None else ():
                self.read(manifest, bucket)

    def _pull_alone(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        aside = TcpReceiver(TcpTransport.Config(verify=self.config.verify))
        try:
            yield from aside.pull(manifest)
        finally:
            aside.close()
        self.version = manifest.version

    def _join(self, manifest: WeightManifest) -> None:
        """The group that this version is sent in."""
        generation = int(manifest.extra[GENERATION])
        if self._group is None or generation != self._generation:
            self._group = None
            self._store = self._store or meet(self.config)
            self._group = join(self._store, self.config, generation)
            self._generation = generation

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        group = self._group
        if group is None:
            raise WeightSyncError(f"version {manifest.version}: this receiver is in no group to receive it")
        if self._buffer.numel() < bucket.num_bytes:
            device = torch.cuda.current_device() if self.config.backend == "nccl" else "cpu"
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        buffer_B = self._buffer[: bucket.num_bytes]
        self._num_taken += 1
        try:
            broadcast(
                group, buffer_B, self.config, f"receiving version {manifest.version}, bucket {bucket.index}"
            )
        except WeightSyncError:
            self._group = (
                None  # a member is lost, and the group with it: the rest of the buckets will not come
            )
            raise
        return buffer_B

    def close(self) -> None:
        self._group = None


def meet(config: DistributedTransport.Config) -> Any:
    """Where the ends find each other; the publisher's process holds it."""
    host, _, port = config.address.rpartition(":")
    try:
        return collective.open_store(host, int(port), is_master=config.rank == 0, timeout_s=config.timeout_s)
    except RuntimeError as error:
        if config.rank == 0:
            raise ConfigError(
                f"the weight group cannot meet at {config.address} ({str(error).splitlines()[0]}): set "
                "sync.transport.address to an address of the trainer's machine and a free port"
            ) from error
        raise WeightSyncError(
            f"rank {config.rank} of {config.world} could not reach the weight group at {config.address} within "
            f"{config.timeout_s:g} s: {error}"
        ) from error


def join(store: Any, config: DistributedTransport.Config, generation: int) -> Any:
    """A process group of its own: it does not touch the trainer's default group."""
    name = f"rill-weights-{generation}"
    try:
        return collective.open_group(
            config.backend, store, config.rank, config.world, name=name, timeout_s=config.timeout_s
        )
    except RuntimeError as error:
        raise WeightSyncError(
            f"rank {config.rank} of {config.world} could not join the weight group at {config.address} within "
            f"{config.timeout_s:g} s: {error}"
        ) from error


def broadcast(group: Any, buffer_B: Tensor, config: DistributedTransport.Config, what: str) -> None:
    try:
        collective.broadcast_tensor(group, buffer_B, root=0, timeout_s=config.timeout_s)
    except RuntimeError as error:
        raise WeightSyncError(f"{what} failed or passed {config.timeout_s:g} s: {error}") from error


class DistributedTransport:
    class Config(TransportConfig):
        type: Literal["distributed"] = "distributed"
        address: str = "127.0.0.1:29511"
        """Where rank 0, the publisher, can be reached: host:port."""
        world: int = Field(default=2, ge=2)
        """The publisher and all receivers. A workflow fills it in."""
        rank: int = Field(default=0, ge=0)
        """0 is the publisher; every receiver has its own. A workflow fills it in."""
        backend: Literal["gloo", "nccl"] = "gloo"
        timeout_s: float = Field(default=300.0, gt=0)
        """Deadline of joining, and of one broadcast."""

        def seated(self, *, rank: int, num_receivers: int) -> Self:
            return self.model_copy(update={"rank": rank, "world": num_receivers + 1})

    publisher = DistributedPublisher
    receiver = DistributedReceiver
