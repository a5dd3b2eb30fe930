"""Tensors over links of two processes. gloo and CPU tensors stand for NCCL and a second GPU, which are not at hand."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rill.errors import WorkerError
from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from rill.runtime.group import WorkerGroup
from rill.runtime.process.backend import LocalBackend
from rill.runtime.transfer.device_link import GLOO
from rill.runtime.worker import Worker, concurrent
from tests.runtime.tensor_workers import tensors

pytestmark = pytest.mark.timeout(120)


class Linked(Worker):
    def __init__(self) -> None:
        current().transfer.links.backend = GLOO

    def send_tensors(self, to: int, count: int = 1, tag: str = "") -> dict[str, int]:
        for n in range(count):
            self.send({"n": n, **tensors()}, self.group_name, to, tag=tag, timeout_s=60)
        return current().transfer.routes()

    def receive_tensors(self, sender: int, count: int = 1, tag: str = "") -> str:
        for n in range(count):
            received = self.recv(self.group_name, sender, tag=tag, timeout_s=60)
            assert received.pop("n") == n
            torch.testing.assert_close(received, tensors(), rtol=0, atol=0)
            received["bf16"].zero_()
        return "equal"

    def cross(self, size: int) -> float:
        """Both send before both receive, and more than any buffer holds."""
        other = 1 - self.rank
        sending = self.send_async(torch.full((size,), float(self.rank)), self.group_name, other)
        received = self.recv(self.group_name, other, timeout_s=60)
        sending.wait(60)
        return float(received.mean())

    def send_two_tags(self) -> None:
        def send(tag: str, value: float) -> None:
            self.send(torch.full((100_000,), value), self.group_name, 1, tag=tag, timeout_s=60)

        threads = [threading.Thread(target=send, args=pair) for pair in (("first", 0.0), ("second", 1.0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    def send_two_tags_async(self) -> list[float]:
        """Offered in one order and waited for in the other."""
        pending = {
            tag: self.send_async(torch.full((100_000,), value), self.group_name, 1, tag=tag)
            for tag, value in (("first", 0.0), ("second", 1.0))
        }
        pending["second"].wait(30)
        self.send("the second is there", self.group_name, 1, tag="note", timeout_s=30)
        pending["first"].wait(30)
        return [0.0]

    def receive_second_and_wait_for_a_note(self) -> list[float]:
        second = self.recv(self.group_name, 0, tag="second", timeout_s=30)
        self.recv(self.group_name, 0, tag="note", timeout_s=30)
        first = self.recv(self.group_name, 0, tag="first", timeout_s=30)
        return [float(second.mean()), float(first.mean())]

    def receive_in_place(self, size: int) -> bool:
        mine = torch.zeros(size // 4, 4)
        received = self.recv(self.group_name, 0, into=mine, timeout_s=30)
        return received is mine and bool(torch.equal(mine.flatten(), torch.arange(size, dtype=torch.float32)))

    def send_rows(self, size: int) -> None:
        self.send(torch.arange(size, dtype=torch.float32).view(-1, 4), self.group_name, 1, timeout_s=30)

    def share(self, size: int) -> tuple[float, dict[str, int]]:
        given = torch.ones(size) if self.rank == 0 else None
        received = self.broadcast({"x": given}, timeout_s=30)
        return float(received["x"].sum()), current().transfer.routes()

    def receive_second_first(self) -> list[float]:
        pending = [self.recv_async(self.group_name, 0, tag=tag) for tag in ("second", "first")]
        return [float(one.wait(60).mean()) for one in pending]

    def receive_after(self, wait_s: float) -> float:
        time.sleep(wait_s)
        return float(self.recv(self.group_name, 0, timeout_s=60).mean())

    def send_and_change(self) -> None:
        tensor = torch.ones(200_000)
        self.send(tensor, self.group_name, 1, timeout_s=60)
        tensor.zero_()  # the send has returned: the receiver must not see this

    @concurrent
    def num_links(self) -> int:
        return current().transfer.links.num_links()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:2", preload=["torch"]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> WorkerGroup[Linked]:
    return Linked.launch(cluster, name="pair", threads=1)


def test_tensors_of_every_kind_arrive_equal_and_the_link_is_used_again(pair: WorkerGroup[Linked]) -> None:
    for _ in range(2):
        sending = pair.on(0).send_tensors(1, 3)
        assert pair.on(1).receive_tensors(0, 3).wait(60) == ["equal"]
        routes = sending.wait(60)[0]
    assert routes[GLOO] == 6
    assert pair.num_links().wait(10) == [1, 1]


def test_two_processes_that_send_to_each_other_do_not_wait_for_each_other(pair: WorkerGroup[Linked]) -> None:
    assert pair.cross(2_000_000).wait(90) == [1.0, 0.0]
    assert pair.num_links().wait(10) == [2, 2]  # one for each direction


def test_tags_are_received_in_the_order_of_the_receivers_wishes(pair: WorkerGroup[Linked]) -> None:
    sending = pair.on(0).send_two_tags()
    assert pair.on(1).receive_second_first().wait(60) == [[1.0, 0.0]]
    sending.wait(60)


def test_a_send_waits_for_its_own_receipt_and_not_for_that_of_another_tag(pair: WorkerGroup[Linked]) -> None:
    sending = pair.on(0).send_two_tags_async()
    assert pair.on(1).receive_second_and_wait_for_a_note().wait(60) == [[1.0, 0.0]]
    sending.wait(60)


def test_a_tensor_is_received_in_the_memory_it_is_given(pair: WorkerGroup[Linked]) -> None:
    sending = pair.on(0).send_rows(40_000)
    assert pair.on(1).receive_in_place(40_000).wait(60) == [True]
    sending.wait(60)


def test_a_broadcast_of_tensors_takes_the_links(pair: WorkerGroup[Linked]) -> None:
    (_, before), _ = pair.share(50_000).wait(60)
    (total, routes), (other_total, _) = pair.share(50_000).wait(60)
    assert total == other_total == 50_000
    assert routes[GLOO] == before[GLOO] + 1


def test_a_send_returns_when_the_tensor_may_be_changed(pair: WorkerGroup[Linked]) -> None:
    sending = pair.on(0).send_and_change()
    assert pair.on(1).receive_after(0.2).wait(60) == [1.0]
    sending.wait(60)


@pytest.mark.slow
def test_links_cross_nodes() -> None:
    with Cluster(backend=LocalBackend("cpu:1", num_nodes=2), preload=["torch"]) as cluster:
        group = Linked.launch(cluster, name="far", threads=1)
        sending = group.on(0).send_tensors(1, 2)
        assert group.on(1).receive_tensors(0, 2).wait(60) == ["equal"]
        assert sending.wait(60)[0][GLOO] == 2


def test_a_peers_death_ends_the_waits_on_its_links_and_a_relaunched_one_gets_new_ones(
    cluster: Cluster,
) -> None:
    group = Linked.launch(cluster, name="mortal", threads=1)
    sending = group.on(0).send_tensors(1)
    group.on(1).receive_tensors(0).wait(60)
    sending.wait(60)
    stuck_send = group.on(0).send_tensors(1)  # offered, and never asked for
    time.sleep(0.3)
    os.kill(group.addresses()[1].pid, signal.SIGKILL)
    started_s = time.monotonic()
    with pytest.raises(WorkerError, match=r"mortal\[1\]"):
        stuck_send.wait(30)
    assert time.monotonic() - started_s < 15
    group.relaunch(1)
    assert group.on(0).num_links().wait(10) == [0]
    sending = group.on(0).send_tensors(1)
    assert group.on(1).receive_tensors(0).wait(60) == ["equal"]
    sending.wait(60)
    group.close()


def test_a_senders_death_ends_the_receivers_wait(cluster: Cluster) -> None:
    group = Linked.launch(cluster, name="lost", threads=1)
    group.on(0).send_tensors(1)
    time.sleep(0.3)
    os.kill(group.addresses()[0].pid, signal.SIGKILL)
    receiving = group.on(1).receive_tensors(0)
    with pytest.raises(WorkerError, match=r"lost\[0\]"):
        receiving.wait(40)
    group.close()
