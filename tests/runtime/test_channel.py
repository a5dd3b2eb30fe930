"""Channels between real processes: what arrives, what waits, and what survives kill -9."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from rill.errors import (
    ChannelClosedError,
    ConfigError,
    PeerDiedError,
    RunError,
    StuckError,
    UnpicklableError,
    WorkerError,
)
from rill.runtime.channel import Channel, Lease
from rill.runtime.cluster import Cluster
from rill.runtime.context import current
from tests.runtime.channel_workers import Consumer, GpuWorker, Producer
from tests.runtime.leftovers import hub_pid, nothing_left, own_waits

pytestmark = pytest.mark.timeout(120)
WAIT_S = 60.0
_names = (f"channel-{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(devices="cpu:4") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def producers(cluster: Cluster):
    return Producer.launch(cluster, name="producer", placement="0-1")


@pytest.fixture(scope="module")
def consumers(cluster: Cluster):
    return Consumer.launch(cluster, name="consumer", placement="0-2")


@pytest.fixture
def channel(cluster: Cluster) -> Channel:
    return Channel.create(cluster, next(_names), timeout_s=WAIT_S)


def with_deadline(channel: Channel, timeout_s: float) -> Channel:
    """Other deadlines for this process's puts from now on, without the wait for a channel that has them."""
    channel._producer.timeout_s = timeout_s
    return channel


# --- one process ------------------------------------------------------------------------------------------


def test_objects_come_out_in_order(channel: Channel) -> None:
    things = [1, "two", {"three": [3.0]}, None, np.arange(10_000), b"x" * 5000]
    for thing in things:
        channel.put(thing)
    taken = [channel.take() for _ in things]
    assert taken[:4] == things[:4]
    assert np.array_equal(taken[4], things[4])
    assert taken[5] == things[5]


def test_a_take_on_an_empty_channel_is_stuck_at_its_deadline_and_loses_nothing(channel: Channel) -> None:
    with pytest.raises(StuckError, match=channel.name):
        channel.take(timeout_s=0.1)
    channel.put(5)
    assert channel.take() == 5


def test_an_unpicklable_object_is_refused_where_it_is_put(channel: Channel) -> None:
    with pytest.raises(UnpicklableError, match="lambda|local"):
        channel.put({"f": lambda: 1})
    channel.put(1)
    assert channel.take() == 1


def test_an_item_that_can_never_fit_is_refused_where_it_is_put(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1024 * 1024))
        with pytest.raises(RunError, match="can never fit into shared memory, which has 1048576"):
            channel.put(np.zeros(77 * 1024 * 1024, np.uint8))
    channel.put("next")
    assert channel.take() == "next"


def test_a_closed_channel_says_so(channel: Channel) -> None:
    channel.put(1)
    channel.close()
    with pytest.raises(ChannelClosedError, match=channel.name):
        channel.take()
    channel.put(2)
    with pytest.raises(ChannelClosedError, match=channel.name):
        channel.flush()


def test_wrong_options_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="capacity_items"):
        Channel.create(cluster, "bad", capacity_items=0)
    with pytest.raises(ConfigError, match="max_failures"):
        Channel.create(cluster, "bad", max_failures=0)
    channel = Channel.create(cluster, next(_names))
    with pytest.raises(ConfigError, match="exists"):
        Channel.create(cluster, channel.name)


def test_weights_may_be_numpy_scalars_and_keys_must_be_plain(channel: Channel) -> None:
    channel.put(1, weight=np.float32(2.0))  # type: ignore[arg-type]
    assert channel.take() == 1
    for key in (object(), 1 << 64, "\ud800", ("g", b"bytes")):
        with pytest.raises(ConfigError, match="a key is text"):
            channel.put(1, key=key)
    channel.put("found", key=("g", np.float64(0.5)))
    assert channel.take(keys=[("g", 0.5)]) == ["found"]


def test_a_full_channel_stops_its_producer(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names), capacity_items=2)
    channel.put(1)
    channel.put(2)
    with pytest.raises(StuckError, match="room in channel"):
        with_deadline(channel, 0.1).put(3)
    assert channel.take() == 1
    with_deadline(channel, 10.0).put(4)
    assert [channel.take(), channel.take()] == [2, 4]


