"""Which way a GPU tensor goes, for every placement of the two ends."""

from __future__ import annotations

import pytest

from rill.runtime.context import WorkerAddress
from rill.runtime.transfer.routes import TensorRoute, tensor_route


def at(node: str, *gpus: int) -> WorkerAddress:
    return WorkerAddress("w", 0, node, 1, "", gpus=gpus)


@pytest.mark.parametrize(
    ("me", "peer", "has_link", "expected"),
    [
        (at("a", 0), at("a", 0), True, TensorRoute.CUDA_IPC),
        (at("a", 0), at("a", 1, 0), True, TensorRoute.CUDA_IPC),  # the receiver was launched with peer_access
        (at("a", 0), at("a", 1), True, TensorRoute.NCCL),
        (at("a", 0), at("b", 0), True, TensorRoute.NCCL),
        (at("a", 0), at("a", 1), False, TensorRoute.HOST),
        (at("a", 0), at("b"), False, TensorRoute.HOST),
        (at("a"), at("a", 0), False, TensorRoute.HOST),
    ],
)
def test_the_route_follows_the_placement(
    me: WorkerAddress, peer: WorkerAddress, has_link: bool, expected: TensorRoute
) -> None:
    assert tensor_route(me, peer, has_link=has_link) is expected
