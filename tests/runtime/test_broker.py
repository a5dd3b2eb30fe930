"""The broker's rules, and the whole of it against a simple model."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rill.runtime.hub.grants import EPOCH_END, ITEMS, NOTHING
from tests.runtime.hub_fakes import OPTIONS, FakeHub, descriptor, values_of

DRIVER = "driver[0]#0"


@pytest.fixture
def hub() -> FakeHub:
    hub = FakeHub()
    hub.join(DRIVER)
    hub.join("a[0]#0", group="a", rank=0, world_size=2)
    hub.join("a[1]#0", group="a", rank=1, world_size=2)
    hub.call(DRIVER, "broker.create", ["c", OPTIONS])
    return hub


def put(hub: FakeHub, *numbers: int, client: str = DRIVER, **kwargs: Any) -> None:
    hub.send(client, "broker.put", ["c", [descriptor(n, **kwargs) for n in numbers]])


def take(hub: FakeHub, client: str, *, loop: bool = True, count: int = 1, done: Any = ()) -> Any:
    """The answer, or None while it waits."""
    seq = hub.send(client, "broker.take", ["c", count, 1, count, loop, list(done)])
    return hub.replies.get((client, seq))


def ids_of(answer: Any) -> list[int]:
    return [item[0] for item in answer[1]]


def test_items_come_in_the_order_they_were_put(hub: FakeHub) -> None:
    put(hub, 1, 2, 3)
    assert values_of(take(hub, "a[0]#0", count=2)) == [1, 2]
    assert values_of(take(hub, "a[1]#0")) == [3]


def test_a_dead_consumer_returns_its_lease_to_the_front(hub: FakeHub) -> None:
    put(hub, 1, 2, 3)
    take(hub, "a[0]#0", count=2)
    hub.kill("a[0]#0")
    assert values_of(take(hub, "a[1]#0", count=3)) == [1, 2, 3]


def test_what_is_done_is_never_delivered_again(hub: FakeHub) -> None:
    put(hub, 1, 2)
    first = take(hub, "a[0]#0")
    take(hub, "a[0]#0", done=ids_of(first))
    hub.kill("a[0]#0")
    assert values_of(take(hub, "a[1]#0")) == [2]
    assert take(hub, "a[1]#0", loop=False) is None


def test_a_loop_ends_only_when_every_item_of_the_epoch_is_done(hub: FakeHub) -> None:
    put(hub, 1)
    leased = take(hub, "a[0]#0")
    hub.call(DRIVER, "broker.end", "c")
    waiting = hub.send("a[1]#0", "broker.take", ["c", 1, 1, 1, True, []])
    assert ("a[1]#0", waiting) not in hub.replies
    hub.send("a[0]#0", "broker.settle", ["c", ids_of(leased), [], []])
    assert hub.replies[("a[1]#0", waiting)][0] == EPOCH_END


def test_the_item_of_a_consumer_that_died_after_the_epochs_end_finds_the_other_one(hub: FakeHub) -> None:
    put(hub, 7)
    take(hub, "a[0]#0")
    hub.call(DRIVER, "broker.end", "c")
    waiting = hub.send("a[1]#0", "broker.take", ["c", 1, 1, 1, True, []])
    hub.kill("a[0]#0")
    assert values_of(hub.replies[("a[1]#0", waiting)]) == [7]


def test_a_rank_that_comes_late_still_meets_the_end_of_an_epoch_that_others_drained(hub: FakeHub) -> None:
    put(hub, 1)
    first = take(hub, "a[0]#0")
    hub.call(DRIVER, "broker.end", "c")
    assert take(hub, "a[0]#0", done=ids_of(first))[0] == EPOCH_END
    assert take(hub, "a[1]#0")[0] == EPOCH_END
    assert take(hub, "a[1]#0") is None  # the next epoch is open


def test_a_group_that_is_launched_later_begins_with_the_running_epoch(hub: FakeHub) -> None:
    first = (put(hub, 1), take(hub, "a[0]#0"))[1]
    hub.call(DRIVER, "broker.end", "c")
    take(hub, "a[0]#0", done=ids_of(first))
    hub.join("late[0]#0", group="late", rank=0, world_size=1)
    assert take(hub, "late[0]#0") is None


def test_items_put_after_an_end_wait_for_the_next_epoch(hub: FakeHub) -> None:
    put(hub, 1)
    hub.call(DRIVER, "broker.end", "c")
    put(hub, 2)
    answer = take(hub, "a[0]#0")
    assert values_of(answer) == [1]
    assert take(hub, "a[0]#0", done=ids_of(answer))[0] == EPOCH_END
    assert values_of(take(hub, "a[0]#0")) == [2]


def test_an_epoch_of_a_group_ends_when_every_rank_has_ended_it(hub: FakeHub) -> None:
    put(hub, 1, client="a[0]#0")
    assert hub.call("a[0]#0", "broker.end", "c") == 0
    put(hub, 2, client="a[0]#0")  # already of its next epoch
    put(hub, 3, client="a[1]#0")
    assert hub.call("a[1]#0", "broker.end", "c") == 1
    answer = take(hub, DRIVER, count=3)
    assert values_of(answer) == [1, 3]  # cut short by the epoch's end


def test_a_batch_by_weight_waits_for_its_weight_and_nobody_overtakes_it(hub: FakeHub) -> None:
    put(hub, 1, weight=3.0)
    batch = hub.send("a[0]#0", "broker.take_by", ["c", "weight", 5.0, True])
    single = hub.send("a[1]#0", "broker.take", ["c", 1, 1, 1, True, []])
    assert ("a[0]#0", batch) not in hub.replies and ("a[1]#0", single) not in hub.replies
    put(hub, 2, weight=2.0)
    assert values_of(hub.replies[("a[0]#0", batch)]) == [1, 2]
    put(hub, 3)
    assert values_of(hub.replies[("a[1]#0", single)]) == [3]


def test_keys_are_waited_for_and_taken_exactly(hub: FakeHub) -> None:
    put(hub, 1, key="x")
    put(hub, 2)
    wanted = hub.send("a[0]#0", "broker.take_by", ["c", "keys", ["y", "x"], False])
    assert values_of(take(hub, "a[1]#0", loop=False)) == [1]  # a key that is waited for is not reserved
    put(hub, 3, key="y")
    put(hub, 4, key="x")
    assert values_of(hub.replies[("a[0]#0", wanted)]) == [3, 4]


def test_a_choice_whose_item_is_gone_takes_nothing(hub: FakeHub) -> None:
    put(hub, 1, 2)
    _, rows = hub.machine.query("broker.peek", ["c", 10])
    take(hub, "a[1]#0")
    seq = hub.send("a[0]#0", "broker.take_by", ["c", "ids", [rows[0][0], rows[1][0]], False])
    assert hub.replies[("a[0]#0", seq)][0] == NOTHING
    assert hub.machine.query("broker.stats", "c")["depth"] == 1


def test_a_full_channel_holds_its_producer_until_there_is_room(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ["small", {**OPTIONS, "capacity_items": 2}])
    seq = hub.send(DRIVER, "broker.put_wait", ["small", [descriptor(n) for n in range(3)]])
    assert (DRIVER, seq) not in hub.replies
    hub.send("a[0]#0", "broker.take", ["small", 1, 1, 1, True, []])
    assert hub.replies[(DRIVER, seq)] == 0


def test_a_cancelled_put_leaves_nothing_behind(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ["small", {**OPTIONS, "capacity_items": 1}])
    seq = hub.send(DRIVER, "broker.put_wait", ["small", [descriptor(1), descriptor(2)]])
    hub.send(DRIVER, "broker.cancel_put", ["small", seq])
    assert hub.replies[(DRIVER, seq)] == 1
    hub.call(DRIVER, "broker.end", "small")
    answer = hub.send("a[0]#0", "broker.take", ["small", 5, 1, 5, True, []])
    assert values_of(hub.replies[("a[0]#0", answer)]) == [1]


def test_a_batch_larger_than_the_capacity_is_refused_by_name(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ["small", {**OPTIONS, "capacity_items": 2}])
    hub.send(DRIVER, "broker.put_wait", ["small", [descriptor(n) for n in range(5)]])
    seq = hub.send("a[0]#0", "broker.take", ["small", 4, 1, 4, True, []])
    kind, message = hub.failures[("a[0]#0", seq)]
    assert kind == "ConfigError" and "capacity" in message


def test_granularity_decides_how_many_a_loop_receives(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.configure", ["c", {"granularity": 3}])
    put(hub, 1, 2)
    seq = hub.send("a[0]#0", "broker.take", ["c", 0, 1, 64, True, []])
    assert ("a[0]#0", seq) not in hub.replies
    put(hub, 3, 4)
    assert values_of(hub.replies[("a[0]#0", seq)]) == [1, 2, 3]


def test_quick_work_goes_to_one_consumer_and_the_rest_is_shared_out(hub: FakeHub) -> None:
    first, second = (hub.send(f"a[{n}]#0", "broker.take", ["c", 1, 8, 100, True, []]) for n in range(2))
    put(hub, *range(6))  # less than a consumer may have at once
    assert values_of(hub.replies["a[0]#0", first]) == list(range(6))
    put(hub, *range(40))
    assert values_of(hub.replies["a[1]#0", second]) == list(range(20))  # its fair part


def test_closing_ends_every_wait(hub: FakeHub) -> None:
    seq = hub.send("a[0]#0", "broker.take", ["c", 1, 1, 1, True, []])
    hub.call(DRIVER, "broker.close", "c")
    assert hub.failures[("a[0]#0", seq)][0] == "ChannelClosedError"
    late = hub.send("a[0]#0", "broker.take", ["c", 1, 1, 1, True, []])
    assert hub.failures[("a[0]#0", late)][0] == "ChannelClosedError"


def share(hub: FakeHub, key: Any, rank: int, world: int, numbers: list[int]) -> None:
    hub.send(
        f"a[{rank}]#0",
        "broker.put_share",
        ["c", key, rank, world, [descriptor(n, weight=n) for n in numbers]],
    )


def test_two_redistributions_in_one_step_do_not_mix(hub: FakeHub) -> None:
    share(hub, ["step 1", "x"], 0, 2, [1, 2, 3])
    share(hub, ["step 1", "y"], 0, 2, [10, 20, 30])
    waiting = hub.send("b[0]#0", "broker.take_share", ["c", ["step 1", "x"], 0, 4, "count"])
    assert ("b[0]#0", waiting) not in hub.replies
    share(hub, ["step 1", "x"], 1, 2, [4, 5, 6])
    share(hub, ["step 1", "y"], 1, 2, [40, 50, 60])
    assert values_of(hub.replies[("b[0]#0", waiting)]) == [1, 2]
    rest = [
        hub.call("b[0]#0", "broker.take_share", ["c", ["step 1", "x"], rank, 4, "count"])
        for rank in (1, 2, 3)
    ]
    assert [values_of(answer) for answer in rest] == [[3, 4], [5], [6]]
    heavy = [
        hub.call("b[0]#0", "broker.take_share", ["c", ["step 1", "y"], rank, 2, "weight"]) for rank in (0, 1)
    ]
    assert sorted(sum(values_of(answer)) for answer in heavy) == [100, 110]


def test_a_share_whose_consumer_died_can_be_taken_again(hub: FakeHub) -> None:
    share(hub, "k", 0, 1, [1, 2])
    hub.join("b[0]#0")
    assert values_of(hub.call("b[0]#0", "broker.take_share", ["c", "k", 0, 1, "count"])) == [1, 2]
    hub.kill("b[0]#0")
    hub.join("b[0]#1")
    assert values_of(hub.call("b[0]#1", "broker.take_share", ["c", "k", 0, 1, "count"])) == [1, 2]


def test_memory_goes_back_to_its_owner_only_when_it_is_done_and_released(hub: FakeHub) -> None:
    ref = ["n0", DRIVER, "segment.0", 64, 10, [], 8192]
    hub.send(DRIVER, "broker.put", ["c", [[1.0, None, 10, None, ref]]])
    ids = ids_of(take(hub, "a[0]#0"))
    hub.send("a[0]#0", "broker.settle", ["c", [], ids, []])
    assert DRIVER not in hub.pushes
    hub.send("a[0]#0", "broker.settle", ["c", ids, [], []])
    assert hub.pushes[DRIVER] == [("store_free", [["segment.0", 64]])]


def test_a_dead_producers_segments_are_deleted_once_nothing_lies_in_them(hub: FakeHub) -> None:
    for offset in (0, 64):
        ref = ["n0", "a[1]#0", "a[1]#0.5", offset, 10, [], 8192]
        hub.send("a[1]#0", "broker.put", ["c", [[1.0, None, 10, None, ref]]])
    hub.kill("a[1]#0")
    assert hub.machine.unlinks == [["a[1]#0", ["a[1]#0.5"]]]
    for _ in range(2):
        ids = ids_of(take(hub, "a[0]#0"))
        assert hub.machine.unlinks[1:] == []
        hub.send("a[0]#0", "broker.settle", ["c", ids, ids, []])
    assert hub.machine.unlinks[1:] == ["a[1]#0.5"]


class ChannelAgainstModel(RuleBasedStateMachine):
    """Puts, takes, acknowledgements, returns, deaths, epochs and hub restarts in any order.

    The model is a list of queues, one per epoch, and a table of leases.
    """

    CONSUMERS = 3

    def __init__(self) -> None:
        super().__init__()
        self.hub = FakeHub()
        self.hub.join(DRIVER)
        self.hub.call(DRIVER, "broker.create", ["c", OPTIONS])
        self.launch = [0] * self.CONSUMERS
        self.queues: list[deque[int]] = [deque()]
        self.leases: dict[int, dict[int, tuple[int, int]]] = {n: {} for n in range(self.CONSUMERS)}
        self.position = [0] * self.CONSUMERS
        self.finished: set[int] = set()
        self.next_value = 0

    @initialize()
    def join_all(self) -> None:
        for n in range(self.CONSUMERS):
            self.hub.join(self.client(n), group="w", rank=n, world_size=self.CONSUMERS)

    def client(self, n: int) -> str:
        return f"w[{n}]#{self.launch[n]}"

    def unfinished_in(self, epoch: int) -> int:
        leased = sum(e == epoch for held in self.leases.values() for _, e in held.values())
        return leased + (len(self.queues[epoch]) if epoch < len(self.queues) else 0)

    @rule(count=st.integers(1, 4))
    def put(self, count: int) -> None:
        numbers = list(range(self.next_value, self.next_value + count))
        self.next_value += count
        self.queues[-1].extend(numbers)
        self.hub.send(DRIVER, "broker.put", ["c", [descriptor(n) for n in numbers]])

    @rule()
    def end(self) -> None:
        self.queues.append(deque())
        self.hub.call(DRIVER, "broker.end", "c")

    @rule(n=st.integers(0, CONSUMERS - 1), count=st.integers(1, 3))
    def take(self, n: int, count: int) -> None:
        client, epoch = self.client(n), self.position[n]
        seq = self.hub.send(client, "broker.take", ["c", count, 1, count, True, []])
        answer = self.hub.replies.get((client, seq))
        available = [
            (v, e) for e in range(epoch + 1) for v in (self.queues[e] if e < len(self.queues) else ())
        ]
        has_ended = epoch < len(self.queues) - 1
        if len(available) >= count or (available and has_ended):
            assert answer[0] == ITEMS
            expected = available[:count]
            assert values_of(answer) == [v for v, _ in expected]
            for item, (value, item_epoch) in zip(answer[1], expected, strict=True):
                self.queues[item_epoch].popleft()
                self.leases[n][item[0]] = (value, item_epoch)
        elif has_ended and all(self.unfinished_in(e) == 0 for e in range(epoch + 1)):
            assert answer[0] == EPOCH_END
            self.position[n] += 1
        else:
            assert answer is None
            self.hub.send(client, "broker.cancel_take", ["c", seq])
            assert self.hub.replies[(client, seq)][0] == NOTHING

    @rule(n=st.integers(0, CONSUMERS - 1), how_many=st.integers(1, 3))
    def done(self, n: int, how_many: int) -> None:
        ids = list(self.leases[n])[:how_many]
        self.hub.send(self.client(n), "broker.settle", ["c", ids, [], []])
        for item_id in ids:
            value, _ = self.leases[n].pop(item_id)
            assert value not in self.finished, "delivered twice"
            self.finished.add(value)

    def give_back(self, n: int, ids: list[int]) -> None:
        by_epoch: dict[int, list[int]] = {}
        for item_id in sorted(ids):
            value, epoch = self.leases[n].pop(item_id)
            by_epoch.setdefault(epoch, []).append(value)
        for epoch, values in by_epoch.items():
            self.queues[epoch].extendleft(reversed(values))

    @rule(n=st.integers(0, CONSUMERS - 1), how_many=st.integers(1, 3))
    def return_some(self, n: int, how_many: int) -> None:
        ids = list(self.leases[n])[:how_many]
        self.hub.send(self.client(n), "broker.settle", ["c", [], [], ids])
        self.give_back(n, ids)

    @rule(n=st.integers(0, CONSUMERS - 1))
    def kill(self, n: int) -> None:
        self.hub.kill(self.client(n))
        self.give_back(n, list(self.leases[n]))
        self.launch[n] += 1
        self.hub.join(self.client(n), group="w", rank=n, world_size=self.CONSUMERS)

    @rule(from_journal=st.booleans())
    def restart_hub(self, from_journal: bool) -> None:
        if from_journal:
            self.hub.restart_from_journal()
        else:
            self.hub.restart_from_snapshot()

    @invariant()
    def depth_agrees(self) -> None:
        assert self.hub.machine.query("broker.stats", "c")["depth"] == sum(map(len, self.queues))


TestChannelAgainstModel = ChannelAgainstModel.TestCase
TestChannelAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
