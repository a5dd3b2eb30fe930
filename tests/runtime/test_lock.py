"""Device locks: whose turn it is, what moves in and out, and figure 5's program on shared and on split devices."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rill.errors import PeerDiedError, WorkerError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.hub.history import CallRecord
from rill.runtime.hub.locks import LINGER_S
from rill.runtime.hub.messages import Acquire, ChannelOptions, Evict, Evicted, OutKind
from rill.runtime.process.report import collect
from tests.runtime.channel_workers import Stage
from tests.runtime.hub_fakes import FakeHub, done, put, take, word
from tests.runtime.leftovers import becomes_true, hub_pid

pytestmark = pytest.mark.timeout(120)
WAIT_S = 60.0

# --- the rules, without processes -------------------------------------------------------------------------


class Turns:
    """Groups that ask for turns."""

    def __init__(self, **devices_of: list[list[int]]) -> None:
        self.hub = FakeHub()
        self.hub.join("driver[0]#0")
        self.turn: dict[str, int] = {}
        self.asked: dict[str, int] = {}
        self.devices: dict[str, list[int]] = {}
        for group, ranks in devices_of.items():
            self.tell(group, ranks)
            for rank in range(len(ranks)):
                self.hub.join(f"{group}[{rank}]#0")
        for name in ("prompts", "rollouts"):
            self.hub.call("driver[0]#0", "broker.create", ChannelOptions(name))

    def tell(self, group: str, ranks: list[list[int]]) -> None:
        """The driver's word."""
        self.devices.update({f"{group}[{rank}]": devices for rank, devices in enumerate(ranks)})
        told = word(group, 1, dict.fromkeys(range(len(ranks)), 0), dict(enumerate(ranks)))
        self.hub.send("driver[0]#0", "registry.group", told)

    def ask(self, worker: str, *channels: str, resumed: bool = False) -> None:
        devices = self.devices[worker]
        self.asked[worker] = self.hub.send(
            f"{worker}#0", "locks.acquire", Acquire(devices, list(channels), resumed)
        )

    def is_in(self, worker: str) -> bool:
        return (f"{worker}#0", self.asked[worker]) in self.hub.replies

    def leave(self, worker: str) -> None:
        turn = self.hub.replies[(f"{worker}#0", self.asked[worker])]
        self.hub.send(f"{worker}#0", "locks.release", turn)

    def is_asked_to_offload(self, worker: str) -> bool:
        return any(topic == "evict" for topic, _ in self.hub.pushes.get(f"{worker}#0", ()))

    def offload(self, worker: str, *, is_kept: bool = False) -> None:
        """Answer the newest order to offload."""
        orders = [body for topic, body in self.hub.pushes.pop(f"{worker}#0", ()) if topic == "evict"]
        self.hub.send(f"{worker}#0", "locks.evicted", Evicted(orders[-1].number, is_kept))

    def put(self, worker: str, channel: str) -> None:
        self.hub.send(f"{worker}#0", "broker.commit", put(1, channel=channel))

    def take(self, worker: str, channel: str) -> None:
        self.hub.send(f"{worker}#0", "broker.take", take(channel=channel))


def test_groups_on_different_devices_never_wait_for_each_other() -> None:
    turns = Turns(a=[[0]], b=[[1]])
    turns.ask("a[0]")
    turns.ask("b[0]")
    assert turns.is_in("a[0]") and turns.is_in("b[0]")


def test_a_group_gets_all_its_devices_or_none() -> None:
    turns = Turns(a=[[0], [1]], b=[[1], [2]])
    turns.ask("a[0]")
    turns.ask("b[1]")  # device 2 is free, but b's turn needs device 1 too
    assert turns.is_in("a[0]") and not turns.is_in("b[1]")
    turns.ask("a[1]")
    assert turns.is_in("a[1]")
    turns.leave("a[0]")
    assert not turns.is_in("b[1]")
    turns.leave("a[1]")
    assert turns.is_asked_to_offload("a[1]") and not turns.is_asked_to_offload(
        "a[0]"
    )  # b has no use for device 0
    assert not turns.is_in("b[1]")
    turns.offload("a[1]")
    assert turns.is_in("b[1]")


