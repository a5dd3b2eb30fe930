"""Over torch.distributed: every bucket is one broadcast from the publisher to all receivers at once.

Both ends join one process group (gloo on CPU, nccl between GPUs) and move together:

    publisher   publish: gather, stage, checksum ──▶ manifest   │ serve:  broadcast 0, 1, 2 …
    receiver                                       manifest ──▶ │ pull:   broadcast 0, 1, 2 … verify each

`publish` returns once the weights are staged, so the trainer goes on; `serve` and the receivers' pulls run beside
one another afterwards. A pull that finds a damaged bucket still takes part in the remaining broadcasts before it
raises, so that the others are not left waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

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
from rill.weights.resharding import ShardSpec

# torch's stubs leave out the collectives of a backend that is used without a ProcessGroup around it.
Backend = Any


class DistributedTransport:
    class Config(TransportConfig):
        type: Literal["distributed"] = "distributed"
        address: str = "127.0.0.1:29511"
        """Where rank 0, the publisher, can be reached: host:port."""
        world: int = Field(default=2, ge=2)
        """The publisher and all receivers."""
        rank: int = Field(default=0, ge=0)
        """0 is the publisher; every receiver has its own."""
        backend: Literal["gloo", "nccl"] = "gloo"
        timeout_s: float = Field(default=300.0, gt=0)
        """Deadline of joining, and of one broadcast."""

    @staticmethod
    def publisher(config: Config) -> DistributedPublisher:
        return DistributedPublisher(config)

    @staticmethod
    def receiver(config: Config) -> DistributedReceiver:
        return DistributedReceiver(config)


class DistributedPublisher(Publisher):
    transport = "distributed"

    def __init__(self, config: DistributedTransport.Config) -> None:
        super().__init__(config)
        if config.rank != 0:
            raise WeightSyncError(
                f"the publisher of a distributed transport is rank 0, got rank {config.rank}"
            )
        self.config = config
        self._group: Backend | None = None
        self._staged: list[Tensor] = []
        self._staged_version: PolicyVersion | None = None

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
        return with_source(bucket, str(bucket.index))

    def location(self, version: PolicyVersion) -> str:
        return self.config.address

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        del self._staged[len(manifest.buckets) :]
        self._staged_version = manifest.version
        return manifest

    def serve(self, manifest: WeightManifest, timeout_s: float = 600.0) -> None:
        """Send every bucket once, to all receivers together."""
        if self._staged_version != manifest.version:
            raise WeightSyncError(
                f"version {manifest.version} is not staged any more: {self._staged_version} is"
            )
        group = self._group = self._group or join(self.config)
        for buffer_B in self._staged:
            broadcast(group, buffer_B, self.config, f"sending version {manifest.version}")

    def close(self) -> None:
        self._group = None
        self._staged.clear()


class DistributedReceiver(Receiver):
    transport = "distributed"

    def __init__(self, config: DistributedTransport.Config) -> None:
        super().__init__(config)
        self.config = config
        self._group: Backend | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._num_taken = 0

    def pull(
        self, manifest: WeightManifest, shards: Mapping[str, ShardSpec] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        self._num_taken = 0
        try:
            yield from super().pull(manifest, shards)
        finally:
            # The broadcasts are collective: leaving early would leave the publisher and the others waiting.
            for bucket in manifest.buckets[self._num_taken :]:
                self.read(manifest, bucket)

    def read(self, manifest: WeightManifest, bucket: BucketSpec) -> Tensor:
        group = self._group = self._group or join(self.config)
        if self._buffer.numel() < bucket.num_bytes:
            device = torch.cuda.current_device() if self.config.backend == "nccl" else "cpu"
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        buffer_B = self._buffer[: bucket.num_bytes]
        self._num_taken += 1
        broadcast(
            group, buffer_B, self.config, f"receiving version {manifest.version}, bucket {bucket.index}"
        )
        return buffer_B

    def close(self) -> None:
        self._group = None


def join(config: DistributedTransport.Config) -> Backend:
    """A process group of its own: it does not touch the trainer's default group."""
    host, _, port = config.address.rpartition(":")
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store = TCPStore(host, int(port), config.world, config.rank == 0, timeout)
        prefixed = PrefixStore("rill-weights", store)
        if config.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(prefixed, config.rank, config.world, options)
        return dist.ProcessGroupGloo(prefixed, config.rank, config.world, timeout)
    except (RuntimeError, dist.DistError) as error:
        raise WeightSyncError(
            f"rank {config.rank} of {config.world} could not join the weight group at {config.address} within "
            f"{config.timeout_s:g} s: {error}"
        ) from error


def broadcast(group: Backend, buffer_B: Tensor, config: DistributedTransport.Config, what: str) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    try:
        group.broadcast([buffer_B], options).wait(timedelta(seconds=config.timeout_s))
    except RuntimeError as error:
        raise WeightSyncError(f"{what} failed or passed {config.timeout_s:g} s: {error}") from error
