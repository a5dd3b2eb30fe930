"""Point-to-point transfer between real processes of one node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rill.errors import PeerDiedError, StuckError, WorkerError
from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from rill.runtime.group import WorkerGroup
from rill.runtime.transfer import point_to_point

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:3") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> WorkerGroup[Any]:
    from tests.runtime.workers import Peer

    return Peer.launch(cluster, name="pair", placement="0-1", threads=1)


@pytest.mark.parametrize("num_floats", [3, 5_000, 400_000])
def test_an_object_arrives_equal_and_writable_whatever_its_size(
    pair: WorkerGroup[Any], num_floats: int
) -> None:
    received = pair.swap(num_floats).wait(20)
    assert received == [True, True]


def test_small_objects_go_by_message_and_large_ones_by_shared_memory(pair: WorkerGroup[Any]) -> None:
    before = pair.on(0).routes().wait(10)[0]
    pair.swap(10).wait(10)
    pair.swap(400_000).wait(10)
    after = pair.on(0).routes().wait(10)[0]
    assert after["message"] == before.get("message", 0) + 1
    assert after["shared_memory"] == before.get("shared_memory", 0) + 1


def test_tags_that_are_used_once_leave_nothing_behind(cluster: Cluster) -> None:
    transfer = cluster.context.transfer
    for n in range(20):
        transfer.send(n, "driver", 0, tag=f"step {n}")
        assert transfer.recv("driver", 0, tag=f"step {n}", timeout_s=5) == n
    assert not transfer._arrivals


def test_a_send_to_oneself_is_by_reference(pair: WorkerGroup[Any]) -> None:
    assert pair.to_myself().wait(10) == [True, True]


def test_objects_arrive_in_order_and_by_tag(pair: WorkerGroup[Any]) -> None:
    sending = pair.on(0).send_numbers(50)
    assert pair.on(1).receive_numbers(50).wait(10) == [(list(range(50)), list(range(100, 150)))]
    sending.wait(10)


@pytest.mark.slow
def test_tensors_travel_and_collectives_run_in_workers_that_share_a_preloaded_torch() -> None:
    from tests.runtime.tensor_workers import TensorPeer

    with Cluster(devices="cpu:2", preload=["torch"]) as cluster:
        group = TensorPeer.launch(cluster, name="tensors", threads=1)
        assert group.num_threads().wait(20) == [1, 1]
        sending = group.on(0).send_tensors()
        assert group.on(1).receive_tensors().wait(30) == ["equal"]
        sending.wait(10)
        for _ in range(2):
            assert group.all_reduce().wait(60) == [[3.0, 3.0, 3.0]] * 2


def test_a_broadcast_reaches_every_rank_and_each_owns_its_copy(cluster: Cluster) -> None:
    from tests.runtime.workers import Peer

    group = Peer.launch(cluster, name="trio", placement="all", threads=1)
    for num_floats in (10, 300_000):
        assert group.share(num_floats, source=1).wait(20) == [float(num_floats)] * 3
    group.close()


def test_slots_come_back_when_the_receiver_lets_go(pair: WorkerGroup[Any]) -> None:
    pair.swap(400_000).wait(10)
    deadline_s = time.monotonic() + 5
    while pair.num_lent().wait(10) != [0, 0] and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert pair.num_lent().wait(10) == [0, 0]


def test_large_call_arguments_and_results_travel_through_shared_memory(pair: WorkerGroup[Any]) -> None:
    array = np.arange(500_000, dtype=np.float32)
    for result in pair.doubled(array).wait(10):
        np.testing.assert_array_equal(result, 2 * array)
        result[0] = 5.0
    assert current().parcels.lent == {} or _drains()


def _drains() -> bool:
    deadline_s = time.monotonic() + 5
    while current().parcels.lent and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return current().parcels.lent == {}


def test_a_death_ends_the_waits_on_the_dead_and_names_it(cluster: Cluster) -> None:
    from tests.runtime.workers import Peer

    group = Peer.launch(cluster, name="doomed", placement="0-1", threads=1)
    waiting = group.on(0).receive_any("doomed", 1)
    time.sleep(0.3)
    group.on(1).die()
    with pytest.raises(WorkerError, match=r"recv from doomed\[1\].*is gone") as caught:
        waiting.wait(10)
    assert isinstance(caught.value.__cause__, PeerDiedError)
    with pytest.raises(WorkerError, match=r"doomed\[1\] is gone"):
        group.on(0).send_to("doomed", 1).wait(10)
    group.relaunch(1)
    sending = group.on(0).send_to("doomed", 1)
    assert group.on(1).receive_any("doomed", 0).wait(10) == ["hello"]
    sending.wait(10)
    group.close()


def test_a_send_that_fails_leaves_nothing_behind(
    cluster: Cluster, pair: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, array = cluster.context.transfer, np.zeros(1_000_000, np.uint8)

    def full(*_: object) -> None:
        raise StuckError("no shared memory")

    with monkeypatch.context() as broken:
        broken.setattr(cluster.context.store, "write", full)
        for _ in range(3):
            with pytest.raises(StuckError, match="no shared memory"):
                transfer.send(array, "pair", 1, timeout_s=5)
    assert cluster.context.parcels.lent == {}
    answer = pair.on(1).receive_any("driver", 0)
    transfer.send("small", "pair", 1, timeout_s=5)
    assert answer.wait(10) == ["small"]


def test_what_stays_in_device_memory_is_sent_when_the_receiver_has_copied_it(
    cluster: Cluster, pair: WorkerGroup[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exporting:
        """As a hook that has taken tensors out of the object: the peer's answer is waited for."""

        kind = "npu"

        def __call__(self, tensor: Any) -> None:
            return None

    transfer = cluster.context.transfer
    monkeypatch.setattr(point_to_point, "shares_a_device", lambda *_: True)
    monkeypatch.setattr(point_to_point, "Exporter", lambda *_: Exporting())
    with pytest.raises(StuckError, match=r"send to pair\[1\] has not ended on pair\[1\] within"):
        transfer.send("unread", "pair", 1, timeout_s=0.2)
    answers = [pair.on(1).receive_any("driver", 0) for _ in range(2)]
    transfer.send("read", "pair", 1, timeout_s=20)
    assert [answer.wait(10) for answer in answers] == [["unread"], ["read"]]
    assert transfer.routes["npu_ipc"] == 2


