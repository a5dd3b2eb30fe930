"""kill -9 of anybody at random moments: lock holders, the stages of a pipeline, the hub.

Producers, consumers and the broker are in test_channel.py, single workers and drivers in test_cluster.py. What holds
after every kill: devices are never held by two groups, every item comes out once, and the end leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from rill.errors import PeerDiedError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from tests.runtime.chaos_workers import WAIT_S, Crowd, PipelineStage, Sharer
from tests.runtime.leftovers import hub_pid, nothing_left

pytestmark = pytest.mark.timeout(120)


def kill(pid: int, *, stop_first_s: float = 0.0) -> None:
    with contextlib.suppress(ProcessLookupError):  # it is between two lives
        if stop_first_s:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stop_first_s)
        os.kill(pid, signal.SIGKILL)


# --- lock holders -----------------------------------------------------------------------------------------


def kill_lock_holders(num_kills: int, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    lock_path, log_path = folder / "lock", folder / "log"
    lock_path.touch()
    log_path.touch()
    with nothing_left() as room, Cluster(devices="cpu:1") as cluster:
        room.note_sessions()
        groups = [Sharer.launch(cluster, name=f"g{n}", placement="0") for n in range(3)]
        running = {group.name: group.take_turns(str(lock_path), str(log_path), seed) for group in groups}
        for _ in range(num_kills):
            time.sleep(rng.uniform(0.01, 0.1))
            victim = rng.choice([*groups, None])
            if victim is None:
                kill(hub_pid(cluster))
            else:
                kill(victim.addresses()[0].pid)
                with pytest.raises(PeerDiedError):  # and no other error: nobody was inside with it
                    running[victim.name].wait(WAIT_S)
                victim.relaunch(0)
                running[victim.name] = victim.take_turns(str(lock_path), str(log_path), rng.randrange(10**6))
            _wait_for_turns_of_all(log_path, groups)
        assert not any(handle.done() for handle in running.values())


def _wait_for_turns_of_all(log_path: Path, groups: list[WorkerGroup[Sharer]]) -> None:
    """Every group comes to its turn again."""
    start = log_path.stat().st_size
    deadline_s = time.monotonic() + WAIT_S
    while set(log_path.read_text()[start:].split()) != {group.name for group in groups}:
        assert time.monotonic() < deadline_s, "a group never gets the device again"
        time.sleep(0.01)


def kill_members(num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    with nothing_left() as room, Cluster(devices="cpu:1") as cluster:
        room.note_sessions()
        group = Crowd.launch(cluster, name="crowd", placement="0:0-3")
        channel = Channel.create(cluster, "c", timeout_s=WAIT_S)
        for n in range(num_kills):
            in_flight: list[Handle] = [group.plus(k) for k in range(20)]
            victim = rng.randrange(4)
            time.sleep(rng.uniform(0.0, 0.005))
            kill(group.addresses()[victim].pid)
            for k, handle in enumerate(in_flight):
                for rank, outcome in enumerate(handle.outcomes(WAIT_S)):
                    if outcome.error is None:
                        assert outcome.value == rank + k
                    else:
                        assert rank == victim and isinstance(outcome.error, PeerDiedError)
                        assert f"crowd[{rank}]" in str(outcome.error)
            group.relaunch(victim)
            assert group.plus(n).wait(WAIT_S) == [rank + n for rank in range(4)]
            if n % 5 == 0:
                assert sorted(group.echo_through(channel).wait(WAIT_S)) == list(range(4))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 5))
def test_hundreds_of_killed_lock_holders(tmp_path: Path, seed: int) -> None:
    kill_lock_holders(50, seed=seed, folder=tmp_path)


# --- a pipeline -------------------------------------------------------------------------------------------


class Pipeline:
    """Three stages, two of which share a device; what dies is started again and goes on.

    numbers ──▶ first (devices 0, 1) ──▶ middle ──▶ second (device 0) ──▶ late ──▶ third (device 1) ──▶ out
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        names = ("numbers", "middle", "late", "out")
        self.channels = [Channel.create(cluster, name, timeout_s=WAIT_S) for name in names]
        placements = ("0-1", "0", "1")
        self.stages = [
            PipelineStage.launch(cluster, name=f"stage{n}", placement=placement, folder=str(folder))
            for n, placement in enumerate(placements)
        ]
        self.count = 0
        self.is_over = False
        self.errors: list[BaseException] = []
        self._feeding = threading.Thread(target=self._feed)
        self._running = [threading.Thread(target=self._run, args=(n, rank)) for n, rank in self.ranks()]

    def ranks(self) -> list[tuple[int, int]]:
        return [(n, rank) for n, stage in enumerate(self.stages) for rank in range(stage.size)]

    def start(self) -> None:
        for thread in (self._feeding, *self._running):
            thread.start()

    def finish(self) -> list[int]:
        """End the numbers, then every channel after the stage before it; gives what came out."""
        self.is_over = True
        self._feeding.join(WAIT_S)
        self.channels[0].end()
        for n, output in enumerate(self.channels[1:]):
            for (stage, _), thread in zip(self.ranks(), self._running, strict=True):
                if stage == n:
                    thread.join(2 * WAIT_S)
                    assert not thread.is_alive(), f"stage {n} stands still"
            output.end()
        assert not self.errors, self.errors
        return list(self.channels[-1])

    def _feed(self) -> None:
        numbers = self.channels[0]
        while not self.is_over:
            numbers.put_many(list(range(self.count, self.count + 20)))
            self.count += 20
            time.sleep(0.01)

    def _run(self, n: int, rank: int) -> None:
        """One rank of a stage, until its loop ends in order."""
        stage, source, target = self.stages[n], self.channels[n], self.channels[n + 1]
        is_dead = False
        while True:
            try:
                if is_dead:
                    stage.relaunch(rank)
                    is_dead = False
                stage.on(rank).relay(source, target).wait(timeout_s=2 * WAIT_S)
                return
            except PeerDiedError:
                is_dead = True  # perhaps again, while it started
            except BaseException as error:
                self.errors.append(error)
                raise


def kill_pipeline(num_kills: int, seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    with nothing_left() as room, Cluster(devices="cpu:2") as cluster:
        room.note_sessions()
        pipeline = Pipeline(cluster, folder)
        pipeline.start()
        for _ in range(num_kills):
            time.sleep(rng.uniform(0.01, 0.3))
            stop_first_s = rng.choice([0.0, 0.0, 0.1])
            n, rank = rng.choice(pipeline.ranks())
            if rng.random() < 0.25:
                kill(hub_pid(cluster), stop_first_s=stop_first_s)
            else:
                kill(pipeline.stages[n].addresses()[rank].pid, stop_first_s=stop_first_s)
            assert not pipeline.errors, pipeline.errors
        came_out = pipeline.finish()
        assert sorted(came_out) == list(range(pipeline.count))


def test_a_pipeline_on_shared_devices_delivers_once_whoever_is_killed(tmp_path: Path) -> None:
    kill_pipeline(4, seed=0, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 6))
def test_two_hundred_kills_of_a_pipeline(tmp_path: Path, seed: int) -> None:
    kill_pipeline(40, seed=seed, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_killed_members() -> None:
    kill_members(100, seed=1)