def test_a_group_waits_until_it_is_known_what_all_its_ranks_need() -> None:
    turns = Turns(b=[[1]])
    turns.hub.join("a[0]#0")
    turns.devices["a[0]"] = [0]
    turns.ask("a[0]")
    turns.ask("b[0]")
    assert turns.is_in("b[0]") and not turns.is_in("a[0]")
    turns.tell("a", [[0], [1]])
    assert not turns.is_in("a[0]")
    turns.leave("b[0]")
    turns.offload("b[0]")
    assert turns.is_in("a[0]")


def test_a_rank_that_lent_goes_back_into_the_turn_that_its_group_kept() -> None:
    turns = Turns(actor=[[0], [1]], rollout=[[0], [1]])
    for worker in ("actor[0]", "actor[1]"):
        turns.ask(worker, "rollouts")
        turns.take(worker, "rollouts")
    turns.put("driver[0]", "prompts")
    turns.ask("rollout[0]", "prompts", "rollouts")
    assert turns.is_asked_to_offload("actor[0]") and turns.is_asked_to_offload("actor[1]")
    turns.offload("actor[0]")
    turns.offload("actor[1]", is_kept=True)
    turns.ask("actor[0]", "rollouts", resumed=True)
    assert turns.is_in("actor[0]") and not turns.is_in("rollout[0]")


def test_coming_again_without_contention_moves_nothing() -> None:
    turns = Turns(a=[[0]], b=[[0]])
    for _ in range(3):
        turns.ask("a[0]")
        assert turns.is_in("a[0]")
        turns.leave("a[0]")
    assert not turns.is_asked_to_offload("a[0]")


def test_a_rank_may_come_again_as_often_as_its_peers_although_another_group_waits() -> None:
    """The peer may stand in a collective: it lets go of the devices when this one has joined it."""
    turns = Turns(a=[[0], [1]], b=[[0]])
    turns.ask("a[0]")
    turns.ask("a[1]")
    turns.leave("a[0]")
    turns.ask("a[0]")
    assert turns.is_in("a[0]"), "nobody else wants the devices"
    turns.ask("b[0]")
    turns.leave("a[1]")
    turns.ask("a[1]")
    assert turns.is_in("a[1]") and not turns.is_in("b[0]")
    turns.leave("a[0]")
    turns.ask("a[0]")
    assert not turns.is_in("a[0]"), "a third time is after the other group's turn"
    turns.leave("a[1]")
    turns.offload("a[0]")
    assert turns.is_in("b[0]")


def test_a_rank_that_missed_a_turn_of_its_group_may_come_again_as_often_as_its_peers() -> None:
    """A peer that was in before it came is a block ahead, and may stand in a collective there."""
    turns = Turns(a=[[0], [1]], b=[[0], [1]])
    turns.ask("a[0]")
    turns.ask("b[0]")
    turns.leave("a[0]")  # its first block, before a[1] has come
    turns.ask("a[0]")
    turns.ask("a[1]")
    turns.offload("a[0]")
    turns.leave("b[0]")
    turns.hub.tick(LINGER_S + 0.01)
    turns.offload("b[0]")
    turns.ask("b[0]")
    assert turns.is_in("a[0]") and turns.is_in("a[1]")
    turns.leave("a[1]")  # its first block
    turns.ask("a[1]")
    assert turns.is_in("a[1]"), "a[0] waits for it in the second"
    turns.leave("a[1]")
    turns.ask("a[1]")
    assert not turns.is_in("a[1]"), "now it is b's turn"


def test_waiting_groups_take_turns_in_the_order_they_came() -> None:
    turns = Turns(a=[[0]], b=[[0]], c=[[0]])
    for worker in ("a[0]", "b[0]", "c[0]"):
        turns.ask(worker)
    turns.leave("a[0]")
    turns.ask("a[0]")
    turns.offload("a[0]")
    assert turns.is_in("b[0]") and not turns.is_in("c[0]")
    turns.leave("b[0]")
    turns.offload("b[0]")
    assert turns.is_in("c[0]") and not turns.is_in("a[0]")


def test_a_known_consumer_gets_the_devices_only_after_its_producer_has_put_and_let_go() -> None:
    turns = Turns(rollout=[[0]], actor=[[0]])
    turns.put("rollout[0]", "rollouts")
    turns.take("actor[0]", "rollouts")  # roles are known now, and the channel is empty again
    turns.ask("actor[0]", "rollouts")
    assert not turns.is_in("actor[0]")
    turns.put("driver[0]", "prompts")
    turns.ask("rollout[0]", "prompts", "rollouts")
    assert turns.is_in("rollout[0]")
    turns.put("rollout[0]", "rollouts")
    assert not turns.is_in("actor[0]")
    turns.leave("rollout[0]")
    turns.offload("rollout[0]")
    assert turns.is_in("actor[0]")


