"""Shared memory that fails in a chosen way from a chosen version on; named in a recipe by its "module:Class" path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from torch import Tensor

from rill.weights.manifest import BucketSpec, WeightManifest
from rill.weights.shm import ShmPublisher, ShmReceiver, ShmTransport

TRANSPORT = "tests.workflows.broken_transport:BrokenTransport"


class BrokenTransport:
    class Config(ShmTransport.Config):
        type: str = TRANSPORT  # type: ignore[assignment]
        fault: Literal["dropped bucket", "wrong order", "stale bytes", "half written", "flipped bit"]
        fault_from: int = 3
        """The first version that is damaged."""
        once: str = ""
        """A file that is made at the first fault and ends them. Empty: the fault stays."""

    @staticmethod
    def publisher(config: Config) -> ShmPublisher:
        return ShmPublisher(config)

    @staticmethod
    def receiver(config: Config) -> ShmReceiver:
        return BrokenReceiver(config)


class BrokenReceiver(ShmReceiver):
    def __init__(self, config: BrokenTransport.Config) -> None:
        super().__init__(config)
        self._fault = config
        self._last: list[Tensor] = []

    def buckets(self, manifest: WeightManifest) -> Iterator[tuple[BucketSpec, Tensor]]:
        buckets = [(bucket, buffer.clone()) for bucket, buffer in super().buckets(manifest)]
        assert len(buckets) > 2, "the fault needs several buckets"
        if int(manifest.version) >= self._fault.fault_from and not self._is_over():
            buckets = self._damaged(buckets)
        self._last = [buffer for _, buffer in buckets]
        yield from buckets

    def _is_over(self) -> bool:
        if not self._fault.once:
            return False
        if Path(self._fault.once).exists():
            return True
        Path(self._fault.once).touch()
        return False

    def _damaged(self, buckets: list[tuple[BucketSpec, Tensor]]) -> list[tuple[BucketSpec, Tensor]]:
        specs, buffers = [spec for spec, _ in buckets], [buffer for _, buffer in buckets]
        match self._fault.fault:
            case "dropped bucket":
                return buckets[:1] + buckets[2:]
            case "wrong order":
                buffers = [buffers[1], buffers[0], *buffers[2:]]
            case "stale bytes":
                buffers = self._last or [buffer * 0 for buffer in buffers]
            case "half written":
                buffers = [*buffers[:-1], buffers[-1][: len(buffers[-1]) // 2]]
            case "flipped bit":
                buffers[1][5] ^= 1
        return list(zip(specs, buffers, strict=True))
