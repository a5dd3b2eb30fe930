"""Small sets of weights and transports for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rill.types import PolicyVersion
from rill.weights.base import TRANSPORTS, Publisher, Receiver, open_publisher, open_receiver
from rill.weights.manifest import WeightManifest


def weights(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Eleven tensors of odd shapes; with bucket_bytes = 4096 they make several buckets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (64, 33), (1,), (128,), (33, 17), (3, 3, 3), (512, 4), (2, 1), (40, 40), (), (9,)]
    return {
        f"layers.{i}.weight": torch.randn(shape, generator=generator).to(dtype)
        for i, shape in enumerate(shapes)
    }


def transport(name: str, **settings: Any) -> Any:
    config = TRANSPORTS.load(name).Config
    return config.model_validate({"type": name, "bucket_bytes": 4096, **settings})


@contextmanager
def ends(name: str, **settings: Any) -> Iterator[tuple[Publisher, Receiver]]:
    config = transport(name, **settings)
    publisher, receiver = open_publisher(config), open_receiver(config)
    try:
        yield publisher, receiver
    finally:
        receiver.close()
        publisher.close()


def publish(publisher: Publisher, tensors: dict[str, Tensor], version: int) -> WeightManifest:
    return publisher.publish(tensors.items(), PolicyVersion(version))


def pulled(receiver: Receiver, manifest: WeightManifest, **more: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in receiver.pull(manifest, **more)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[k], b[k]) and a[k].dtype is b[k].dtype and a[k].shape == b[k].shape for k in a
    )
