"""A transport that drops, swaps, keeps or cuts what it carries is caught, whichever it is, and goes on after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.weights.base import Publisher, Receiver, open_publisher, open_receiver
from rill.weights.manifest import BucketSpec, WeightManifest
from tests.weights.scene import ends, publish, pulled, same, transport
from tests.weights.test_distributed import free_port

Pairs = list[tuple[BucketSpec, Tensor]]
Pull = Callable[[WeightManifest], dict[str, Tensor]]

FAULTS = ("dropped bucket", "wrong order", "stale cache", "half written", "flipped bit")
KINDS: dict[str, dict[str, Any]] = {
    "shm": {},
    "shm, by samples": {"verify": "sampled"},
    "disk": {},
    "tcp": {},
    "disk, differences": {"delta": True},
    "tcp, differences": {"delta": True},
    "distributed": {},
}
WAIT_S = 60.0


def damage(fault: str, pairs: Pairs, before: list[Tensor]) -> Pairs:
    specs, buffers = [spec for spec, _ in pairs], [buffer for _, buffer in pairs]
    match fault:
        case "dropped bucket":
            return pairs[:1] + pairs[2:]
        case "wrong order":
            buffers = [buffers[1], buffers[0], *buffers[2:]]
        case "stale cache":
            buffers = before
        case "half written":
            buffers = [*buffers[:-1], buffers[-1][: len(buffers[-1]) // 2]]
        case "flipped bit":
            buffers[1][5] ^= 1
    return list(zip(specs, buffers, strict=True))


def break_from(receiver: Receiver, fault: str, version: int) -> Callable[[], None]:
    """Damage that version between the transport and whoever takes the tensors; returns what mends the receiver."""
    whole, before = receiver.buckets, list[Tensor]()

    def broken(manifest: WeightManifest) -> Iterator[tuple[BucketSpec, Tensor]]:
        pairs = [(bucket, buffer.clone()) for bucket, buffer in whole(manifest)]
        yield from damage(fault, pairs, before) if manifest.version == version else pairs
        before[:] = [buffer for _, buffer in pairs]

    def mend() -> None:
        receiver.buckets = whole  # type: ignore[method-assign]

    receiver.buckets = broken  # type: ignore[method-assign]
    return mend


def of_equal_sizes(version: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Four buckets that only their contents tell apart; all of them change with the version."""
    generator = torch.Generator().manual_seed(version)
    return {f"w{i}": torch.randn(16, generator=generator).to(dtype) for i in range(4)}


@contextmanager
def moving(kind: str) -> Iterator[tuple[Publisher, Receiver, Pull]]:
    """Both ends of a transport, and a pull that the publisher takes part in where both ends move at once."""
    name, settings = kind.partition(",")[0], KINDS[kind]
    if name != "distributed":
        with ends(name, bucket_bytes=64, **settings) as (publisher, receiver):
            yield publisher, receiver, lambda manifest: pulled(receiver, manifest)
        return
    address = f"127.0.0.1:{free_port()}"
    seats = [
        transport(name, bucket_bytes=64, address=address, rank=rank, world=2, timeout_s=WAIT_S)
        for rank in (0, 1)
    ]
    publisher, receiver = open_publisher(seats[0]), open_receiver(seats[1])
    with ThreadPoolExecutor(1) as beside:

        def together(manifest: WeightManifest) -> dict[str, Tensor]:
            serving = beside.submit(publisher.serve, manifest)
            try:
                return pulled(receiver, manifest)
            finally:
                serving.result(WAIT_S)

        yield publisher, receiver, together
    receiver.close()
    publisher.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_is_caught_over_every_transport_and_the_next_version_arrives(
    kind: str, fault: str
) -> None:
    with moving(kind) as (publisher, receiver, pull):
        mend = break_from(receiver, fault, 2)
        assert same(pull(publish(publisher, of_equal_sizes(1), 1)), of_equal_sizes(1))
        with pytest.raises(WeightSyncError, match="version 2"):
            pull(publish(publisher, of_equal_sizes(2), 2))
        assert receiver.version == 1, "a damaged version is not taken for one that is held"
        mend()
        assert same(pull(publish(publisher, of_equal_sizes(3), 3)), of_equal_sizes(3))
        assert receiver.version == 3
