"""GPU tensors between processes on a real GPU: arguments and results of calls, CUDA IPC, peer access, NCCL."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Holder(Worker):
    def where(self, tensor: Any) -> tuple[str, float]:
        return str(tensor.device), float(tensor.float().mean())

    def make(self, size: int) -> Any:
        return torch.full((size,), float(self.rank + 1), device=self.device)

    def ask(self, other: WorkerGroup[Holder], size: int) -> tuple[str, float]:
        (made,) = other.on(0).make(size).wait(60)
        return self.where(made)

    def send_one(self, group: str, rank: int, size: int) -> dict[str, int]:
        tensor = torch.arange(size, device=self.device, dtype=torch.float32)
        self.send({"x": tensor}, group, rank, timeout_s=60)
        return current().transfer.routes()

    def receive_one(self, group: str, rank: int) -> tuple[str, bool]:
        tensor = self.recv(group, rank, timeout_s=60)["x"]
        expected = torch.arange(tensor.numel(), dtype=torch.float32)
        return str(tensor.device), bool(torch.equal(tensor.cpu(), expected))


@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("ranks_per_process", [1, 2])
def test_tensors_in_arguments_and_results_of_calls_come_to_the_called_ranks_device(
    size: int, ranks_per_process: int
) -> None:
    with Cluster() as cluster:
        group = Holder.launch(cluster, name="g", placement="cuda:0:0-1", ranks_per_process=ranks_per_process)
        other = Holder.launch(cluster, name="other", placement="cuda:0")
        there = torch.full((size,), 3.0, device="cuda")
        assert group.where(there).wait(60) == [("cuda:0", 3.0)] * 2
        assert group.where(there.cpu()).wait(60) == [("cpu", 3.0)] * 2
        results = group.make(size).wait(60)
        assert [(str(result.device), float(result.mean())) for result in results] == [
            ("cpu", 1.0),
            ("cpu", 2.0),
        ]
        assert group.ask(other, size).wait(60) == [("cuda:0", 1.0)] * 2


def test_a_send_on_one_gpu_goes_by_cuda_ipc() -> None:
    with Cluster() as cluster:
        sender = Holder.launch(cluster, name="s", placement="cuda:0")
        receiver = Holder.launch(cluster, name="r", placement="cuda:0")
        receiving = receiver.receive_one("s", 0)
        assert sender.send_one("r", 0, 1 << 20).wait(60)[0]["cuda_ipc"] == 1
        assert receiving.wait(60) == [("cuda:0", True)]


@needs_two_gpus
@pytest.mark.parametrize(("peer_access", "route"), [(True, "cuda_ipc"), (False, "nccl")])
def test_a_send_between_two_gpus_of_a_node_stays_off_the_host(peer_access: bool, route: str) -> None:
    with Cluster() as cluster:
        sender = Holder.launch(cluster, name="s", placement="cuda:0")
        receiver = Holder.launch(cluster, name="r", placement="cuda:1", peer_access=peer_access)
        for _ in range(2):
            receiving = receiver.receive_one("s", 0)
            routes = sender.send_one("r", 0, 1 << 20).wait(60)[0]
            assert receiving.wait(60) == [("cuda:0", True)]  # the receiver's first GPU, as it sees it
        assert routes[route] == 2