def test_items_are_taken_by_key_in_the_order_asked(channel: Channel) -> None:
    for n in range(4):
        channel.put(n, key=("group", n))
    assert channel.take(keys=[("group", 2), ("group", 0)]) == [2, 0]
    assert [channel.take(), channel.take()] == [1, 3]


def test_stats_tell_what_is_there(channel: Channel) -> None:
    channel.put(1, weight=2.5, key="k")
    channel.flush()
    stats = channel.stats()
    assert stats["depth"] == 1 and stats["producers"]["driver[0]"]["items"] == 1


async def test_tasks_take_and_put_side_by_side(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names), capacity_items=3)

    async def produce() -> None:
        for n in range(20):
            await channel.put_async(n)

    async def consume() -> list[int]:
        taken = []
        async for lease in channel.leases():
            async with lease:
                taken.append(lease.value)
            if len(taken) == 10:
                break
        return taken

    _, one, other = await asyncio.gather(produce(), consume(), consume())
    assert sorted(one + other) == list(range(20))


async def test_a_cancelled_take_holds_nothing_back(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names))

    async def loop() -> None:
        async for _ in channel.leases():
            pass

    waiting = asyncio.ensure_future(loop())
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    channel.put("x")
    assert channel.take(timeout_s=5) == "x"
    stats = channel.stats()
    assert stats["depth"] == 0 and not own_waits()


async def test_a_cancelled_put_leaves_the_full_channel_as_it_is(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names), capacity_items=1)
    await channel.put_async(0)
    waiting = asyncio.ensure_future(channel.put_async(1))
    await asyncio.sleep(0.1)
    assert [what for what, _ in own_waits()] == [f"room in channel {channel.name!r}"]
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(StuckError, match="room in channel"):
        await with_deadline(channel, 0.05).put_async(2)
    with_deadline(channel, 60.0)
    assert channel.take(timeout_s=5) == 0
    await channel.put_async(3)
    assert channel.take(timeout_s=5) == 3


async def test_every_lease_ends_by_itself_and_the_loop_with_the_last(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names))
    channel.put_many([0, 1, 2])
    channel.end()
    open_leases: list[Lease] = []

    async def take_all() -> None:
        async for lease in channel.leases():
            open_leases.append(lease)  # noqa: PERF401  looked at while the loop goes on

    taking = asyncio.ensure_future(take_all())
    while len(open_leases) < 3:
        await asyncio.sleep(0.01)
    assert [lease.value for lease in open_leases] == [0, 1, 2]
    for number in (2, 0):
        open_leases[number].done()
    await asyncio.sleep(0.1)
    assert not taking.done(), "the epoch is over when the last of its leases is"
    open_leases[1].done()
    await asyncio.wait_for(taking, 10)


def test_read_ahead_is_given_back_to_others(channel: Channel, consumers) -> None:
    channel.put_many(list(range(300)))
    for number in channel:
        if number == 49:
            break
    channel.end()
    taken = consumers.consume(channel).wait(timeout_s=WAIT_S)
    assert sorted(n for part in taken for n in part) == list(range(50, 300))


def test_a_take_goes_on_where_a_loop_that_had_read_ahead_was_left(channel: Channel) -> None:
    channel.put_many(list(range(300)))
    for number in channel:
        if number == 99:
            break
    assert [channel.take() for _ in range(64)] == list(range(100, 164))


def test_puts_that_found_no_room_in_time_stay_out(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names), capacity_items=1)
    channel.put(0)
    started_s = time.monotonic()
    for n in range(1, 5):
        with pytest.raises(StuckError, match="room in channel"):
            with_deadline(channel, 0.0).put(n)
    assert time.monotonic() - started_s < 30, "the hub was asked about a put it did not know"
    assert channel.take() == 0
    with pytest.raises(StuckError):
        channel.take(timeout_s=0.2)


def test_an_interrupted_take_leaves_no_lease(channel: Channel) -> None:
    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        for put_before in (False, True):
            thread = threading.Thread(target=interrupt)
            with pytest.raises(KeyboardInterrupt):
                thread.start()
                while True:
                    if put_before:
                        channel.put(1)
                    channel.take(timeout_s=30)
            thread.join()
            channel.put("after")
            channel.end()
            taken = list(channel)
            assert taken[-1] == "after"
            assert channel.stats()["leased"] == 0
    finally:
        signal.signal(signal.SIGINT, before)