def test_a_holder_that_waits_for_a_group_without_devices_lends_them() -> None:
    turns = Turns(rollout=[[0]], actor=[[0]])
    turns.ask("actor[0]", "rollouts")  # nothing is known yet, and nobody else asks
    assert turns.is_in("actor[0]")
    turns.take("actor[0]", "rollouts")
    assert not turns.is_asked_to_offload("actor[0]")
    turns.put("driver[0]", "prompts")
    turns.ask("rollout[0]", "prompts", "rollouts")
    assert turns.is_asked_to_offload("actor[0]")
    turns.offload("actor[0]")
    assert turns.is_in("rollout[0]")
    turns.put("rollout[0]", "rollouts")
    turns.leave("rollout[0]")
    turns.ask("actor[0]", "rollouts", resumed=True)
    turns.offload("rollout[0]")
    assert turns.is_in("actor[0]")


def test_a_holder_that_waits_for_somebody_else_keeps_its_devices() -> None:
    turns = Turns(rollout=[[0]], actor=[[0]])
    turns.put("driver[0]", "prompts")
    turns.ask("rollout[0]", "prompts", "rollouts")
    turns.take("rollout[0]", "prompts")
    turns.take("rollout[0]", "prompts")  # waits for the driver
    turns.put("rollout[0]", "rollouts")
    turns.ask("actor[0]", "rollouts")
    assert not turns.is_asked_to_offload("rollout[0]")


def test_a_holder_lends_to_the_group_that_feeds_it_through_another() -> None:
    """first ──▶ prompts ──▶ second (elsewhere) ──▶ rollouts ──▶ third, which has the device and waits."""
    turns = Turns(first=[[0]], second=[[1]], third=[[0]])
    turns.ask("third[0]", "rollouts")
    turns.take("third[0]", "rollouts")
    turns.ask("second[0]", "prompts", "rollouts")
    turns.take("second[0]", "prompts")
    assert not turns.is_asked_to_offload("third[0]")
    turns.ask("first[0]", "prompts")
    assert turns.is_asked_to_offload("third[0]")
    turns.offload("third[0]")
    assert turns.is_in("first[0]")


def test_a_dead_holder_frees_its_devices() -> None:
    turns = Turns(a=[[0]], b=[[0]])
    turns.ask("a[0]")
    turns.ask("b[0]")
    turns.hub.kill("a[0]#0")
    assert turns.is_in("b[0]")


def test_a_turn_waits_a_moment_for_a_rank_that_is_late() -> None:
    turns = Turns(a=[[0], [1]], b=[[0], [1]])
    turns.ask("a[0]")
    turns.ask("b[0]")
    turns.leave("a[0]")
    assert not turns.is_asked_to_offload("a[0]")
    turns.ask("a[1]")
    assert turns.is_in("a[1]")
    turns.leave("a[1]")
    assert turns.is_asked_to_offload("a[0]")


def test_a_rank_that_never_comes_is_not_awaited_for_long() -> None:
    turns = Turns(a=[[0], [1]], b=[[0], [1]])
    turns.ask("a[0]")
    turns.ask("b[0]")
    turns.leave("a[0]")
    turns.hub.tick(LINGER_S + 0.01)
    assert turns.is_asked_to_offload("a[0]")


def test_a_late_rank_gets_a_turn_to_meet_the_end_that_the_first_has_met() -> None:
    turns = Turns(actor=[[0], [1]], rollout=[[0], [1]])
    turns.put("driver[0]", "rollouts")
    turns.hub.call("driver[0]#0", "broker.end", "rollouts")
    turns.ask("actor[0]", "rollouts")
    turns.take("actor[0]", "rollouts")
    turns.hub.send("actor[0]#0", "broker.commit", done([1], channel="rollouts"))
    turns.take("actor[0]", "rollouts")  # the epoch's end
    turns.leave("actor[0]")
    turns.hub.tick(LINGER_S + 0.01)
    turns.ask("actor[0]", "rollouts")
    assert not turns.is_in("actor[0]"), "there is nothing for it"
    turns.ask("actor[1]", "rollouts")
    assert turns.is_in("actor[1]")


