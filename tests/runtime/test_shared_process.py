"""Many ranks in one process (`ranks_per_process`): each is a worker of its own, and a call to all is one message."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rill.errors import PeerDiedError, PlanError, WorkerError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.process.backend import LocalBackend
from rill.runtime.worker import Worker, concurrent
from tests.runtime.workers import Echo, Peer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:4") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def echo(cluster: Cluster) -> WorkerGroup[Echo]:
    return Echo.launch(cluster, name="echo", placement="0-3:0-7", ranks_per_process=3, base=10, threads=1)


class Many(Worker):
    """Ranks that need each other."""

    def meet(self, channel: Channel) -> list[int]:
        """Ends only if all ranks run at the same time: every rank puts one item and takes one."""
        channel.put(self.rank)
        return [channel.take(timeout_s=20)]

    def pass_on(self) -> int:
        """Around the ring, through ranks of this process and of others."""
        self.send(self.rank, self.group_name, (self.rank + 1) % self.world_size)
        return int(self.recv(self.group_name, (self.rank - 1) % self.world_size, timeout_s=20))

    def turn(self, log: Channel) -> None:
        with self.device_lock:
            log.put(self.group_name)

    def scribble(self, array: object) -> float:
        assert isinstance(array, np.ndarray)
        array += self.rank
        time.sleep(0.01)
        return float(array.mean())

    def big(self, size: int) -> object:
        return np.full(size, self.rank, np.float32)

    async def in_a_task(self, channel: Channel) -> str:
        await channel.put_async(self.rank)
        return str(await channel.take_async(timeout_s=20))

    @concurrent
    def who(self) -> int:
        return self.rank

    def fail_or_wait(self, bad_rank: int) -> None:
        if self.rank == bad_rank:
            raise ValueError(f"{self.rank} fails")
        time.sleep(1.0)

    def call_each_other(self, group: WorkerGroup[Echo]) -> list[int]:
        return group.add(self.rank).wait(20)


@pytest.fixture(scope="module")
def many(cluster: Cluster) -> WorkerGroup[Many]:
    return Many.launch(cluster, name="many", placement="0:0-7", ranks_per_process=4)


def test_ranks_that_follow_each_other_share_a_process(echo: WorkerGroup[Echo]) -> None:
    pids = echo.pid().wait(10)
    assert [pids.index(pid) for pid in pids] == [0, 0, 0, 3, 3, 3, 6, 6]


def test_each_rank_is_a_worker_of_its_own_with_its_own_seat(echo: WorkerGroup[Echo]) -> None:
    assert echo.seat().wait(10) == [(rank, 8, "echo", "cpu") for rank in range(8)]
    assert echo.device_ids().wait(10) == [[rank // 2] for rank in range(8)]
    echo.on(4).note(7).wait(10)
    assert echo.noted().wait(10) == [[7] if rank == 4 else [] for rank in range(8)]


def test_a_selection_may_name_ranks_of_several_processes_in_any_order(echo: WorkerGroup[Echo]) -> None:
    assert [seat[0] for seat in echo.on(7, 0, 4, 1).seat().wait(10)] == [7, 0, 4, 1]


def test_ranks_of_one_process_run_at_the_same_time(cluster: Cluster, many: WorkerGroup[Many]) -> None:
    channel = Channel.create(cluster, "meeting")
    assert sorted(rank for (rank,) in many.meet(channel).wait(30)) == list(range(8))


def test_each_rank_is_a_client_of_its_own_in_channels(cluster: Cluster, many: WorkerGroup[Many]) -> None:
    channel = Channel.create(cluster, "tasks")
    assert sorted(many.in_a_task(channel).wait(30)) == [str(rank) for rank in range(8)]
    assert sorted(channel.stats()["producers"]) == [f"many[{rank}]" for rank in range(8)]


def test_objects_are_sent_between_ranks_of_one_process_and_of_others(many: WorkerGroup[Many]) -> None:
    assert many.pass_on().wait(30) == [7, 0, 1, 2, 3, 4, 5, 6]


def test_arguments_are_each_ranks_own_to_change(many: WorkerGroup[Many]) -> None:
    assert many.scribble(np.zeros(100)).wait(30) == list(range(8))
    assert many.scribble(np.zeros(100_000)).wait(30) == list(range(8))


def test_large_results_come_back_from_every_rank(many: WorkerGroup[Many]) -> None:
    for rank, value in enumerate(many.big(50_000).wait(30)):
        assert value.shape == (50_000,) and (value == rank).all()


def test_a_failure_keeps_its_group_rank_and_traceback_and_does_not_wait_for_the_others(
    many: WorkerGroup[Many],
) -> None:
    started_s = time.monotonic()
    handle = many.fail_or_wait(5)
    with pytest.raises(WorkerError, match="5 fails") as caught:
        handle.wait(10)
    assert time.monotonic() - started_s < 0.8
    assert (caught.value.group, caught.value.rank) == ("many", 5)
    assert "in fail_or_wait" in caught.value.remote_traceback
    assert [outcome.error is None for outcome in handle.outcomes(10)] == [n != 5 for n in range(8)]


def test_concurrent_methods_and_calls_between_groups_work_from_every_rank(
    many: WorkerGroup[Many], echo: WorkerGroup[Echo]
) -> None:
    assert many.who().wait(10) == list(range(8))
    assert many.call_each_other(echo).wait(30) == [[10 + rank] * 8 for rank in range(8)]


def test_turns_on_shared_devices_are_taken_by_all_ranks(cluster: Cluster, many: WorkerGroup[Many]) -> None:
    other = Many.launch(cluster, name="other", placement="0:0-3", ranks_per_process=2)
    log = Channel.create(cluster, "turns")
    for handle in [many.turn(log), other.turn(log)]:
        handle.wait(30)
    held = [log.take(timeout_s=10) for _ in range(12)]
    assert sorted(held) == ["many"] * 8 + ["other"] * 4
    assert held in (["many"] * 8 + ["other"] * 4, ["other"] * 4 + ["many"] * 8)
    other.close()


def test_the_ranks_of_a_dead_process_fail_and_come_back_together(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="mortal", placement="0:0-3", ranks_per_process=2, base=1)
    with pytest.raises(PeerDiedError, match=r"(?s)mortal\[[23]\] died.*exit code 7"):
        group.on(3).die(7).wait(10)
    outcomes = group.add(1).outcomes(10)
    assert [type(outcome.error) for outcome in outcomes] == [type(None)] * 2 + [PeerDiedError] * 2
    group.relaunch(2)
    assert group.add(1).wait(10) == [2] * 4
    assert [address.incarnation for address in group.addresses()] == [0, 0, 1, 1]
    group.close()


def test_a_receive_from_a_rank_of_a_closed_group_ends_with_an_error(cluster: Cluster) -> None:
    group = Peer.launch(cluster, name="leaving", placement="0:0-3", ranks_per_process=4)
    waiting = Peer.launch(cluster, name="waiting", placement="1")
    handle = waiting.receive_any("leaving", 2)
    time.sleep(0.2)
    group.close()
    with pytest.raises(WorkerError, match=r"leaving\[2\] is gone"):
        handle.wait(10)
    waiting.close()


def test_processes_are_not_shared_across_nodes() -> None:
    with Cluster(backend=LocalBackend("cpu:1", num_nodes=2)) as cluster:
        group = Many.launch(cluster, name="wide", placement="0:0-2,1:3-5", ranks_per_process=4)
        assert group.who().wait(20) == list(range(6))
        assert len({address.pid for address in group.addresses()}) == 2
        assert group.pass_on().wait(30) == [5, 0, 1, 2, 3, 4]
        assert group.scribble(np.zeros(100_000)).wait(30) == list(range(6))


def test_ranks_per_process_must_be_positive(cluster: Cluster) -> None:
    with pytest.raises(PlanError, match="ranks_per_process=0"):
        Many.launch(cluster, name="none", ranks_per_process=0)


def test_a_thousand_ranks_start_and_answer() -> None:
    with Cluster(devices="cpu:1") as cluster:
        group = Echo.launch(cluster, name="crowd", placement="0:0-1023", ranks_per_process=128, base=1)
        assert group.add(1).wait(30) == [2] * 1024
        assert len(set(group.pid().wait(30)) - {os.getpid()}) == 8
