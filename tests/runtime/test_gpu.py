"""GPU tensors between processes on a real GPU: arguments and results of calls, CUDA IPC, peer access, collectives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from rill.errors import UnsupportedError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from rill.runtime.device.accelerator import accelerator
from rill.runtime.group import WorkerGroup
from rill.runtime.transfer.collective import open_group, open_store
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
        return current().transfer.routes

    def receive_one(self, group: str, rank: int) -> tuple[str, bool]:
        tensor = self.recv(group, rank, timeout_s=60)["x"]
        expected = torch.arange(tensor.numel(), dtype=torch.float32)
        return str(tensor.device), bool(torch.equal(tensor.cpu(), expected))

    def send_tags(self, group: str, size: int) -> None:
        """Offered in one order, received in the other; the note is sent while the first is still there."""
        sending = {
            tag: threading.Thread(
                target=lambda tag=tag, value=value: self.send(
                    torch.full((size,), value, device=self.device), group, 0, tag=tag, timeout_s=60
                )
            )
            for tag, value in (("first", 1.0), ("second", 2.0))
        }
        for thread in sending.values():
            thread.start()
        sending["second"].join(60)
        self.send("the second is there", group, 0, tag="note", timeout_s=60)
        sending["first"].join(60)

    def receive_tags(self, group: str) -> list[float]:
        second = self.recv(group, 0, tag="second", timeout_s=60)
        self.recv(group, 0, tag="note", timeout_s=60)
        return [float(second.mean()), float(self.recv(group, 0, tag="first", timeout_s=60).mean())]

    def share(self, size: int) -> tuple[str, float, dict[str, int]]:
        given = torch.full((size,), 7.0, device=self.device) if self.rank == 0 else None
        received = self.broadcast({"x": given}, timeout_s=60)["x"]
        return str(received.device), float(received.mean()), current().transfer.routes

    def put_on_gpu(self, channel: Channel, count: int) -> None:
        for n in range(count):
            channel.put({"n": n, "x": torch.full((1 << 18,), float(n), device=self.device)})
        channel.end()

    def take_on_gpu(self, channel: Channel) -> list[tuple[str, float]]:
        return [(str(item["x"].device), float(item["x"].mean())) for item in channel]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_tensors_in_arguments_and_results_of_calls_come_to_the_called_ranks_device(size: int) -> None:
    with Cluster() as cluster:
        group = Holder.launch(cluster, name="g", placement="cuda:0:0-1")
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


def test_sends_on_one_gpu_wait_for_their_own_receipts_and_reach_all() -> None:
    with Cluster() as cluster:
        sender = Holder.launch_async(cluster, name="sender", placement="cuda:0")
        receiver = Holder.launch_async(cluster, name="receiver", placement="cuda:0")
        group = Holder.launch_async(cluster, name="trio", placement="cuda:0:0-2")
        receiving = receiver.receive_tags("sender")
        sender.send_tags("receiver", 1 << 20).wait(90)
        assert receiving.wait(60) == [[2.0, 1.0]]
        shared = group.share(1 << 20).wait(60)
        assert [one[:2] for one in shared] == [("cuda:0", 7.0)] * 3
        assert shared[0][2]["cuda_ipc"] == 2


def test_a_channel_carries_gpu_tensors_through_the_host_to_the_consumers_device() -> None:
    with Cluster() as cluster:
        sender = Holder.launch_async(cluster, name="sender", placement="cuda:0")
        receiver = Holder.launch_async(cluster, name="receiver", placement="cuda:0")
        channel = Channel.create(cluster, "tensors")
        putting = sender.put_on_gpu(channel, 5)
        assert receiver.take_on_gpu(channel).wait(90) == [[("cuda:0", float(n)) for n in range(5)]]
        putting.wait(60)


def test_a_gpu_says_its_memory_and_opens_no_handle_of_one_that_it_does_not_see() -> None:
    cuda = accelerator("cuda")
    free, total = cuda.memory_bytes("cuda:0")
    assert 0 < free <= total
    uuid, arguments = cuda.export(torch.ones(1000, device="cuda"))
    with pytest.raises(UnsupportedError, match="cannot be opened here"):
        cuda.open(("another GPU", arguments))
    assert len(uuid) > 8


def test_a_process_group_of_one_opens_and_ends() -> None:
    """The calls into torch's NCCL that collectives are made of, as far as one GPU can go."""
    store = open_store("127.0.0.1", 0, is_master=True, timeout_s=30.0)
    group = open_group("nccl", store, 0, 1, name="alone", timeout_s=30.0)
    tensor = torch.ones(1000, device="cuda")
    group.allreduce([tensor]).wait()
    assert float(tensor.sum()) == 1000.0
    group.abort()


@needs_two_gpus
def test_a_send_between_two_gpus_of_a_node_goes_through_the_host() -> None:
    with Cluster() as cluster:
        sender = Holder.launch(cluster, name="s", placement="cuda:0")
        receiver = Holder.launch(cluster, name="r", placement="cuda:1")
        receiving = receiver.receive_one("s", 0)
        routes = sender.send_one("r", 0, 1 << 20).wait(60)[0]
        assert receiving.wait(60) == [("cuda:0", True)]  # the receiver's first GPU, as it sees it
        assert routes["shared_memory"] == 1