def test_groups_that_fit_together_need_no_turns() -> None:
    turns = Turns(a=[[0]], b=[[0]])
    turns.hub.send("driver[0]#0", "locks.coreside", ["a", "b"])
    turns.ask("a[0]")
    turns.ask("b[0]")
    assert turns.is_in("a[0]") and turns.is_in("b[0]")
    turns.leave("a[0]")
    assert not turns.is_asked_to_offload("a[0]")


def test_groups_that_do_not_fit_any_more_take_turns_again() -> None:
    turns = Turns(a=[[0]], b=[[0]])
    turns.hub.send("driver[0]#0", "locks.coreside", ["a", "b"])
    turns.ask("a[0]")
    turns.ask("b[0]")
    turns.leave("a[0]")
    turns.leave("b[0]")
    turns.hub.send("driver[0]#0", "locks.take_turns", ["a", "b"])
    turns.ask("a[0]")
    assert turns.is_asked_to_offload("b[0]") and not turns.is_in("a[0]")
    turns.offload("b[0]")
    assert turns.is_in("a[0]")


def test_a_late_answer_to_an_eviction_does_not_hide_memory_that_came_back() -> None:
    """A is told to offload for B, B dies, A enters again: what A then says of the first order counts no more."""
    turns = Turns(a=[[0]], b=[[0]], c=[[0]])
    turns.ask("a[0]")
    turns.leave("a[0]")
    turns.ask("b[0]")
    assert turns.is_asked_to_offload("a[0]")
    turns.hub.kill("b[0]#0")
    turns.ask("a[0]")
    assert turns.is_in("a[0]")
    turns.offload("a[0]")  # the answer to the first order
    turns.leave("a[0]")
    turns.ask("c[0]")
    assert turns.is_asked_to_offload("a[0]") and not turns.is_in("c[0]")
    turns.offload("a[0]")
    assert turns.is_in("c[0]")


