"""Ranks, nodes and whole groups that come, go and move while a run goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from rill.errors import (
    PeerDiedError,
    PlanError,
    RunError,
    StuckError,
    UnpicklableError,
    UserError,
    WorkerError,
)
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.device.device import Device
from rill.runtime.device.placement import Seat, seats_on_free_devices
from rill.runtime.process.backend import LocalBackend
from tests.runtime.hub_fakes import FakeHub, word
from tests.runtime.leftovers import becomes_true, nothing_left
from tests.runtime.workers import Echo, Mover, Slow

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:6") as cluster:
        yield cluster


# --- ranks ------------------------------------------------------------------------------------------------


def test_added_ranks_get_new_ids_and_calls_go_to_those_who_are_there(cluster: Cluster) -> None:
    group = Mover.launch(cluster, name="grow", placement="0-1", threads=1)
    holder = Mover.launch(cluster, name="holder", placement="5", threads=1)
    holder.keep(group).wait(20)
    assert group.add(count=1) == [2]
    assert (group.size, group.ranks) == (3, (0, 1, 2))
    assert group.where().wait(20) == [(n, (0, 1, 2), [n], 3) for n in range(3)]
    group.remove(1)
    assert group.where().wait(20) == [(0, (0, 2), [0], 2), (2, (0, 2), [2], 2)]
    assert group.add(placement="1") == [3], "an id is not given twice"
    assert [address.rank for address in group.addresses()] == [0, 2, 3]
    assert group.on(3).where().wait(20) == [(3, (0, 2, 3), [1], 3)]
    with pytest.raises(UserError, match="grow has ranks 0, 2, 3, asked for"):
        group.on(1)
    assert holder.ask_kept().wait(20) == [[(0, 2, 3), [0, 0, 0]]], "whoever holds the group follows"
    assert cluster.context.hub.call("registry.roster", "grow", 20)[2].keys() == {0, 2, 3}
    with pytest.raises(WorkerError, match="only the driver"):
        holder.shrink_kept().wait(20)
    for one in (group, holder):
        one.close()


def test_a_rank_with_notice_finishes_what_it_was_asked_for(cluster: Cluster) -> None:
    group = Mover.launch(cluster, name="noticed", placement="0-1", threads=1)
    working = group.on(1).work_until_noticed()
    group.remove(1, notice_s=20)
    assert working.wait(20) == ["noticed"]
    assert group.ranks == (0,)
    group.close()


def test_a_rank_without_notice_is_killed_and_its_calls_fail(cluster: Cluster) -> None:
    group = Mover.launch(cluster, name="dropped", placement="0-1", threads=1)
    pid = group.addresses()[1].pid
    working = group.work_until_noticed()
    group.remove(1)
    with pytest.raises(PeerDiedError, match=r"dropped\[1\]"):
        working.wait(20)
    assert not os.path.exists(f"/proc/{pid}")
    with pytest.raises(UserError, match="would have no rank left"):
        group.remove(0)
    group.close(timeout_s=0)


def test_ranks_that_cannot_start_leave_the_group_as_it_was(cluster: Cluster) -> None:
    group = Mover.launch(cluster, name="picky", placement="0", threads=1, refuse_device=2)
    with pytest.raises(WorkerError, match="too hot"):
        group.add(placement="1-2")
    assert group.ranks == (0,)
    assert group.where().wait(20) == [(0, (0,), [0], 1)]
    for wrong, error in (("9", "no device 9"), ("x", "cannot be read")):
        with pytest.raises(PlanError, match=error):
            group.add(placement=wrong)
    with pytest.raises(UserError, match="one of them"):
        group.add()
    with pytest.raises(PlanError, match="give a placement, which may share devices, or add a node"):
        group.add(count=7)
    group.close()


def test_a_rank_killed_while_it_starts_can_be_launched_again(cluster: Cluster) -> None:
    group = Slow.launch_async(cluster, name="starting", placement="0-1", start_s=1.0)
    os.kill(group.addresses()[1].pid, signal.SIGKILL)
    with pytest.raises(PeerDiedError, match=r"starting\[1\]"):
        group.ready(20)
    assert group.lost() == [1]
    group.relaunch(1)
    assert group.lost() == []
    assert group.plus(1).wait(20) == [1, 1]
    group.close()


def test_a_call_fails_only_on_the_rank_that_never_started(cluster: Cluster) -> None:
    group = Slow.launch_async(cluster, name="half", placement="0-1", start_s=0.5)
    first, second = (member for member in cluster._supervisor._groups["half"].members.values())
    cluster._node("node0").request(second.identity)
    outcomes = group.plus(1).outcomes(20)
    assert outcomes[0].value == 1 and isinstance(outcomes[1].error, PeerDiedError)
    assert first.is_running and group.lost() == [1]
    group.close()


def test_free_devices_are_of_the_same_kind_and_number_and_on_one_node() -> None:
    devices = [Device(kind="cpu", id=n, node_id=f"node{n // 3}") for n in range(6)]
    devices.append(Device(kind="arm", id=6, node_id="node1"))
    like = Seat(0, tuple(devices[:2]))
    seats = seats_on_free_devices("g", 1, like, devices, {0, 1})
    assert [[device.id for device in seat.devices] for seat in seats] == [[3, 4]]
    with pytest.raises(PlanError, match="there is room for 1"):
        seats_on_free_devices("g", 2, like, devices, {0, 1})


# --- what the hub knows -----------------------------------------------------------------------------------


def test_the_hub_follows_the_ranks_of_a_group_and_tells_everybody() -> None:
    hub = FakeHub()
    hub.join("driver[0]#0")
    membership = hub.machine.membership
    assert membership.ranks("g") == {0}
    hub.join("g[0]#0")
    hub.send("driver[0]#0", "registry.group", word("g", 1, {0: 0, 1: 0}, {0: [0], 1: [1]}))
    assert membership.ranks("g") == {0, 1} and membership.devices_of("g") == {0, 1}
    hub.send("driver[0]#0", "registry.group", word("g", 2, {0: 0, 2: 0}, {0: [0], 2: [2]}))
    assert membership.ranks("g") == {0, 2} and membership.devices_of("g") == {0, 2}
    changes = [body for topic, body in hub.pushes["g[0]#0"] if topic == "group_changed"]
    assert changes == [["g", 1], ["g", 2]]
    hub.send("driver[0]#0", "registry.group", word("g", 3, {0: 1}, {0: [5]}))
    assert membership.devices_of("g") == {5}, "it has moved"
    hub.restart_from_journal()
    assert hub.machine.membership.devices_of("g") == {5}


def test_a_group_that_grows_again_is_waited_for_not_gone() -> None:
    hub = FakeHub()
    hub.join("driver[0]#0")
    hub.send("driver[0]#0", "registry.group", word("g", 1, {0: 0, 1: 0}))
    hub.join("g[0]#0")
    hub.join("g[1]#0")
    hub.kill("g[1]#0")
    refused = hub.send("g[0]#0", "registry.find", "g[1]")
    assert "g[1] is gone" in hub.failures["g[0]#0", refused][1]
    hub.send("driver[0]#0", "registry.group", word("g", 2, {0: 1}))
    hub.join("g[0]#1")
    hub.send("driver[0]#0", "registry.group", word("g", 3, {0: 2, 1: 1}))
    hub.join("g[0]#2")
    asked = hub.send("g[0]#2", "registry.find", "g[1]")
    assert ("g[0]#2", asked) not in hub.failures and ("g[0]#2", asked) not in hub.replies
    hub.join("g[1]#1", address="here")
    assert hub.replies["g[0]#2", asked] == "here"


# --- groups that move -------------------------------------------------------------------------------------


def test_a_group_moves_with_its_state_its_name_and_its_channels(cluster: Cluster) -> None:
    group = Mover.launch(cluster, name="mover", placement="0-1", threads=1)
    holder = Mover.launch(cluster, name="follower", placement="5", threads=1)
    holder.keep(group).wait(20)
    group.on(0).increase(1).wait(20)
    group.on(1).increase(2).wait(20)
    move = group.move("2-3")
    assert (move.before, move.after) == (((0,), (1,)), ((2,), (3,)))
    assert move.state_bytes > 200_000 and move.seconds > 0 and cluster.moves[-1] is move
    assert group.increase(0).wait(20) == [1, 2]
    assert group.where().wait(20) == [(0, (0, 1), [2], 2), (1, (0, 1), [3], 2)]
    group.move([[0, 1, 2]])
    assert group.increase(0).wait(20) == [3], "the class says how states are put together"
    assert group.ranks == (0,)
    assert holder.ask_kept().wait(20) == [[(0,), [3]]], "whoever holds the group follows"
    group.close()
    holder.close()


def test_what_a_moved_group_has_not_taken_is_still_in_the_channel(cluster: Cluster) -> None:
    channel = Channel.create(cluster, "carried")
    group = Echo.launch(cluster, name="carrier", placement="0", threads=1)
    for n in range(4):
        channel.put(n)
    assert group.take_one(channel).wait(20) == [0]
    group.move("1")
    assert group.take_one(channel).wait(20) == [1]
    group.close()


def test_a_rank_that_comes_back_when_its_group_grows_is_in_the_epoch_that_is_on(cluster: Cluster) -> None:
    channel = Channel.create(cluster, "breathing")
    group = Echo.launch(cluster, name="breather", placement="0-1", threads=1)
    for placement in (None, "0", "0", "0-1", "1-2"):
        if placement is not None:
            group.move(placement)
        loops = group.take_all(channel)
        assert not loops.ended(0.5)
        assert not any(loops.so_far()), f"an epoch that was over before ended a loop on {placement}"
        channel.put("x")
        channel.end()
        assert sorted(loops.wait(20)) == [[]] * (group.size - 1) + [["x"]]
    group.close()


def test_a_group_that_cannot_start_elsewhere_is_back_with_its_state(cluster: Cluster) -> None:
    group = Mover.launch(cluster, name="stay", placement="0", threads=1, refuse_device=4)
    group.increase(7).wait(20)
    with pytest.raises(RunError, match="(?s)did not come up where it was moved to, and is back.*too hot"):
        group.move("4")
    assert group.where().wait(20) == [(0, (0,), [0], 1)]
    assert group.increase(0).wait(20) == [7]
    with pytest.raises(PlanError, match="no device 99"):
        group.move("99")
    assert group.increase(1).wait(20) == [8]
    group.close()


# --- nodes ------------------------------------------------------------------------------------------------


def test_nodes_join_leave_and_come_back_and_groups_follow() -> None:
    with nothing_left() as room, Cluster(devices="cpu:1", elastic=True) as cluster:
        room.note_sessions()
        group = Mover.launch(cluster, name="w", threads=1)
        node = cluster.add_node("cpu:2", labels=["late"])
        assert [device.id for device in cluster.devices] == [0, 1, 2]
        assert group.add(placement="late:0-1") == [1, 2]
        assert [address.node_id for address in group.addresses()] == ["node0", node.node_id, node.node_id]
        assert group.where().wait(30) == [(n, (0, 1, 2), [n], 3) for n in range(3)]
        cluster.remove_node(node.node_id)
        assert (group.ranks, len(cluster.nodes), len(cluster.devices)) == ((0,), 1, 1)
        with pytest.raises(PlanError, match="no device 1"):
            group.add(placement="1")
        again = cluster.add_node("cpu:1")
        assert group.add(count=1) == [3]
        assert group.where().wait(30) == [(0, (0, 3), [0], 2), (3, (0, 3), [3], 2)]
        far = Mover.launch(cluster, name="far", placement="3", threads=1)
        with pytest.raises(PlanError, match=f"all of far is on {again.node_id}"):
            cluster.remove_node(again.node_id)
        far.close()
        with pytest.raises(PlanError, match="the driver's own node"):
            cluster.remove_node("node0")
        with pytest.raises(RunError, match="node9 is gone"):
            cluster.remove_node("node9")


def test_a_cluster_of_one_node_says_how_to_open_one_that_grows(cluster: Cluster) -> None:
    with pytest.raises(RunError, match="elastic=True"):
        cluster.add_node("cpu:1")


def test_what_is_wrong_with_devices_of_a_new_node_leaves_the_cluster_as_it_was() -> None:
    with Cluster(devices="cpu:1", elastic=True) as cluster:
        with pytest.raises(PlanError, match="is not 'auto'"):
            cluster.add_node("nonsense")
        assert len(cluster.nodes) == 1
        assert cluster.add_node("cpu:1").node_id == "node1"


# --- bad input --------------------------------------------------------------------------------------------


def test_a_node_that_refuses_leaves_nothing_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(backend=LocalBackend("cpu:1", num_nodes=2)) as cluster:
        far = cluster._node("node1")

        def refuse(_: object) -> None:
            raise RunError("node1 does not answer")

        with monkeypatch.context() as patched:
            patched.setattr(far, "request", refuse)
            with pytest.raises(RunError, match="node1 does not answer"):
                Echo.launch(cluster, name="g", threads=1)
        assert becomes_true(lambda: not cluster._supervisor._by_key)
        assert Echo.launch(cluster, name="g", threads=1).plus(1).wait(30) == [1, 1]


def test_what_cannot_be_pickled_is_named_before_anything_starts(cluster: Cluster) -> None:
    with pytest.raises(UnpicklableError, match=r"\['base'\]"):
        Echo.launch(cluster, name="unpicklable", base=lambda: None)
    assert "unpicklable" not in cluster._supervisor._groups


def test_ctrl_c_while_workers_start_is_not_lost_behind_a_kill_that_takes_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def slow(*_: object) -> None:
        raise StuckError("late[0]#0 did not end within 10 s of its kill")

    with monkeypatch.context() as patched:
        patched.setattr(cluster._supervisor, "wait_ready", interrupted)
        patched.setattr(cluster._supervisor, "close_group", slow)
        with pytest.raises(KeyboardInterrupt):
            Echo.launch(cluster, name="late", placement="0")
    cluster._supervisor.close_group("late", 0.0)


class Hider(Echo):
    """Has a method that its group has too."""

    def move(self) -> None:
        pass


def test_a_method_that_the_group_would_hide_is_refused(cluster: Cluster) -> None:
    with pytest.raises(UserError, match=r"Hider\.move\(\) cannot be called through its group"):
        Hider.launch(cluster, name="hider")


def test_a_group_of_a_closed_cluster_says_so() -> None:
    with Cluster(devices="cpu:1", elastic=True) as cluster:
        group = Echo.launch(cluster, name="g", threads=1)
    for use in (
        lambda: group.plus(1),
        lambda: group.add(count=1),
        lambda: group.move("0"),
        lambda: cluster.add_node("cpu:1"),
        lambda: Echo.launch(cluster, name="late"),
    ):
        with pytest.raises(RunError, match="closed"):
            use()


def test_a_worker_that_computes_without_a_pause_is_not_taken_for_dead(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="deaf", placement="0", threads=1)
    before = group.pid().wait(20)
    group.hold_the_interpreter(1.5).wait(30)
    assert group.pid().wait(20) == before and group.lost() == []
    time.sleep(0.1)
    assert "deaf[0]#0" in cluster.context.hub.call("registry.members", None, 20)
    group.close()
