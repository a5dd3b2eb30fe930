"""Which tensors go by a handle, and that they arrive. Host memory stands for a device that processes can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rill.runtime.address import WorkerAddress
from rill.runtime.device.accelerator import ACCELERATORS, Accelerator
from rill.runtime.transfer.device_ipc import Exporter, shares_a_device
from rill.runtime.transfer.wire import decode, encode

EXPORTED: dict[int, torch.Tensor] = {}


class SharedHost(Accelerator):
    torch_name = "cpu"
    has_ipc = True

    def export(self, tensor: Any) -> int:
        EXPORTED[len(EXPORTED)] = tensor
        return len(EXPORTED) - 1

    def open(self, handle: int) -> torch.Tensor:
        return EXPORTED[handle]


def at(node: str, *gpus: int) -> WorkerAddress:
    return WorkerAddress("w", 0, node, 1, "", gpus=gpus)


@pytest.mark.parametrize(
    ("me", "peer", "is_shared"),
    [
        (at("a", 0), at("a", 0), True),
        (at("a", 0), at("a", 1, 0), True),
        (at("a", 0), at("a", 1), False),
        (at("a", 0), at("b", 0), False),
        (at("a"), at("a", 0), False),
    ],
)
def test_a_device_is_shared_where_the_receiver_sees_it(
    me: WorkerAddress, peer: WorkerAddress, is_shared: bool
) -> None:
    assert shares_a_device(me, peer) is is_shared


def test_tensors_go_by_a_handle_and_arrive_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACCELERATORS._parts, "cpu", "tests.runtime.test_device_ipc:SharedHost")
    tensor = torch.arange(100_000).view(250, 400).t()
    exporter = Exporter(at("a", 5), at("a", 2, 5))
    encoded = encode({"x": tensor, "n": 3}, device_hook=exporter)
    assert exporter.kind == "cpu" and not encoded.buffers and encoded.num_bytes < 1000
    received = decode(encoded.header, ())
    assert torch.equal(received["x"], tensor) and received["x"].data_ptr() != tensor.data_ptr()


def test_tensors_that_the_receiver_cannot_open_go_through_the_host() -> None:
    tensor = torch.arange(100_000)
    for exporter in (Exporter(at("a", 5), at("a", 5)), Exporter(at("a"), at("a", 5))):
        encoded = encode(tensor, device_hook=exporter)
        assert exporter.kind == "" and len(encoded.buffers) == 1
