"""The broker's rules, and the whole of it against a simple model."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rill.runtime.hub.messages import (
    ChannelOptions,
    Commit,
    GiveBack,
    Grant,
    Ids,
    Item,
    Puts,
)
from rill.runtime.transfer.segments import Ref
from tests.runtime.hub_fakes import FakeHub, done, ids_of, put, puts, take, values_of, word

DRIVER = "driver[0]#0"
A0, A1 = "a[0]#0", "a[1]#0"


@pytest.fixture
def hub() -> FakeHub:
    hub = FakeHub()
    hub.join(DRIVER)
    hub.join(A0, world_size=2)
    hub.join(A1, world_size=2)
    hub.call(DRIVER, "broker.create", ChannelOptions("c"))
    return hub


def send_put(hub: FakeHub, *numbers: int, client: str = DRIVER, **kwargs: Any) -> None:
    hub.send(client, "broker.commit", put(*numbers, **kwargs))


def ask_take(hub: FakeHub, client: str, count: int = 1, **kwargs: Any) -> Any:
    """The answer, or None while it waits."""
    seq = hub.send(client, "broker.take", take(count, **kwargs))
    return hub.replies.get((client, seq))


def finish(hub: FakeHub, client: str, ids: list[int], *outputs: Puts) -> None:
    hub.send(client, "broker.commit", done(ids, *outputs))


def test_items_come_in_the_order_they_were_put(hub: FakeHub) -> None:
    send_put(hub, 1, 2, 3)
    assert values_of(ask_take(hub, A0, 2)) == [1, 2]
    assert values_of(ask_take(hub, A1)) == [3]


def test_a_dead_consumer_returns_its_lease_to_the_front(hub: FakeHub) -> None:
    send_put(hub, 1, 2, 3)
    ask_take(hub, A0, 2)
    hub.kill(A0)
    assert [values_of(ask_take(hub, A1)) for _ in range(3)] == [[1], [2], [3]]


def test_what_is_done_is_never_delivered_again(hub: FakeHub) -> None:
    send_put(hub, 1, 2)
    finish(hub, A0, ids_of(ask_take(hub, A0)))
    ask_take(hub, A0)
    hub.kill(A0)
    assert values_of(ask_take(hub, A1)) == [2]
    assert ask_take(hub, A1, in_loop=False) is None


def test_an_item_and_what_came_of_it_are_one_record(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ChannelOptions("out"))
    send_put(hub, 1)
    leased = ask_take(hub, A0)
    assert hub.stats("out")["depth"] == 0
    finish(hub, A0, ids_of(leased), puts(10, 11, channel="out"))
    hub.kill(A0)
    assert values_of(ask_take(hub, A1, 2, channel="out")) == [10, 11]
    assert hub.stats("c")["num_redelivered"] == 0


def test_a_commit_into_a_closed_channel_finishes_nothing(hub: FakeHub) -> None:
    for name in ("open", "closed"):
        hub.call(DRIVER, "broker.create", ChannelOptions(name))
    hub.call(DRIVER, "broker.close", "closed")
    send_put(hub, 1)
    leased = ask_take(hub, A0)
    finish(hub, A0, ids_of(leased), puts(10, channel="open"), puts(11, channel="closed"))
    assert hub.pushes[A0][-1][0] == "commit_failed"
    assert hub.stats("open")["depth"] == 0
    hub.kill(A0)
    assert values_of(ask_take(hub, A1)) == [1]


def test_what_came_of_an_item_waits_for_room_with_the_hub(hub: FakeHub) -> None:
    """The item is finished at once; its consumer may die, and its output still gets in."""
    hub.call(DRIVER, "broker.create", ChannelOptions("small", capacity_items=1))
    hub.call(DRIVER, "broker.commit", put(0, channel="small", wants_reply=True))
    send_put(hub, 1)
    leased = ask_take(hub, A0)
    commit = Commit([Ids("c", ids_of(leased))], [puts(10, channel="small")], True)
    seq = hub.send(A0, "broker.commit", commit)
    assert (A0, seq) not in hub.replies
    hub.kill(A0)
    assert hub.stats("c")["depth"] == 0
    finish_me = ask_take(hub, A1, channel="small")
    assert values_of(finish_me) == [0]
    assert values_of(ask_take(hub, A1, channel="small")) == [10]


def test_a_failed_item_is_tried_again_and_set_aside_by_name_at_last(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ChannelOptions("poison", max_failures=2))
    hub.send(DRIVER, "broker.commit", put(1, 2, channel="poison", key="k"))
    for _ in range(2):
        leased = ask_take(hub, A0, channel="poison")
        assert values_of(leased) == [1]
        hub.send(A0, "broker.give_back", GiveBack("poison", ids_of(leased), "ValueError: no"))
    stats = hub.stats("poison")
    assert stats["num_set_aside"] == 1
    assert stats["set_aside"] == [{"id": 1, "key": "k", "producer": "driver[0]", "error": "ValueError: no"}]
    hub.call(DRIVER, "broker.end", "poison")
    leased = ask_take(hub, A0, channel="poison")
    assert values_of(leased) == [2]
    hub.send(A0, "broker.commit", done(ids_of(leased), channel="poison"))
    assert ask_take(hub, A0, channel="poison").is_end, "its epoch does not wait for it"


def test_deaths_are_not_failures(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ChannelOptions("p", max_failures=1))
    hub.send(DRIVER, "broker.commit", put(1, channel="p"))
    for launch in range(4):
        client = f"b[0]#{launch}"
        hub.join(client, world_size=1)
        assert values_of(ask_take(hub, client, channel="p")) == [1]
        hub.kill(client)
    assert hub.stats("p")["num_set_aside"] == 0


def test_a_loop_ends_only_when_every_item_of_the_epoch_is_done(hub: FakeHub) -> None:
    send_put(hub, 1)
    leased = ask_take(hub, A0)
    hub.call(DRIVER, "broker.end", "c")
    waiting = hub.send(A1, "broker.take", take())
    assert (A1, waiting) not in hub.replies
    finish(hub, A0, ids_of(leased))
    assert hub.replies[A1, waiting].is_end


def test_who_dies_between_the_end_of_an_epoch_and_its_answer_meets_that_end_again_and_no_other(
    hub: FakeHub,
) -> None:
    """Whoever called it calls it again, for the same epoch; one whose answer was heard is called for the next."""
    send_put(hub, 1)
    hub.call(DRIVER, "broker.end", "c")
    finish(hub, A0, ids_of(ask_take(hub, A0, epoch=0)))
    assert ask_take(hub, A0, epoch=0).is_end
    hub.send(A0, "broker.pass_end", "c")
    hub.kill(A0)
    second, third = "a[0]#1", "a[0]#2"
    hub.join(second, world_size=2)
    assert ask_take(hub, second) is None, "who does not say which epoch waits for the next"
    hub.kill(second)
    hub.join(third, world_size=2)
    assert ask_take(hub, third, epoch=0).is_end
    waiting = hub.send(third, "broker.take", take(epoch=1))
    assert (third, waiting) not in hub.replies
    send_put(hub, 2)
    assert values_of(hub.replies[third, waiting]) == [2]


def test_the_item_of_a_consumer_that_died_after_the_epochs_end_finds_the_other_one(hub: FakeHub) -> None:
    send_put(hub, 7)
    ask_take(hub, A0)
    hub.call(DRIVER, "broker.end", "c")
    waiting = hub.send(A1, "broker.take", take())
    hub.kill(A0)
    assert values_of(hub.replies[A1, waiting]) == [7]


def test_a_rank_that_comes_late_still_meets_the_end_of_an_epoch_that_others_drained(hub: FakeHub) -> None:
    send_put(hub, 1)
    first = ask_take(hub, A0)
    hub.call(DRIVER, "broker.end", "c")
    finish(hub, A0, ids_of(first))
    assert ask_take(hub, A0).is_end
    assert ask_take(hub, A1).is_end
    assert ask_take(hub, A1) is None  # the next epoch is open


def test_a_group_that_is_launched_later_begins_with_the_running_epoch(hub: FakeHub) -> None:
    send_put(hub, 1)
    first = ask_take(hub, A0)
    hub.call(DRIVER, "broker.end", "c")
    finish(hub, A0, ids_of(first))
    hub.join("late[0]#0", world_size=1)
    assert ask_take(hub, "late[0]#0") is None


def test_a_rank_that_is_added_to_its_group_begins_with_the_running_epoch(hub: FakeHub) -> None:
    hub.send(DRIVER, "registry.group", word("a", 1, {0: 0, 1: 0}))
    hub.call(DRIVER, "broker.end", "c")
    hub.join("a[2]#0", world_size=3)
    assert ask_take(hub, "a[2]#0") is None
    hub.call(DRIVER, "broker.end", "c")
    for rank, ends in ((A1, 2), ("a[2]#1", 1)):  # started again, it goes on where it was
        hub.join(rank, world_size=3)
        assert all(ask_take(hub, rank).is_end for _ in range(ends))
        assert ask_take(hub, rank) is None


def test_items_put_after_an_end_wait_for_the_next_epoch(hub: FakeHub) -> None:
    send_put(hub, 1)
    hub.call(DRIVER, "broker.end", "c")
    send_put(hub, 2)
    answer = ask_take(hub, A0)
    assert values_of(answer) == [1]
    finish(hub, A0, ids_of(answer))
    assert ask_take(hub, A0).is_end
    assert values_of(ask_take(hub, A0)) == [2]


def test_an_epoch_of_a_group_ends_when_every_rank_has_ended_it(hub: FakeHub) -> None:
    send_put(hub, 1, client=A0)
    assert hub.call(A0, "broker.end", "c") == 0
    send_put(hub, 2, client=A0)  # already of its next epoch
    send_put(hub, 3, client=A1)
    assert hub.call(A1, "broker.end", "c") == 1
    assert values_of(ask_take(hub, DRIVER, 3)) == [1, 3]  # cut short by the epoch's end


def test_two_groups_that_put_into_an_epoch_both_have_to_end_it(hub: FakeHub) -> None:
    for rank in (0, 1):
        hub.join(f"b[{rank}]#0", world_size=2)
    ends = []
    for client in (A0, "b[0]#0", A1, "b[1]#0"):
        send_put(hub, 1, client=client)
        ends.append(hub.call(client, "broker.end", "c"))
    assert ends == [0, 0, 0, 1]


def test_keys_are_waited_for_and_taken_exactly(hub: FakeHub) -> None:
    send_put(hub, 1, key="x")
    send_put(hub, 2)
    wanted = hub.send(A0, "broker.take", take(keys=["y", "x"], in_loop=False))
    assert values_of(ask_take(hub, A1, in_loop=False)) == [1]  # a key that is waited for is not reserved
    send_put(hub, 3, key="y")
    send_put(hub, 4, key="x")
    assert values_of(hub.replies[A0, wanted]) == [3, 4]


def test_a_full_channel_holds_its_producer_until_there_is_room(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ChannelOptions("small", capacity_items=2))
    seq = hub.send(DRIVER, "broker.commit", put(0, 1, 2, channel="small", wants_reply=True))
    assert (DRIVER, seq) not in hub.replies
    ask_take(hub, A0, channel="small")
    assert hub.replies[DRIVER, seq] == 0


def test_a_cancelled_put_leaves_nothing_behind(hub: FakeHub) -> None:
    hub.call(DRIVER, "broker.create", ChannelOptions("small", capacity_items=1))
    seq = hub.send(DRIVER, "broker.commit", put(1, 2, channel="small", wants_reply=True))
    hub.send(DRIVER, "broker.cancel", seq)
    assert hub.replies[DRIVER, seq] == 1
    hub.call(DRIVER, "broker.end", "small")
    assert values_of(ask_take(hub, A0, 5, channel="small")) == [1]


def test_what_is_read_ahead_leaves_others_their_part(hub: FakeHub) -> None:
    ask_take(hub, A1)  # two consumers are known
    send_put(hub, 0)
    send_put(hub, *range(40))
    assert len(ask_take(hub, A0, 100).items) == 20


def test_closing_ends_every_wait(hub: FakeHub) -> None:
    seq = hub.send(A0, "broker.take", take())
    hub.call(DRIVER, "broker.close", "c")
    assert hub.failures[A0, seq][0] == "ChannelClosedError"
    late = hub.send(A0, "broker.take", take())
    assert hub.failures[A0, late][0] == "ChannelClosedError"


def in_memory(owner: str, segment: str, offset: int) -> Commit:
    ref = Ref("n0", owner, segment, offset, 10, ())
    return Commit([], [Puts("c", [Item(1.0, None, 10, None, ref)])])


def test_memory_goes_back_to_its_owner_only_when_it_is_done_and_released(hub: FakeHub) -> None:
    hub.send(DRIVER, "broker.commit", in_memory(DRIVER, "segment.0", 64))
    ids = ids_of(ask_take(hub, A0))
    hub.send(A0, "broker.release", Ids("c", ids))
    assert DRIVER not in hub.pushes
    finish(hub, A0, ids)
    assert hub.pushes[DRIVER] == [("store_free", [("segment.0", 64)])]


def test_a_dead_producers_segments_are_deleted_once_nothing_lies_in_them(hub: FakeHub) -> None:
    for offset in (0, 64):
        hub.send(A1, "broker.commit", in_memory(A1, "a[1]#0.5", offset))
    hub.kill(A1)
    assert hub.machine.unlinks == [(A1, ["a[1]#0.5"])]
    for _ in range(2):
        ids = ids_of(ask_take(hub, A0))
        assert hub.machine.unlinks[1:] == []
        hub.send(A0, "broker.release", Ids("c", ids))
        finish(hub, A0, ids)
    assert hub.machine.unlinks[1:] == [(A1, [])]


class RelayAgainstModel(RuleBasedStateMachine):
    """Puts, takes, relays, acknowledgements, failures, deaths, epochs and hub restarts in any order.

    Numbers go into "c"; consumers finish them and put ten times the number into "out" with the same record. The model
    is a list of queues of "c", one per epoch, a table of leases, and what must be in "out".
    """

    CONSUMERS = 3

    def __init__(self) -> None:
        super().__init__()
        self.hub = FakeHub()
        self.hub.join(DRIVER)
        for name in ("c", "out"):
            self.hub.call(DRIVER, "broker.create", ChannelOptions(name, max_failures=10**6))
        self.launch = [0] * self.CONSUMERS
        self.queues: list[deque[int]] = [deque()]
        self.leases: dict[int, dict[int, tuple[int, int]]] = {n: {} for n in range(self.CONSUMERS)}
        self.position = [0] * self.CONSUMERS
        self.is_passing = [False] * self.CONSUMERS
        self.has_asked: set[int] = set()
        self.relayed: list[int] = []
        self.next_value = 0

    @initialize()
    def join_all(self) -> None:
        for n in range(self.CONSUMERS):
            self.hub.join(self.client(n), world_size=self.CONSUMERS)

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
        self.hub.send(DRIVER, "broker.commit", put(*numbers))

    @rule()
    def end(self) -> None:
        self.queues.append(deque())
        self.hub.call(DRIVER, "broker.end", "c")

    @rule(n=st.integers(0, CONSUMERS - 1), count=st.integers(1, 3))
    def take(self, n: int, count: int) -> None:
        client, epoch = self.client(n), self.position[n]
        self.is_passing[n] = False
        seq = self.hub.send(client, "broker.take", take(count))
        answer = self.hub.replies.get((client, seq))
        self.has_asked.add(n)
        available = [
            (v, e) for e in range(epoch + 1) for v in (self.queues[e] if e < len(self.queues) else ())
        ]
        has_ended = epoch < len(self.queues) - 1
        if available:
            assert answer.items
            fair = sum(map(len, self.queues)) // len(self.has_asked)
            expected = available[: max(1, min(count, fair))]
            assert values_of(answer) == [v for v, _ in expected]
            for item, (value, item_epoch) in zip(answer.items, expected, strict=True):
                self.queues[item_epoch].popleft()
                self.leases[n][item.id] = (value, item_epoch)
        elif has_ended and all(self.unfinished_in(e) == 0 for e in range(epoch + 1)):
            assert answer.is_end
            self.position[n] += 1
            self.is_passing[n] = True
        else:
            assert answer is None
            self.hub.send(client, "broker.cancel", seq)
            assert self.hub.replies[client, seq] == Grant([])

    @rule(n=st.integers(0, CONSUMERS - 1), how_many=st.integers(1, 3))
    def relay(self, n: int, how_many: int) -> None:
        ids = list(self.leases[n])[:how_many]
        values = [self.leases[n].pop(item_id)[0] for item_id in ids]
        outputs = [puts(*(10 * value for value in values), channel="out")] if values else []
        self.hub.send(self.client(n), "broker.commit", done(ids, *outputs))
        self.relayed += [10 * value for value in values]

    def give_back(self, n: int, ids: list[int]) -> None:
        by_epoch: dict[int, list[int]] = {}
        for item_id in sorted(ids):
            value, epoch = self.leases[n].pop(item_id)
            by_epoch.setdefault(epoch, []).append(value)
        for epoch, values in by_epoch.items():
            self.queues[epoch].extendleft(reversed(values))

    @rule(n=st.integers(0, CONSUMERS - 1), how_many=st.integers(1, 3), is_failure=st.booleans())
    def return_some(self, n: int, how_many: int, is_failure: bool) -> None:
        ids = list(self.leases[n])[:how_many]
        if is_failure:
            self.hub.send(self.client(n), "broker.give_back", GiveBack("c", ids, "ValueError"))
        else:
            self.hub.send(self.client(n), "broker.give_back", GiveBack("c", ids))
        self.give_back(n, ids)

    @rule(n=st.integers(0, CONSUMERS - 1))
    def kill(self, n: int) -> None:
        self.hub.kill(self.client(n))
        self.give_back(n, list(self.leases[n]))
        self.position[n] -= self.is_passing[n]  # nobody heard of the end that it had met
        self.is_passing[n] = False
        self.launch[n] += 1
        self.hub.join(self.client(n), world_size=self.CONSUMERS)

    @rule(from_journal=st.booleans())
    def restart_hub(self, from_journal: bool) -> None:
        if from_journal:
            self.hub.restart_from_journal()
        else:
            self.hub.restart_from_snapshot()

    @invariant()
    def depths_agree(self) -> None:
        assert self.hub.stats("c")["depth"] == sum(map(len, self.queues))
        assert self.hub.stats("out")["depth"] == len(self.relayed)

    def teardown(self) -> None:
        """What lies in "out" is what was relayed, each once and in that order."""
        if self.relayed:
            self.hub.join("reader[0]#0", world_size=1)
            seq = self.hub.send(
                "reader[0]#0", "broker.take", take(len(self.relayed), channel="out", in_loop=False)
            )
            assert values_of(self.hub.replies["reader[0]#0", seq]) == self.relayed


TestRelayAgainstModel = RelayAgainstModel.TestCase
TestRelayAgainstModel.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestRelayAgainstModelLonger(RelayAgainstModel.TestCase):
    settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
