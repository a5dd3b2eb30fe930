"""The driver of the two-host test: runs in one network namespace, with workers in both. Prints one word per check."""

from __future__ import annotations

import os
import socket
import sys

import numpy as np

from rill.errors import PeerDiedError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from rill.runtime.device.accelerator import ACCELERATORS, Accelerator
from rill.runtime.worker import Worker


class Host(Worker):
    def where(self) -> tuple[str, str]:
        return current().site.node_id, current().site.host

    def npus(self) -> tuple[str, str]:
        return current().site.node_id, os.environ["TEST_NPUS"]

    def send_array(self, size: int) -> dict[str, int]:
        self.send({"array": np.arange(size, dtype=np.int32), "text": "x" * 70_000}, self.group_name, 1)
        return current().transfer.routes

    def receive_array(self) -> int:
        received = self.recv(self.group_name, 0, timeout_s=60)
        assert received["text"] == "x" * 70_000
        assert (received["array"] == np.arange(received["array"].size, dtype=np.int32)).all()
        return int(received["array"].size)

    def share(self, size: int) -> int:
        given = np.ones(size, np.uint8) if self.rank == 0 else None
        return int(self.broadcast(given, timeout_s=60).sum())

    def double(self, array: np.ndarray) -> np.ndarray:
        return array * 2

    def produce(self, channel: Channel, count: int) -> None:
        for n in range(count):
            channel.put(np.full(100_000, n, np.float32))

    def consume(self, channel: Channel) -> list[int]:
        return [int(item[0]) for item in channel]

    def wait_for(self, rank: int) -> None:
        self.recv(self.group_name, rank, timeout_s=60)

    def die(self) -> None:
        os._exit(9)

    def meet(self) -> str:
        met = self.rendezvous(timeout_s=30)
        return f"{met.host}:{met.port}"


class Npu(Accelerator):
    """Asked on the host itself."""

    visible_env = "TEST_NPUS"

    def devices(self) -> range:
        return range(count_npus())


def count_npus() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.213.0.3", 9))  # sends nothing: asks for the address that would be used
        return 2 if probe.getsockname()[0] == "10.213.0.2" else 0


def main(address: str) -> None:
    ACCELERATORS.register("npu", "tests.runtime.two_hosts_script:Npu")
    with Cluster.ray(address, devices={"lab": "cpu:1,npu:auto", "*": "cpu:1"}) as cluster:
        assert [device.kind for device in cluster.devices] == ["cpu", "cpu", "npu", "npu"]
        mixed = Host.launch(cluster, name="mixed", placement="npu:0-1:0", threads=1)
        assert mixed.npus().wait(60) == [("node1", "0,1")]
        assert len(Host.launch(cluster, name="lab", placement="lab:all", threads=1).npus().wait(60)) == 3
        print("placed", flush=True)

        group = Host.launch(cluster, name="host", placement="cpu:all", threads=1)
        places = group.where().wait(60)
        assert {node for node, _ in places} == {"node0", "node1"} and len({ip for _, ip in places}) == 2, (
            places
        )
        print("launched", flush=True)

        sending = group.on(0).send_array(10_000_000)
        assert group.on(1).receive_array().wait(60) == [10_000_000]
        assert sending.wait(60)[0]["tcp"] == 1
        print("transferred", flush=True)

        assert group.share(5_000_000).wait(60) == [5_000_000] * 2
        print("broadcast", flush=True)

        for doubled in group.double(np.arange(1_000_000)).wait(60):
            assert (doubled == 2 * np.arange(1_000_000)).all()
        print("called", flush=True)

        channel = Channel.create(cluster, "items")
        consuming = group.on(1).consume(channel)
        group.on(0).produce(channel, 20).wait(60)
        channel.end()
        assert consuming.wait(60) == [list(range(20))]
        print("channelled", flush=True)

        (where, other) = group.meet().wait(60)
        assert where == other and places[0][1] in where
        print("met", flush=True)

        waiting = group.on(0).wait_for(1)
        death = group.on(1).die().outcomes(30)[0].error
        assert isinstance(death, PeerDiedError) and "exit code 9" in str(death), death
        outcome = waiting.outcomes(30)[0]
        assert outcome.error is not None and "host[1]" in str(outcome.error), outcome
        group.relaunch(1)
        assert group.where().wait(30) == places
        print("relaunched", flush=True)
    print("closed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