# --- relays -----------------------------------------------------------------------------------------------


def test_what_a_loop_body_puts_goes_when_the_loop_goes_on(cluster: Cluster) -> None:
    numbers, onwards = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(2))
    numbers.put_many([1, 2])
    numbers.end()
    for number in numbers:
        onwards.put(number)
        current().hub.sync(WAIT_S)
        assert onwards.stats()["depth"] == number - 1
    current().hub.sync(WAIT_S)
    assert onwards.stats()["depth"] == 2


def test_a_wait_in_the_body_sends_what_was_put_before_it(cluster: Cluster, consumers) -> None:
    """A body that asks somebody through a channel, and waits for the answer, gets it."""
    numbers, asked, answered = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(3))
    relaying = consumers.on(0).relay(asked, answered)
    numbers.put_many([1, 2, 3])
    numbers.end()
    for number in numbers:
        asked.put(number)
        assert answered.take(timeout_s=WAIT_S) == number
    asked.end()
    relaying.wait(timeout_s=WAIT_S)


def test_a_loop_that_is_left_by_an_exception_gives_its_item_back(cluster: Cluster) -> None:
    numbers, onwards = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(2))
    numbers.put_many([1, 2])
    with pytest.raises(ValueError, match="at 1"):
        try:
            for number in numbers:
                onwards.put(number)
                raise ValueError(f"at {number}")
        finally:
            onwards.flush()  # an operation on a channel while the exception is on its way
    assert onwards.stats()["depth"] == 0
    assert [numbers.take(timeout_s=WAIT_S) for _ in range(2)] == [1, 2]


def test_a_failed_call_gives_back_what_it_had_and_has_put_nothing_of_it(cluster: Cluster, consumers) -> None:
    numbers, onwards = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(2))
    numbers.put_many(list(range(6)))
    numbers.end()
    with pytest.raises(WorkerError, match="3 is bad"):
        consumers.on(0).relay_until(numbers, onwards, 3).wait(timeout_s=WAIT_S)
    consumers.on(1).relay(numbers, onwards).wait(timeout_s=WAIT_S)
    onwards.end()
    assert sorted(onwards) == list(range(6)), (
        "each once; what went back and what was read ahead may change places"
    )


def test_who_is_killed_between_an_epochs_end_and_its_answer_meets_that_end_again() -> None:
    with Cluster(devices="cpu:1") as cluster:
        channel = Channel.create(cluster, next(_names), timeout_s=WAIT_S)
        consumer = Consumer.launch(cluster, name="epochs", placement="0")
        channel.put_many([1, 2])
        channel.end()
        with pytest.raises(PeerDiedError):
            consumer.consume_epoch(channel, 0, True).wait(timeout_s=WAIT_S)
        consumer.relaunch(0)
        assert consumer.consume_epoch(channel, 0, False).wait(timeout_s=WAIT_S) == [[]]
        channel.put(3)
        channel.end()
        assert consumer.consume_epoch(channel, 1, False).wait(timeout_s=WAIT_S) == [[3]]


def test_an_item_that_always_fails_is_set_aside_and_named(cluster: Cluster, consumers) -> None:
    numbers, onwards = (
        Channel.create(cluster, next(_names), timeout_s=WAIT_S, max_failures=2) for _ in range(2)
    )
    numbers.put_many([1, 2, 3])
    numbers.end()
    for _ in range(2):
        with pytest.raises(WorkerError, match="2 is bad"):
            consumers.on(0).relay_until(numbers, onwards, 2).wait(timeout_s=WAIT_S)
    consumers.on(0).relay(numbers, onwards).wait(timeout_s=WAIT_S)
    onwards.end()
    assert list(onwards) == [1, 3]
    (named,) = numbers.stats()["set_aside"]
    assert "2 is bad" in named["error"]


