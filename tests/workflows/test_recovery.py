"""Lost engines: killed, stale or cut off from new weights. The run goes on, or ends with a name and a reason."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rill.errors import PeerDiedError, RunError, WeightSyncError
from rill.journal.records import Event, Finished, Opened, Segment
from rill.journal.token_log import FOLDER
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker
from rill.types import PolicyVersion
from rill.workflows.config import LoopConfig
from rill.workflows.fleet import Crew, Fleet
from tests.weights.test_distributed import free_port
from tests.workflows.broken_transport import TRANSPORT
from tests.workflows.scene import DEADLINE_S, Scene
from tests.workflows.test_conservation import check_conserved, check_once

SLOW = {"tick_s": 0.01, "max_delay_ticks": 10}
"""Slow enough that an engine is always killed with work in its hands."""


def kill_at_step(
    scene: Scene,
    rank: int,
    step: int,
    group: WorkerGroup[Any] | None = None,
    number: int = signal.SIGKILL,
    *,
    has_ended: bool = False,
) -> threading.Thread:
    """Kill an engine, or a rank of `group`, while the batch of `step` is being made: once a token of it is logged.
    `has_ended`: and an answer of this engine has ended."""

    def work() -> None:
        pid = (group or scene.rollout).addresses()[rank].pid
        is_engine = group in (None, scene.rollout)
        of_engine, asker = (f"*-{pid}-*", None) if is_engine else ("rollout*", pid)
        while (counts := scene.counts())["version"] < step or not counts["running"]:
            time.sleep(0.005)
        deadline_s = time.monotonic() + DEADLINE_S
        record = scene.records / f"engine-{pid}.jsonl"
        while time.monotonic() < deadline_s:
            if is_speaking(scene, of_engine, asker) and (not has_ended or record.stat().st_size):
                break
            time.sleep(0.002)
        os.kill(pid, number)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_speaking(scene: Scene, pattern: str, asker: int | None) -> bool:
    """Whether an answer has tokens in these logs and no end. `asker`: in a group that this process has begun."""
    logs = scene.folder / FOLDER
    events = [record for path in logs.glob(f"*-{asker}-*") for record in Segment(path).read()]
    begun = {event.of for event in events if isinstance(event, Event) and event.key == "begun"}
    for path in logs.glob(pattern):
        said: set[int] = set()
        of_asker: set[int] = set()
        for record in Segment(path).read():
            if isinstance(record, Opened) and record.id.partition("/")[0] in begun:
                of_asker.add(record.number)
            if isinstance(record, list):
                said |= {entry.number for entry in record}
            elif isinstance(record, Finished):
                said.discard(record.number)
        if said if asker is None else said & of_asker:
            return True
    return False


def num_continued(scene: Scene) -> int:
    """Requests that an engine was given behind tokens that were sampled before."""
    trained = [s.trajectory for batch in scene.trained() for s in batch.samples]
    num_prompt = {t.episode_id: t.num_prompt_tokens for t in trained}
    parts = [part for parts in scene.said().values() for part in parts]
    return sum(part["num_given"] > num_prompt[part["id"].partition("#")[0]] for part in parts)


def test_a_killed_engine_comes_back_and_every_group_is_trained_on_once(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(
        tmp_path, cluster, name="killed", steps=4, prompts_per_step=3, max_new_tokens=30, engine=SLOW
    )
    killing = kill_at_step(scene, 0, 1)
    with caplog.at_level(logging.WARNING, "rill"):
        scene.run()
    killing.join()
    check_conserved(scene)
    check_once(scene, 4, 3)
    assert scene.relaunches() == [1]
    assert num_continued(scene) > 0, "what it was saying goes on behind its tokens"
    assert "rollout-killed[0] is lost" in caplog.text


@pytest.mark.slow
def test_engines_that_are_looked_after_in_the_moment_an_epoch_ends_are_not_called_again(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of generate() and the batch lies a moment; here every step meets it."""
    scene = Scene(tmp_path, cluster, name="moment", steps=3)
    engines, calls = scene.fleet._engines, []
    tend, begin = scene.fleet.tend, engines.begin

    def once_they_have_ended() -> None:
        while not all(engines._calls[0].so_far()):
            time.sleep(0.002)
        tend()

    def counted(*ranks: int) -> None:
        calls.append(ranks)
        begin(*ranks)

    monkeypatch.setattr(scene.fleet, "tend", once_they_have_ended)
    monkeypatch.setattr(engines, "begin", counted)
    monkeypatch.setattr("rill.workflows.loop.TEND_S", 0.0)
    scene.run()
    check_once(scene, 3, 3)
    assert len(calls) == 3