def test_a_receive_that_was_given_up_takes_nothing_from_the_next(
    cluster: Cluster, pair: WorkerGroup[Any]
) -> None:
    transfer = cluster.context.transfer
    with pytest.raises(StuckError, match=r"recv from pair\[0\] did not end within 0.1 s"):
        transfer.recv("pair", 0, timeout_s=0.1)
    pair.on(0).send_to("driver", 0).wait(10)
    assert transfer.recv("pair", 0, timeout_s=10) == "hello"


def test_a_rank_that_does_not_exist_is_named(pair: WorkerGroup[Any]) -> None:
    with pytest.raises(WorkerError, match=r"pair has ranks 0, 1"):
        pair.on(0).send_to("pair", 7, timeout_s=0.3).wait(10)


def test_a_group_gets_a_fresh_rendezvous_each_time(pair: WorkerGroup[Any]) -> None:
    first = pair.meet().wait(10)
    second = pair.meet().wait(10)
    assert first[0][0] == first[1][0] != second[0][0]
    assert [(rank, size) for _, rank, size in first] == [(0, 2), (1, 2)]


def test_nobody_else_gets_the_port_of_a_rendezvous_before_its_store_is_open(pair: WorkerGroup[Any]) -> None:
    assert pair.meet_while_another_wants_the_port().wait(50) == [(True, "hello")] * 2


def test_the_driver_sends_and_receives_too(cluster: Cluster, pair: WorkerGroup[Any]) -> None:
    answer = pair.on(1).receive_any("driver", 0)
    cluster.context.transfer.send({"x": np.ones(100_000)}, "pair", 1)
    assert answer.wait(10)[0]["x"].sum() == 100_000
    pair.on(0).send_to("driver", 0)
    assert cluster.context.transfer.recv("pair", 0, timeout_s=10) == "hello"