def test_an_error_whose_text_is_no_utf8_costs_its_item_and_not_the_line_to_the_hub(
    cluster: Cluster, consumers
) -> None:
    numbers, onwards = (
        Channel.create(cluster, next(_names), timeout_s=WAIT_S, max_failures=1) for _ in range(2)
    )
    numbers.put("name \udcff")
    numbers.end()
    with pytest.raises(WorkerError, match=r"name \? is bad"):
        consumers.on(0).relay_until(numbers, onwards, "name \udcff").wait(timeout_s=WAIT_S)
    assert consumers.on(0).relay(numbers, onwards).wait(timeout_s=WAIT_S) == [0]
    (named,) = numbers.stats()["set_aside"]
    assert "name ? is bad" in named["error"]


def test_leases_finish_with_what_was_put_under_them(cluster: Cluster, consumers) -> None:
    numbers, onwards = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(2))
    numbers.put_many(list(range(30)))
    numbers.end()
    assert consumers.on(0).relay_with_leases(numbers, onwards, 11).wait(timeout_s=WAIT_S) == [31]
    onwards.end()
    assert sorted(onwards) == list(range(30))
    assert numbers.stats()["num_redelivered"] == 1


def test_a_lease_that_nobody_finishes_goes_back(cluster: Cluster) -> None:
    channel = Channel.create(cluster, next(_names), timeout_s=WAIT_S)
    channel.put(1)

    async def forget() -> None:
        async for lease in channel.leases():
            assert lease.value == 1
            return

    asyncio.run(forget())
    gc.collect()
    assert channel.take(timeout_s=WAIT_S) == 1


def test_a_relay_killed_before_it_finished_has_put_nothing(cluster: Cluster, consumers) -> None:
    numbers, onwards = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(2))
    doomed = Consumer.launch(cluster, name="relay", placement="3")
    numbers.put_many(list(range(8)))
    numbers.end()
    with pytest.raises(PeerDiedError):
        doomed.relay_and_die(numbers, onwards, 5).wait(timeout_s=WAIT_S)
    consumers.on(0).relay(numbers, onwards).wait(timeout_s=WAIT_S)
    onwards.end()
    assert sorted(onwards) == list(range(8))
    doomed.close()


def test_relays_killed_at_random_lose_nothing_and_double_nothing(cluster: Cluster) -> None:
    numbers, onwards = (Channel.create(cluster, next(_names), timeout_s=WAIT_S) for _ in range(2))
    relays = Consumer.launch(cluster, name="relays", placement="0")
    rng = random.Random(3)
    count = 3000
    numbers.put_many(list(range(count)))
    numbers.end()
    for _ in range(5):
        relaying = relays.relay(numbers, onwards, 0.0002)
        time.sleep(rng.uniform(0.0, 0.12))
        if rng.random() < 0.5:
            hub = hub_pid(cluster)
            os.kill(hub, signal.SIGSTOP)  # what it is sent meanwhile lies in sockets
            time.sleep(0.05)
            os.kill(relays.addresses()[0].pid, signal.SIGKILL)
            os.kill(hub, signal.SIGCONT)
        else:
            os.kill(relays.addresses()[0].pid, signal.SIGKILL)
        with contextlib.suppress(PeerDiedError):
            relaying.wait(timeout_s=WAIT_S)
        relays.relaunch(0)
    relays.relay(numbers, onwards).wait(timeout_s=WAIT_S)
    onwards.end()
    assert sorted(onwards) == list(range(count))
    relays.close()


# --- several processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 3000])
def test_producers_and_consumers_share_a_channel(channel: Channel, producers, consumers, size: int) -> None:
    consuming = consumers.consume(channel)
    produced = producers.produce(channel, 200, size=size, end=True).wait(timeout_s=WAIT_S)
    taken = consuming.wait(timeout_s=WAIT_S)
    assert sorted(n for part in taken for n in part) == sorted(n for part in produced for n in part)


def test_epochs_follow_each_other(channel: Channel, consumers) -> None:
    for epoch in range(3):
        consuming = consumers.consume(channel)
        channel.put_many([100 * epoch + n for n in range(10)])
        channel.end()
        taken = consuming.wait(timeout_s=WAIT_S)
        assert sorted(n for part in taken for n in part) == [100 * epoch + n for n in range(10)]