@pytest.mark.slow
def test_one_of_two_engines_killed_while_both_run_ahead_costs_no_group(
    tmp_path: Path, cluster: Cluster
) -> None:
    scene = Scene(
        tmp_path,
        cluster,
        name="killed-ahead",
        engines="0-1",
        steps=14,
        prompts_per_step=3,
        max_new_tokens=30,
        max_lag=2,
        order="admission",
        engine=SLOW,
    )
    killing = kill_at_step(scene, 1, 2, has_ended=True)
    scene.run()
    killing.join()
    check_conserved(scene)
    check_once(scene, 14, 3)
    assert scene.relaunches() == [0, 1]
    by_process: dict[int, list[dict[str, Any]]] = {}
    for record in (record for records in scene.said().values() for record in records):
        by_process.setdefault(record["engine"], []).append(record)
    pids = [address.pid for address in scene.rollout.addresses()]
    dead = set(by_process) - set(pids)
    assert len(dead) == 1 and set(pids) <= set(by_process), (
        "the dead one, its sibling and the one in its place spoke"
    )
    killed_at = max(record["at"] for record in by_process[dead.pop()])
    back = by_process[pids[1]]
    assert all(record["at"] > killed_at for record in back)
    assert max(record["versions"][-1] for record in back) > 3, "with newer weights than those at the kill"
    trained = {s.trajectory.episode_id for batch in scene.trained() for s in batch.samples}
    assert any(record["id"].partition("#")[0] in trained for record in back), "what it said was trained on"