class OneOwnerPerDevice(RuleBasedStateMachine):
    """Workers of three groups on two shared devices that ask, leave, offload when told, wait on channels, die and come
    back, and a hub that restarts; whatever the hub says reaches them late, but in its order.

    The clients do what DeviceLock does: memory is there from the turn on, until an order to offload finds no turn (or
    one that is lent). The promise: while a worker is in its turn, no other group has memory on its devices.
    """

    GROUPS = {"a": [[0]], "b": [[0], [1]], "c": [[1]]}

    def __init__(self) -> None:
        super().__init__()
        self.hub = FakeHub()
        self.hub.join("driver[0]#0")
        for name in ("prompts", "rollouts"):
            self.hub.call("driver[0]#0", "broker.create", ChannelOptions(name))
        self.workers = [(g, r) for g, ranks in self.GROUPS.items() for r in range(len(ranks))]
        self.launch = dict.fromkeys(self.workers, 0)
        self.asked: dict[tuple[str, int], int] = {}
        self.turn: dict[tuple[str, int], int] = {}
        self.loaded: set[tuple[str, int]] = set()
        self.blocked: dict[tuple[str, int], int] = {}
        for group, ranks in self.GROUPS.items():
            told = word(group, 1, dict.fromkeys(range(len(ranks)), 0), dict(enumerate(ranks)))
            self.hub.send("driver[0]#0", "registry.group", told)
        for worker in self.workers:
            self.hub.join(self.client(worker))

    def client(self, worker: tuple[str, int]) -> str:
        return f"{worker[0]}[{worker[1]}]#{self.launch[worker]}"

    def pick(self, n: int) -> tuple[str, int]:
        return self.workers[n % len(self.workers)]

    @rule(n=st.integers(0, 3), has_channel=st.booleans())
    def ask(self, n: int, has_channel: bool) -> None:
        worker = self.pick(n)
        if worker not in self.asked and worker not in self.turn:
            wish = Acquire(self.GROUPS[worker[0]][worker[1]], ["prompts"] if has_channel else [], False)
            self.asked[worker] = self.hub.send(self.client(worker), "locks.acquire", wish)

    @rule(n=st.integers(0, 3))
    def leave(self, n: int) -> None:
        worker = self.pick(n)
        if worker in self.turn and worker not in self.blocked:
            self.hub.send(self.client(worker), "locks.release", self.turn.pop(worker))

    @rule(n=st.integers(0, 3))
    def wait_for_data(self, n: int) -> None:
        worker = self.pick(n)
        if worker in self.turn and worker not in self.blocked:
            self.blocked[worker] = self.hub.send(self.client(worker), "broker.take", take(channel="prompts"))

    @rule()
    def put(self) -> None:
        self.hub.send("driver[0]#0", "broker.commit", put(1, channel="prompts"))

    @rule(n=st.integers(0, 3))
    def deliver(self, n: int) -> None:
        worker = self.pick(n)
        said = self.hub.said.get(self.client(worker))
        if not said:
            return
        kind, ref, body = said.popleft()
        if isinstance(body, Evict):
            self.evict(worker, body)
        elif kind is OutKind.REPLY and self.asked.get(worker) == ref:
            del self.asked[worker]
            self.turn[worker] = body
            self.loaded.add(worker)
        elif kind is OutKind.REPLY and self.blocked.get(worker) == ref:
            del self.blocked[worker]
            if worker not in self.turn:  # it was lent meanwhile
                wish = Acquire(self.GROUPS[worker[0]][worker[1]], ["prompts"], True)
                self.asked[worker] = self.hub.send(self.client(worker), "locks.acquire", wish)

    def evict(self, worker: tuple[str, int], order: Evict) -> None:
        is_lending = order.turn != 0 and self.turn.get(worker) == order.turn and worker in self.blocked
        is_kept = not (is_lending or (order.turn == 0 and worker not in self.turn))
        if not is_kept:
            self.turn.pop(worker, None)
            self.loaded.discard(worker)
        self.hub.send(self.client(worker), "locks.evicted", Evicted(order.number, is_kept))

    @rule(n=st.integers(0, 3))
    def kill(self, n: int) -> None:
        worker = self.pick(n)
        self.hub.kill(self.client(worker))
        for table in (self.asked, self.turn, self.blocked):
            table.pop(worker, None)
        self.loaded.discard(worker)
        self.launch[worker] += 1
        self.hub.join(self.client(worker))

    @rule()
    def pass_time(self) -> None:
        self.hub.tick(LINGER_S + 0.01)

    @rule()
    def restart_hub(self) -> None:
        self.hub.restart_from_snapshot()

    @invariant()
    def one_owner(self) -> None:
        for group, rank in self.turn:
            for other, other_rank in self.loaded:
                shared = set(self.GROUPS[group][rank]) & set(self.GROUPS[other][other_rank])
                assert group == other or not shared, f"{group} works while {other} has memory on {shared}"

    def teardown(self) -> None:
        """Nobody is forgotten: when all let go and answer, everybody who asked gets a turn."""
        for _ in range(400):
            for n in range(len(self.workers)):
                self.leave(n)
                self.deliver(n)
            self.put()
            self.pass_time()
        assert not self.asked, "somebody waits for devices that nobody holds"


TestOneOwnerPerDevice = OneOwnerPerDevice.TestCase
TestOneOwnerPerDevice.settings = settings(max_examples=15, stateful_step_count=50, deadline=None)