def test_a_slow_consumer_bounds_the_memory_of_its_producer(cluster: Cluster, producers, consumers) -> None:
    size = 250_000  # 2 MB an item
    channel = Channel.create(cluster, next(_names), capacity_bytes=8_000_000, timeout_s=WAIT_S)
    consuming = consumers.on(0).consume(channel, delay_s=0.02)
    producing = producers.on(0).produce(channel, 40, size=size)
    peak = 0
    while not producing.done():
        used = sum(f.stat().st_size for f in cluster.session.shm_dir.glob("producer*"))
        peak = max(peak, used)
        time.sleep(0.01)
    channel.end()
    assert len(consuming.wait(timeout_s=WAIT_S)[0]) == 40
    assert 4_000_000 < peak < 30_000_000  # 80 MB went through


@pytest.mark.gpu
def test_gpu_tensors_arrive_on_their_consumers_device() -> None:
    with Cluster() as cluster:
        producer = GpuWorker.launch(cluster, name="producer", placement="cuda:0")
        consumer = GpuWorker.launch(cluster, name="consumer", placement="cuda:0")
        channel = Channel.create(cluster, "c")
        before = producer.memory().wait()[0]
        producer.produce(channel, 5, 1 << 22).wait(timeout_s=WAIT_S)
        (seen,) = consumer.consume(channel, 5).wait(timeout_s=WAIT_S)
        assert [(device, is_right) for device, is_right, _ in seen] == [("cuda:0", True)] * 5
        deadline_s = time.monotonic() + 10
        while producer.memory().wait()[0] > before + (1 << 20):
            assert time.monotonic() < deadline_s, "the producer keeps finished items"
            time.sleep(0.05)


# --- kill -9 ----------------------------------------------------------------------------------------------


def test_a_killed_consumers_items_go_to_another(cluster: Cluster, channel: Channel, consumers) -> None:
    doomed = Consumer.launch(cluster, name="doomed", placement="3")
    channel.put_many(list(range(20)))
    with pytest.raises(PeerDiedError):
        doomed.take_and_die(channel, 5).wait(timeout_s=WAIT_S)
    channel.end()
    taken = consumers.consume(channel).wait(timeout_s=WAIT_S)
    assert sorted(n for part in taken for n in part) == list(
        range(4, 20)
    )  # it had asked for the fifth: four were done
    doomed.close()


def test_of_a_killed_consumers_leases_only_the_open_ones_go_to_another(
    cluster: Cluster, channel: Channel, consumers
) -> None:
    doomed = Consumer.launch(cluster, name="doomed", placement="3")
    channel.put_many([0, 1])
    with pytest.raises(PeerDiedError):
        doomed.lease_two_end_one_and_die(channel).wait(timeout_s=WAIT_S)
    channel.end()
    assert sorted(consumers.consume(channel).wait(timeout_s=WAIT_S)) == [[], [], [0]]
    doomed.close()


def test_killing_the_hub_in_the_middle_changes_nothing(
    cluster: Cluster, channel: Channel, producers, consumers
) -> None:
    consuming = consumers.consume(channel, delay_s=0.001)
    producing = producers.produce(channel, 400, size=600, end=True)
    for _ in range(3):
        time.sleep(0.15)
        os.kill(hub_pid(cluster), signal.SIGKILL)
        time.sleep(0.3)
    produced = producing.wait(timeout_s=WAIT_S)
    taken = consuming.wait(timeout_s=WAIT_S)
    assert sorted(n for part in taken for n in part) == sorted(n for part in produced for n in part)


def test_a_killed_driver_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither processes nor shared memory nor files, although items are queued and half taken."""
    script = """
from rill.runtime.cluster import Cluster
from rill.runtime.channel import Channel
from tests.runtime.leftovers import nothing_left
from tests.runtime.channel_workers import Consumer, Producer
import psutil, time
if __name__ == "__main__":
    cluster = Cluster(devices="cpu:2")
    channel = Channel.create(cluster, "c")
    producer = Producer.launch(cluster, name="p", placement="0")
    consumer = Consumer.launch(cluster, name="c", placement="1")
    producer.produce(channel, 50, size=50_000).wait(timeout_s=60)
    consumer.consume(channel, 0.05)
    children = [p.pid for p in psutil.Process().children(recursive=True)]
    print(cluster.session.shm_dir, cluster.session.session_dir, *children, flush=True)
    time.sleep(60)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, text=True)
    assert driver.stdout is not None
    shm_dir, session_dir, *pids = driver.stdout.readline().split()
    assert any(Path(shm_dir).glob("p*"))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    deadline_s = time.monotonic() + 60
    while Path(shm_dir).exists() or Path(session_dir).exists() or any(map(psutil.pid_exists, map(int, pids))):
        assert time.monotonic() < deadline_s, "something is left"
        time.sleep(0.05)


