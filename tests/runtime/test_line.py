"""Lines carry whole messages of any size, never block a sender, and are read by whoever waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.errors import PeerDiedError
from rill.runtime.cluster import Cluster
from rill.runtime.handle import Handle
from rill.runtime.process.line import Line
from rill.runtime.process.line_pump import LinePump, Waiter
from rill.runtime.process.mailbox import Frames
from rill.runtime.process.work_inbox import WorkInbox, connect
from tests.runtime.workers import Echo

pytestmark = pytest.mark.timeout(60)


def never(_: Line) -> None:
    raise AssertionError("a message got stuck")


def make_pair() -> tuple[Line, Line, list[Line]]:
    stuck: list[Line] = []
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Line(left, stuck.append), Line(right, never), stuck


def read_all(line: Line, num_messages: int, sender: Line) -> list[Frames]:
    messages: list[Frames] = []
    while len(messages) < num_messages:
        sender.flush()
        messages += line.read()
    return messages


frames_of_any_size = st.lists(
    st.one_of(st.binary(max_size=50), st.integers(60_000, 300_000).map(lambda n: bytes([n % 251]) * n)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(frames_of_any_size, min_size=1, max_size=6))
def test_messages_arrive_whole_and_in_order(messages: list[list[bytes]]) -> None:
    left, right, _ = make_pair()
    for message in messages:
        left.send(message)
    received = read_all(right, len(messages), left)
    assert [[bytes(frame) for frame in frames] for frames in received] == messages
    left.close()
    right.close()


def test_a_sender_does_not_wait_for_a_reader_and_may_change_what_it_sent() -> None:
    left, right, stuck = make_pair()
    own = bytearray(b"a" * 5_000_000)
    for _ in range(4):
        left.send([b"head", own])
    assert stuck == [left] and left.is_stuck
    own[:] = b"b" * len(own)
    for frames in read_all(right, 4, left):
        assert bytes(frames[1]) == b"a" * 5_000_000
    assert not left.is_stuck


def test_a_closed_end_is_the_end_of_the_line_and_no_error_for_a_sender() -> None:
    left, right, _ = make_pair()
    left.send([b"last"])
    left.close()
    assert right.read() == [[b"last"]]
    with pytest.raises(EOFError):
        right.read()
    right.send([b"to nobody"])
    right.close()


def test_a_leader_that_leaves_hands_over_to_a_follower() -> None:
    answers: list[bytes] = []
    waiting: dict[bytes, list[Waiter]] = {b"1": [], b"2": []}

    def handle(frames: Frames) -> None:
        answers.append(frames[0])
        pump.wake(waiting[frames[0]])

    pump = LinePump(handle, lambda: False)
    left, right, _ = make_pair()
    pump.add(left)
    ended: list[bytes] = []

    def wait_for(name: bytes) -> None:
        assert pump.wait(waiting[name], lambda: name in answers, 20.0)
        ended.append(name)

    threads = [threading.Thread(target=wait_for, args=(name,)) for name in (b"1", b"2")]
    for n, thread in enumerate(threads):
        thread.start()
        time.sleep(0.05)
        assert len(waiting[b"1"]) + len(waiting[b"2"]) == n + 1
    right.send([b"1"])  # of the leader: the follower must lead then
    threads[0].join(5)
    assert ended == [b"1"]
    right.send([b"2"])
    threads[1].join(5)
    assert ended == [b"1", b"2"]
    pump.close()


def test_a_wait_that_nobody_settles_ends_at_its_deadline() -> None:
    pump = LinePump(lambda frames: None, lambda: False)
    started_s = time.monotonic()
    assert not pump.wait([], lambda: False, 0.1)
    assert 0.1 <= time.monotonic() - started_s < 2
    pump.close()


def test_a_wait_without_time_finds_what_has_arrived() -> None:
    answers: list[Frames] = []
    pump = LinePump(answers.append, lambda: False)
    left, right, _ = make_pair()
    pump.add(left)
    right.send([b"here"])
    assert pump.wait([], lambda: bool(answers), 0.0)
    pump.close()


# --- in a cluster -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:2") as cluster:
        yield cluster


def test_many_calls_to_a_busy_worker_return_at_once_and_all_run(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="busy", placement="0")
    sleeping = group.sleep(2.0)
    padding = b"x" * 1000
    handles = [group.echo((n, padding)) for n in range(2000)]  # two megabytes: more than a socket holds
    assert not sleeping.done()
    assert [handle.wait(30)[0][0] for handle in handles] == list(range(2000))
    group.close()


def test_answers_are_read_though_nobody_waits(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="unheard", placement="0")
    told = threading.Event()
    results: list[Handle] = []

    def take(handle: Handle) -> None:
        results.append(handle)
        told.set()

    group.sleep(0.3).on_done(take)
    assert told.wait(10) and results[0].wait(0) == ["slept"]
    time.sleep(0.3)  # the pump sleeps now
    told.clear()
    group.add(1).on_done(take)
    assert told.wait(10)
    group.close()


def test_threads_that_wait_for_different_ranks_each_get_their_own_answer(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="both", placement="0-1:0-3")
    wrong: list[object] = []

    def call(rank: int) -> None:
        for n in range(100):
            result = group.on(rank).echo((rank, n)).wait(30)
            if result != [(rank, n)]:
                wrong.append(result)

    threads = [threading.Thread(target=call, args=(n % 4,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    group.close()


def test_a_death_ends_the_wait_of_the_thread_that_reads(cluster: Cluster) -> None:
    group = Echo.launch(cluster, name="short", placement="0")
    started_s = time.monotonic()
    with pytest.raises(PeerDiedError):
        group.die(3).wait(30)
    assert time.monotonic() - started_s < 10
    group.close()


def test_answers_that_a_dead_caller_did_not_take_go_with_it(tmp_path: Path) -> None:
    pump = LinePump(lambda _: None, lambda: False)
    with zmq.Context() as context:
        inbox = WorkInbox(str(tmp_path / "work"), pump, context=context, tcp_host=None, key=None)
        caller = connect(inbox.path, never)
        assert caller is not None
        caller.send([b"call"])
        _, line = inbox.next()
        assert line is not None
        line.send([bytes(8_000_000)])
        assert pump._stuck
        caller.close()
        inbox._read(line)
        assert not pump._stuck, "the thread that sends what is stuck would never sleep again"
        inbox.close()
        pump.close()