@pytest.mark.slow
class TestOneOwnerPerDeviceLonger(OneOwnerPerDevice.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


def test_turns_survive_a_hub_restart() -> None:
    turns = Turns(a=[[0]], b=[[0]])
    turns.ask("a[0]")
    turns.ask("b[0]")
    turns.hub.restart_from_journal()
    turns.leave("a[0]")
    turns.offload("a[0]")
    assert turns.is_in("b[0]")


# --- with processes ---------------------------------------------------------------------------------------


def states(cluster: Cluster, group: Any) -> set[str]:
    """Whether a rank of the group is in its turn, or waits for one, as the hub knows it."""
    turns = cluster.context.hub.call("locks.turns", None, WAIT_S)
    return {
        state
        for turn in turns
        if turn["group"] == group.name
        for state in ("inside", "waiting")
        if turn[state]
    }


def test_a_thread_that_waits_beside_a_block_does_not_lend_it(cluster: Cluster, tmp_path: Path) -> None:
    """While one thread computes in its block another waits for data of the very group that wants the devices."""
    holder, other = launch(cluster, "2", tmp_path), launch(cluster, "2", tmp_path)
    numbers = Channel.create(cluster, next(_names), timeout_s=WAIT_S)
    holding = holder.hold(1.0)
    assert becomes_true(lambda: "inside" in states(cluster, holder))
    waiting = holder.take_beside(numbers)
    assert becomes_true(lambda: numbers.stats()["waiting_consumers"] == 1)
    putting = other.put_all(numbers, 1)
    began_s = holding.wait(timeout_s=WAIT_S)[0]
    putting.wait(timeout_s=WAIT_S)
    assert waiting.wait(timeout_s=WAIT_S) == [0]
    events = holder.history().wait(timeout_s=WAIT_S)[0]
    assert events == ["onload", "offload"]
    ended = told(cluster, holder, "offload", at_least=1)
    assert time.time() - ended[0].started_s < time.monotonic() - began_s - 0.9, "offloaded in the block"


def test_the_history_tells_what_a_call_took_put_and_held(cluster: Cluster, tmp_path: Path) -> None:
    rollout, actor = launch(cluster, "3", tmp_path), launch(cluster, "3", tmp_path)
    run_figure_5(cluster, rollout, actor, actor_first=False)
    generate = told(cluster, rollout, "generate", at_least=3)
    train = told(cluster, actor, "train", at_least=3)
    assert len(generate) == len(train) == 3
    (prompts,), (rollouts,) = generate[0].took, generate[0].put
    assert generate[0].took[prompts].items == generate[0].put[rollouts].items > 0
    assert list(train[0].took) == [rollouts] and train[0].took[rollouts].num_bytes > 0
    assert [turn.devices for turn in train[0].turns] == [[3]]
    assert told(cluster, rollout, "offload", at_least=1)[0].offload_s >= 0


def told(cluster: Cluster, group, method: str, *, at_least: int) -> list[CallRecord]:
    """The group's records of a method, once there are so many: an answer may overtake the record of its call."""

    def records() -> list[CallRecord]:
        return [r for r in cluster.history() if (r.group, r.method) == (group.name, method)]

    assert becomes_true(lambda: len(records()) >= at_least), records()
    return records()


_names = (f"stage{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(devices="cpu:4", trace_dir=tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


def launch(cluster: Cluster, placement: str, folder: Path):
    return Stage.launch(cluster, name=next(_names), placement=placement, folder=str(folder))


def run_figure_5(cluster: Cluster, rollout, actor, *, actor_first: bool) -> None:
    """Three iterations of the paper's program: it says nothing of devices."""
    name = next(_names)
    prompts = Channel.create(cluster, f"{name}-prompts", timeout_s=WAIT_S)
    rollouts = Channel.create(cluster, f"{name}-rollouts", timeout_s=WAIT_S)
    for _ in range(3):
        training = actor.train(rollouts) if actor_first else None
        generating = rollout.generate(prompts, rollouts)
        training = training or actor.train(rollouts)
        for n in range(12):
            prompts.put(n)
        prompts.end()
        assert sum(generating.wait(timeout_s=WAIT_S)) == 12
        rollouts.end()
        assert sum(training.wait(timeout_s=WAIT_S)) == 660


@pytest.mark.parametrize("actor_first", [False, True])
def test_figure_5_on_shared_devices_takes_turns(cluster: Cluster, tmp_path: Path, actor_first: bool) -> None:
    rollout, actor = launch(cluster, "0-1", tmp_path), launch(cluster, "0-1", tmp_path)
    run_figure_5(cluster, rollout, actor, actor_first=actor_first)
    for history in rollout.history().wait() + actor.history().wait():
        assert history[:2] == ["onload", "offload"] or history == ["onload"]
        assert 3 <= history.count("onload") <= 8  # a late rank costs a switch
    rollout.close()
    actor.close()


def test_figure_5_on_split_devices_never_switches(cluster: Cluster, tmp_path: Path) -> None:
    rollout, actor = launch(cluster, "0-1", tmp_path), launch(cluster, "2-3", tmp_path)
    run_figure_5(cluster, rollout, actor, actor_first=True)
    assert rollout.history().wait() + actor.history().wait() == [["onload"]] * 4
    rollout.close()
    actor.close()


def test_the_trace_shows_who_held_which_device_when(tmp_path: Path) -> None:
    with Cluster(devices="cpu:1", trace_dir=tmp_path / "run") as cluster:
        rollout, actor = launch(cluster, "0", tmp_path), launch(cluster, "0", tmp_path)
        run_figure_5(cluster, rollout, actor, actor_first=False)
        rollout_name, actor_name = f"{rollout.name}[0]", f"{actor.name}[0]"
    spans = []
    for path in (tmp_path / "run" / "trace").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get("kind") == "span" and record.get("lane") == "device 0":
                spans.append((record["at_ns"], record["at_ns"] + record["duration_ns"], record["name"]))
    spans.sort()
    assert {name for _, _, name in spans} == {rollout_name, actor_name}
    assert len(spans) >= 6
    for (_, end_ns, _), (start_ns, _, _) in itertools.pairwise(spans):
        assert end_ns <= start_ns, "two groups held the device at once"


def test_a_producer_on_a_full_channel_lends_the_devices_to_its_consumer(
    cluster: Cluster, tmp_path: Path
) -> None:
    producer, consumer = launch(cluster, "0", tmp_path), launch(cluster, "0", tmp_path)
    channel = Channel.create(cluster, next(_names), capacity_items=2, timeout_s=WAIT_S)
    producing = producer.put_all(channel, 9)
    summing = consumer.train(channel)
    producing.wait(timeout_s=WAIT_S)
    channel.end()
    assert summing.wait(timeout_s=WAIT_S) == [36]
    producer.close()
    consumer.close()


def test_work_of_no_channel_does_not_wait_for_the_data_that_comes_after_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """An engine that waits for jobs takes new weights: the jobs are made only once it has them."""
    stage = launch(cluster, "0", tmp_path)
    prompts, rollouts = (
        Channel.create(cluster, f"{name}-{tmp_path.name}") for name in ("prompts", "rollouts")
    )
    prompts.put(1)
    prompts.end()
    assert stage.generate(prompts, rollouts).wait(timeout_s=WAIT_S) == [
        1
    ]  # it is known to consume prompts now
    generating = stage.generate(prompts, rollouts)
    assert not generating.ended(0.3)
    stage.take_weights().wait(timeout_s=WAIT_S / 4)
    prompts.put(2)
    prompts.end()
    assert generating.wait(timeout_s=WAIT_S) == [1]
    stage.close()


def test_a_worker_that_cannot_load_gives_its_turn_back(cluster: Cluster, tmp_path: Path) -> None:
    broken, other = launch(cluster, "0", tmp_path), launch(cluster, "0", tmp_path)
    with pytest.raises(WorkerError, match="does not fit"):
        broken.fail_to_load().wait(timeout_s=WAIT_S)
    other.hold(0.0).wait(timeout_s=WAIT_S)
    broken.close()
    other.close()


def test_a_killed_holder_frees_the_devices(cluster: Cluster, tmp_path: Path) -> None:
    doomed, heir = launch(cluster, "0", tmp_path / "x"), launch(cluster, "0", tmp_path / "y")
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    with pytest.raises(PeerDiedError):
        doomed.hold_and_die().wait(timeout_s=WAIT_S)
    heir.hold(0.0).wait(timeout_s=WAIT_S)
    doomed.close()
    heir.close()


def test_the_hub_may_die_while_devices_are_held(cluster: Cluster, tmp_path: Path) -> None:
    one, other = launch(cluster, "0", tmp_path), launch(cluster, "0", tmp_path)
    first = one.hold(0.8)
    assert becomes_true(lambda: "inside" in states(cluster, one))
    second = other.hold(0.0)
    os.kill(hub_pid(cluster), signal.SIGKILL)
    (began_s,), (then_s,) = first.wait(timeout_s=WAIT_S), second.wait(timeout_s=WAIT_S)
    assert then_s >= began_s + 0.8
    one.close()
    other.close()


def test_a_wait_for_devices_ends_at_its_deadline_and_names_the_holder(
    cluster: Cluster, tmp_path: Path
) -> None:
    one, other = launch(cluster, "0", tmp_path), launch(cluster, "0", tmp_path)
    holding = one.hold(2.5)
    assert becomes_true(lambda: "inside" in states(cluster, one))
    waiting = other.hold(0.0, timeout_s=1.6)
    assert becomes_true(lambda: "waiting" in states(cluster, other))
    edges = collect(cluster.context).edges
    assert (f"{other.name}[0]", f"{one.name}[0]", "devices [0]") in [
        (e.waiter, e.needed, e.why) for e in edges
    ]
    with pytest.raises(WorkerError, match="waited 1.6 s for devices"):
        waiting.wait(timeout_s=WAIT_S)
    holding.wait(timeout_s=WAIT_S)
    other.hold(0.0).wait(timeout_s=WAIT_S)
    one.close()
    other.close()