@pytest.mark.slow
def test_an_engine_joins_those_that_run_ahead_and_one_that_is_told_to_go_leaves_what_it_was_saying(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(
        tmp_path,
        cluster,
        name="told",
        engines="0-1",
        steps=8,
        prompts_per_step=3,
        max_new_tokens=30,
        max_lag=2,
        order="admission",
        engine=SLOW,
    )
    scene.loop.observers = [lambda report: scene.fleet.join("0") if report.step == 1 else None]
    telling = kill_at_step(scene, 1, 3, number=signal.SIGTERM)
    with caplog.at_level(logging.WARNING, "rill"):
        scene.run()
    telling.join()
    check_conserved(scene)
    check_once(scene, 8, 3)
    assert (scene.rollout.ranks, scene.relaunches()) == ((0, 2), [0, 0]), "it is not started again"
    speakers = {part["engine"] for parts in scene.said().values() for part in parts}
    assert {address.pid for address in scene.rollout.addresses()} <= speakers, "who joined takes part"
    assert "rollout-told[1] left" in caplog.text
    assert num_continued(scene) > 0, "behind its tokens"


@pytest.mark.slow
def test_an_engine_lost_before_an_evaluation_or_a_sync_is_back_for_it(
    tmp_path: Path, cluster: Cluster
) -> None:
    scene = Scene(tmp_path, cluster, name="idle", engines="0-1", evals=9)
    scene.fleet.publish(PolicyVersion(1))
    first = scene.loop._evaluated()
    scene.kill(0)
    assert scene.loop._evaluated() == first and first["eval/sums/prompts"] == 9
    scene.kill(1)
    assert scene.fleet.publish(PolicyVersion(2))["sync/relaunches"] == 2


@pytest.mark.parametrize("victim", ["env", pytest.param("engine", marks=pytest.mark.slow)])
def test_with_environments_apart_either_may_be_killed_and_no_group_is_lost(
    tmp_path: Path, cluster: Cluster, victim: str
) -> None:
    scene = Scene(
        tmp_path,
        cluster,
        name=f"apart-{victim}",
        engines="0-1",
        env_workers=2,
        steps=4,
        max_new_tokens=30,
        engine=SLOW,
    )
    assert scene.env is not None
    group = scene.env if victim == "env" else scene.rollout
    killing = kill_at_step(scene, 1, 1, group)
    scene.run()
    killing.join()
    check_conserved(scene)
    check_once(scene, 4, 3)
    assert scene.reports[-1].metrics["sync/relaunches"] == 1
    assert num_continued(scene) > 0


@pytest.mark.slow
def test_over_broadcasts_a_lost_engine_catches_up_alone_and_joins_the_next_group(
    tmp_path: Path, cluster: Cluster
) -> None:
    broadcast = {"type": "distributed", "address": f"127.0.0.1:{free_port()}", "timeout_s": 20.0}
    scene = Scene(
        tmp_path,
        cluster,
        name="broadcast",
        engines="0-1",
        steps=5,
        max_new_tokens=30,
        engine=SLOW,
        transport=broadcast,
    )
    killing = kill_at_step(scene, 1, 2)
    scene.run()
    killing.join()
    check_conserved(scene)
    check_once(scene, 5, 3)
    assert scene.relaunches() == [0, 1]
    assert scene.reports[-1].metrics["sync/engines"] == 2


def test_an_engine_that_dies_too_often_ends_the_run_by_name(tmp_path: Path, cluster: Cluster) -> None:
    scene = Scene(tmp_path, cluster, name="mortal", steps=3, max_relaunches=0, engine=SLOW)
    kill_at_step(scene, 0, 0)
    with pytest.raises(RunError, match=r"rollout-mortal\[0\] is lost .*max_relaunches"):
        scene.run()


class Mortal:
    """A group of one rank, of which the first so many processes die as they start."""

    name = "rollout"
    ranks = (0,)

    def __init__(self, num_deaths: int) -> None:
        self.num_deaths, self.num_starts = num_deaths, 0

    def lost(self) -> list[int]:
        return [0] if self.num_starts <= self.num_deaths else []

    def relaunch(self, rank: int, *, timeout_s: float) -> None:
        self.num_starts += 1
        self.ready(timeout_s)

    def ready(self, timeout_s: float) -> None:
        if self.lost():
            raise PeerDiedError("rollout[0] died during a call")


def test_an_engine_that_dies_while_it_is_brought_back_is_started_once_more() -> None:
    def bring_back(group: Mortal) -> None:
        crew = Crew(cast(Any, group), 3, cast(Any, None), "run")
        environments: Any = SimpleNamespace(_has_trainer=True, _engines=None, _loop=LoopConfig())
        environments._bring_back = partial(Fleet._bring_back, environments)
        environments._bring_back(crew, 0, "killed")

    bring_back(twice := Mortal(2))
    assert twice.num_starts == 3
    with pytest.raises(RunError, match=r"rollout\[0\] is lost .* after 3 relaunches"):
        bring_back(Mortal(3))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("dropped bucket", "did not arrive"),
        # What tells the others from it is the receiver's: tests/weights/test_faults.py has them over every transport.
        pytest.param("wrong order", "checksum differs|bytes arrived", marks=pytest.mark.slow),
        pytest.param("stale bytes", "checksum differs", marks=pytest.mark.slow),
        pytest.param("half written", "bytes arrived", marks=pytest.mark.slow),
        pytest.param("flipped bit", "checksum differs", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_transfer_is_caught_and_named(
    tmp_path: Path, cluster: Cluster, fault: str, reason: str
) -> None:
    name = fault.replace(" ", "-")
    scene = Scene(tmp_path, cluster, name=name, steps=4, transport={"type": TRANSPORT, "fault": fault})
    with pytest.raises(WeightSyncError, match=reason) as caught:
        scene.run()
    assert f"rollout-{name}[0]" in str(caught.value)
    assert scene.loop.step == 1, "the weights of version 3 are those after the second step"
    assert len(scene.trained()) == 2


@pytest.mark.slow
def test_a_transfer_damaged_once_costs_a_relaunch_and_the_run_goes_on(
    tmp_path: Path, cluster: Cluster
) -> None:
    broken = {"type": TRANSPORT, "fault": "flipped bit", "once": str(tmp_path / "over")}
    scene = Scene(tmp_path, cluster, name="once", steps=4, transport=broken)
    scene.run()
    check_conserved(scene)
    check_once(scene, 4, 3)
    assert scene.relaunches() == [1]


def test_an_engine_that_says_it_updated_and_did_not_is_named_by_the_canary(
    tmp_path: Path, cluster: Cluster
) -> None:
    stale = {"fault": "ignores updates", "fault_from": 2}
    scene = Scene(tmp_path, cluster, name="stale", steps=4, engine=stale)
    with pytest.raises(WeightSyncError, match="answers with other weights") as caught:
        scene.run()
    assert "rollout-stale[0]" in str(caught.value)


@pytest.mark.slow
def test_an_engine_whose_cache_outlives_its_version_is_started_again(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    stale = {"fault": "stale cache", "fault_from": 2}
    scene = Scene(tmp_path, cluster, name="cached", steps=3, engine=stale)
    with caplog.at_level(logging.WARNING, "rill"):
        scene.run()
    check_conserved(scene)
    assert scene.relaunches() == [1], "the new process has no cache"
    assert "rollout-cached[0] says version 2 but answers with other weights" in caplog.text


@pytest.mark.slow
def test_an_engine_that_hangs_in_an_update_is_named_and_started_again_while_the_other_serves(
    tmp_path: Path, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    late = {"fault": "hangs once", "fault_from": 3}
    scene = Scene(
        tmp_path, cluster, name="late", engines="0-1", steps=4, max_lag=1, engine=late, sync_timeout_s=1.5
    )
    with caplog.at_level(logging.WARNING, "rill"):
        scene.run()
    check_conserved(scene)
    check_once(scene, 4, 3)
    assert sorted(scene.relaunches()) == [0, 1]
    assert "did not take version 3 within 1.5 s" in caplog.text and "is back in service" in caplog.text


class Occupier(Worker):
    """Another group on the engine's device, for instance a critic that trains."""

    def __init__(self, *, marker: str) -> None:
        self.marker = Path(marker)

    def hold(self, seconds: float) -> None:
        with self.device_lock():
            self.marker.touch()
            time.sleep(seconds)


@pytest.mark.slow
def test_an_engine_whose_device_is_in_other_hands_is_not_late(tmp_path: Path, cluster: Cluster) -> None:
    scene = Scene(tmp_path, cluster, name="in-line", sync_timeout_s=3.0)
    marker = tmp_path / "held"
    other = Occupier.launch(cluster, name="other-in-line", placement="0", threads=1, marker=str(marker))
    scene.fleet.publish(PolicyVersion(1))
    held = other.hold(6.0)
    while not marker.exists():
        time.sleep(0.01)
    synced = scene.actor.publish(PolicyVersion(2)).wait(timeout_s=DEADLINE_S)[0]
    assert synced is not None and synced.failed == {}
    assert synced.metrics["sync/update_s"] > 3.0, "it waited for its device"
    held.wait(timeout_s=DEADLINE_S)
    other.close()
