"""kill -9 of anybody at random moments: lock holders, ranks that share a process, the hub, and whoever is called.

Producers, consumers and the broker are in test_channel.py, single workers and drivers in test_cluster.py. What holds
after every kill: devices are never held by two groups, calls to the living go on, and the end leaves nothing.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from rill.errors import PeerDiedError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from tests.runtime.chaos_workers import WAIT_S, Crowd, Sharer
from tests.runtime.leftovers import nothing_left

pytestmark = pytest.mark.timeout(120)


def hub_pid() -> int:
    for process in psutil.Process().children(recursive=True):
        if process.status() != psutil.STATUS_ZOMBIE and "rill.runtime.hub.server" in process.cmdline():
            return int(process.pid)
    return 0  # between two lives


def kill(pid: int) -> None:
    if pid:
        os.kill(pid, signal.SIGKILL)


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
                kill(hub_pid())
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


def test_killed_lock_holders_free_the_device_and_nobody_shares_it(tmp_path: Path) -> None:
    kill_lock_holders(4, seed=0, folder=tmp_path)


def test_a_killed_process_costs_only_its_own_calls() -> None:
    kill_members(3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 5))
def test_hundreds_of_killed_lock_holders(tmp_path: Path, seed: int) -> None:
    kill_lock_holders(50, seed=seed, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_killed_processes_with_several_ranks() -> None:
    kill_members(100, seed=1)