def test_what_a_call_took_is_finished_when_it_answers(cluster: Cluster, channel: Channel) -> None:
    """Killed at once afterwards: nothing it took comes back, and nothing it put is missing."""
    doomed = Consumer.launch(cluster, name="prompt", placement="3")
    onwards = Channel.create(cluster, "onwards")
    for n in range(5):
        channel.put(n)
        assert doomed.pass_on(channel, onwards).wait(timeout_s=WAIT_S) == [n]
        os.kill(doomed.addresses()[0].pid, signal.SIGKILL)
        doomed.relaunch(0)
    assert [onwards.take(timeout_s=WAIT_S) for _ in range(5)] == list(range(5))
    stats = channel.stats()
    assert (stats["depth"], stats["leased"]) == (0, 0)
    doomed.close()


def kill_at_random(num_kills: int, seed: int, folder: Path, size: int) -> None:
    """Producers and consumers that are killed and relaunched, and now and then the hub: every safely put item is
    finished by one consumer, and by a second only where the first was killed before it could say so."""
    rng = random.Random(seed)
    put_log, done_log = folder / "put", folder / "done"
    put_log.touch()
    done_log.touch()
    killed: set[int] = set()

    def kill(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)

    with nothing_left() as room, Cluster(devices="cpu:2") as cluster:
        room.note_sessions()
        channel = Channel.create(cluster, "c", timeout_s=WAIT_S)
        producers = Producer.launch(cluster, name="p", placement="0")
        consumers = Consumer.launch(cluster, name="c", placement="0-1")
        producers.produce_until_killed(channel, str(put_log), size)
        consuming = {
            rank: consumers.on(rank).consume_and_log(channel, str(done_log), 0.0005) for rank in (0, 1)
        }
        for _ in range(num_kills):
            time.sleep(rng.uniform(0.02, 0.25))
            victim = rng.choice(["producer", "consumer", "hub"])
            if victim == "hub":
                kill(hub_pid(cluster))
            elif victim == "producer":
                kill(producers.addresses()[0].pid)
                producers.relaunch(0)
                producers.produce_until_killed(channel, str(put_log), size)
            else:
                rank = rng.randrange(2)
                kill(consumers.addresses()[rank].pid)
                consumers.relaunch(rank)
                consuming[rank] = consumers.on(rank).consume_and_log(channel, str(done_log), 0.0005)
        last = producers.addresses()[0]
        kill(last.pid)
        deadline_s = time.monotonic() + WAIT_S
        # What it had sent counts before its death, not after the epoch's end.
        while last.identity in cluster.context.hub.call("registry.members", None, WAIT_S):
            assert time.monotonic() < deadline_s
        channel.end()
        for handle in consuming.values():
            handle.wait(timeout_s=WAIT_S)
        stats = channel.stats()
        assert (stats["depth"], stats["leased"]) == (0, 0)
    check_deliveries(put_log.read_text(), done_log.read_text(), killed)


def check_deliveries(put: str, done: str, killed: set[int]) -> None:
    """Nothing is missing; whoever finished an item that somebody finished after it had been killed meanwhile."""
    finished_by: dict[int, list[int]] = {}
    for line in done.splitlines():
        number, pid = map(int, line.split())
        finished_by.setdefault(number, []).append(pid)
    assert {int(line) for line in put.splitlines()} <= set(finished_by)
    for number, pids in finished_by.items():
        assert set(pids[:-1]) <= killed, f"item {number} was delivered again though its consumer lived"
        assert len(set(pids)) == len(pids), f"item {number} was delivered twice to one consumer"


def test_random_kills_lose_nothing_and_leave_nothing_behind(tmp_path: Path) -> None:
    kill_at_random(6, seed=1, folder=tmp_path, size=1000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_hundreds_of_random_kills(tmp_path: Path, seed: int) -> None:
    kill_at_random(15, seed=seed, folder=tmp_path, size=1000 if seed % 2 else 0)
