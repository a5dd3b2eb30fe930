"""What is left of a session, whoever dies: nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rill.errors import PeerDiedError, RillError, RunError, UserError, WorkerError
from rill.runtime import context as runtime_context
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.device.device import Device
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.runtime.process import backend, supervisor
from rill.runtime.process.agent import Exited
from rill.runtime.process.session import LOCK_NAME, SESSION_PREFIX, sweep
from tests.child import environment
from tests.runtime.leftovers import becomes_true, hub_pid, is_running, marked_processes, nothing_left
from tests.runtime.workers import Echo

pytestmark = pytest.mark.timeout(90)

SCRIPT = Path(__file__).with_name("lifecycle_script.py")


class Driver:
    """A script that runs a cluster, and what it said about it."""

    def __init__(self, ending: str, cwd: Path | None = None) -> None:
        env = environment()
        command = [sys.executable, str(SCRIPT), ending]
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.answers = self.process.stdout.readline().strip()
        *pids, session_dir, shm_dir = self.process.stdout.readline().split()
        self.pids = [int(pid) for pid in pids]
        self.folders = [Path(session_dir), Path(shm_dir)]

    def has_left_nothing(self) -> bool:
        return not any(is_running(pid) for pid in self.pids) and not any(f.exists() for f in self.folders)


def test_a_script_finds_its_own_classes_in_workers_and_ends_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "rill.py").write_text("raise RuntimeError('another rill, where the driver was started')")
    driver = Driver("exit", cwd=tmp_path)
    assert driver.process.wait(20) == 0
    assert driver.answers == "hello from 0,hello from 1"
    assert becomes_true(driver.has_left_nothing)


def test_a_driver_that_raises_leaves_nothing() -> None:
    driver = Driver("raise")
    assert driver.process.wait(20) == 1
    assert becomes_true(driver.has_left_nothing)


def test_a_driver_that_is_told_to_end_leaves_nothing() -> None:
    driver = Driver("stay")
    driver.process.terminate()
    driver.process.wait(20)
    assert becomes_true(driver.has_left_nothing)


def test_the_death_of_the_agent_fails_its_workers_and_they_can_be_relaunched() -> None:
    with Cluster(devices="cpu:1") as cluster:
        group = Echo.launch(cluster, name="echo", threads=1)
        (pid,) = group.pid().wait(20)
        waiting = group.sleep(60)
        os.kill(cluster._nodes["node0"].agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(PeerDiedError, match="agent of node0"):
            waiting.wait(10)
        assert becomes_true(lambda: not is_running(pid))
        group.relaunch(0)
        assert group.plus(1).wait(20) == [1]


def test_an_agent_that_cannot_be_started_again_fails_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(node_id: str) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with Cluster(devices="cpu:1") as cluster:
        group = Echo.launch(cluster, name="echo", threads=1)
        waiting, asked = group.sleep(60), cluster.context.hub.ask("registry.find", "nobody[0]")
        cluster.context.hub.call("registry.sync", None)
        monkeypatch.setattr(cluster._backend, "reopen", no_room)
        os.kill(cluster._nodes["node0"].agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(PeerDiedError, match="agent of node0"):
            waiting.wait(30)
        with pytest.raises(PeerDiedError, match="agent of node0"):
            asked.result(30)
        with pytest.raises(RunError, match="node0 is gone"):
            group.relaunch(0)


def test_an_agent_that_is_gone_again_at_once_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster(devices="cpu:1") as cluster:
        group = Echo.launch(cluster, name="echo", threads=1)
        waiting, reopen = group.sleep(60), cluster._backend.reopen

        def gone_at_once(node_id: str) -> backend.NodeClient:
            monkeypatch.setattr(cluster._backend, "reopen", reopen)
            client = reopen(node_id)
            os.kill(client.agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            os.waitid(os.P_PID, client.agent_pid, os.WEXITED | os.WNOWAIT)  # type: ignore[attr-defined]
            return client

        monkeypatch.setattr(cluster._backend, "reopen", gone_at_once)
        os.kill(cluster._nodes["node0"].agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(PeerDiedError, match="agent of node0"):
            waiting.wait(30)
        assert becomes_true(lambda: can_relaunch(group))
        assert group.plus(1).wait(20) == [1]


def can_relaunch(group: WorkerGroup[Echo]) -> bool:
    try:
        group.relaunch(0, timeout_s=20)
    except RunError:
        return False
    return True


def test_a_call_in_flight_ends_with_its_cluster_even_where_no_agent_tells_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "KILL_WAIT_S", 0.5)
    monkeypatch.setattr(backend, "CLOSE_WAIT_S", 0.5)
    with Cluster(devices="cpu:1") as cluster:
        group = Echo.launch(cluster, name="echo", threads=1)
        waiting, calls = group.sleep(60), cluster.context.calls
        os.kill(cluster._nodes["node0"].agent_pid, signal.SIGSTOP)  # type: ignore[attr-defined]
    with pytest.raises(PeerDiedError, match="the cluster was closed"):
        waiting.wait(5)
    late = Handle("echo.plus", waiting.targets)  # a thread that made its call while the cluster closed
    calls.call(late, "plus", [])
    with pytest.raises(PeerDiedError, match="the cluster was closed"):
        late.wait(5)


def test_the_hub_is_started_again_when_it_dies_and_the_driver_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Cluster(devices="cpu:1") as cluster:
        cluster.context.hub.call("registry.join", "elsewhere", 20)
        before = hub_pid(cluster)
        os.kill(before, signal.SIGKILL)
        assert members_of(cluster)["driver[0]#0"] == "elsewhere"
        assert hub_pid(cluster) != before
        assert becomes_true(
            lambda: f"hub (pid {before}) ended and was started again: killed by SIGKILL" in caplog.text
        )
    assert len(caplog.records) == 1, "its end with the cluster is no news"


def test_a_worker_that_dies_while_the_hub_is_down_is_buried_when_it_is_back() -> None:
    with Cluster(devices="cpu:2") as cluster:
        group = Echo.launch(cluster, name="echo", threads=1)
        assert becomes_true(lambda: {"echo[0]#0", "echo[1]#0"} <= members_of(cluster).keys())
        hub = hub_pid(cluster)
        os.kill(hub, signal.SIGSTOP)
        os.kill(group.addresses()[1].pid, signal.SIGKILL)
        assert becomes_true(lambda: group.lost() == [1])
        os.kill(hub, signal.SIGKILL)
        assert becomes_true(lambda: "echo[1]#0" not in members_of(cluster))
        assert "echo[0]#0" in members_of(cluster)


def members_of(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.context.hub.call("registry.members", None, 20)
    return found


def test_when_the_hub_is_given_up_every_wait_in_every_process_fails_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Cluster(devices="cpu:1") as cluster:
        group = Echo.launch(cluster, name="echo", threads=1)
        waiting = group.find("never[0]")
        given_up = Exited("hub", 7, "exit code 1\nno room", is_service=True, is_restarted=False)
        time.sleep(0.2)
        cluster._on_event(given_up)
        with pytest.raises(WorkerError, match="(?s)ended too often.*no room"):
            waiting.wait(60)
        with pytest.raises(RillError, match="(?s)ended too often.*no room"):
            cluster.context.hub.call("registry.find", "never[0]", 20)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "not started again" in record.getMessage()


def test_whatever_fails_while_a_cluster_opens_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no such file")

    for place in ("Launcher.hub", "RuntimeContext"):
        with nothing_left() as room, monkeypatch.context() as patched:
            patched.setattr(f"rill.runtime.cluster.{place}", refuse)
            with pytest.raises(OSError, match="no such file"):
                Cluster(devices="cpu:1")
            room.note_sessions()
    assert not runtime_context.is_set()


def test_a_ray_cluster_that_does_not_answer_is_named_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent:
        def is_initialized(self) -> bool:
            return False

        def init(self, **_: object) -> None:
            raise ConnectionError("refused")

    monkeypatch.setattr("rill.runtime.process.ray.import_ray", Silent)
    with nothing_left() as room:
        with pytest.raises(RunError, match=r"no Ray cluster answers at '10.0.0.1:6379'"):
            Cluster.ray("10.0.0.1:6379")
        room.note_sessions()


def test_folders_of_dead_sessions_are_swept_and_live_ones_are_not() -> None:
    stale = Path(tempfile.gettempdir()) / f"{SESSION_PREFIX}stale-{os.getpid()}"
    stale.mkdir()
    (stale / LOCK_NAME).touch()
    with Cluster(devices="cpu:1") as cluster:
        assert not stale.exists()
        assert cluster.session.session_dir.name not in sweep(Path(tempfile.gettempdir()))
        assert cluster.session.session_dir.exists()


def test_a_temporary_directory_too_long_for_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(UserError, match="set TMPDIR to one of at most"):
        Cluster(devices="cpu:1")
    assert list(deep.iterdir()) == []


def test_a_closed_cluster_and_its_channels_say_so_and_closing_twice_is_harmless() -> None:
    cluster = Cluster(devices="cpu:1")
    assert runtime_context.current() is cluster.context
    channel = Channel.create(cluster, "c")
    cluster.close()
    cluster.close()
    assert not runtime_context.is_set()
    for use in (
        lambda: Echo.launch(cluster, name="late"),
        lambda: channel.put(1),
        lambda: channel.take(timeout_s=60),
        lambda: list(channel),
        channel.end,
        channel.stats,
    ):
        with pytest.raises(RunError, match="closed"):
            use()


def test_closing_one_of_two_clusters_leaves_the_other_alone() -> None:
    with Cluster(devices="cpu:1") as outer:
        group = Echo.launch(outer, name="echo", threads=1)
        with Cluster(devices="cpu:1") as inner:
            assert Echo.launch(inner, name="echo", threads=1, base=5).plus(1).wait(20) == [6]
            assert group.echo(bytes(200_000)).wait(20) == [bytes(200_000)]
        assert runtime_context.current() is outer.context
        assert group.plus(1).wait(20) == [1]


def test_an_agent_that_was_started_ahead_and_killed_before_it_was_needed_is_started_again() -> None:
    with backend.agent_ahead(["colorsys"]):
        ((_, process),) = backend._ahead
        process.kill()
        process.wait()
        with Cluster(devices="cpu:1") as cluster:
            assert Echo.launch(cluster, name="echo", threads=1).plus(1).wait(20) == [1]


def test_an_agent_that_was_started_ahead_is_the_clusters_and_one_that_nobody_took_ends() -> None:
    before = children()
    with backend.agent_ahead(["colorsys", "no_such_module"]):
        ahead = children() - before
        with Cluster(devices="cpu:1", preload=["colorsys"]) as cluster:
            assert children() - before == ahead and len(ahead) == 1
            assert Echo.launch(cluster, name="echo", threads=1).modules("colorsys").wait(20) == [["colorsys"]]
    with backend.agent_ahead(["colorsys"]):
        assert len(children() - before) == 1
    assert children() == before


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(scope="module")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Path]]:
    """A cluster with all that can be asked for, and the folder of its logs."""
    arms = [Device(kind="arm", index=n, options={"address": f"10.0.0.{n}"}) for n in range(2)]
    logs = tmp_path_factory.mktemp("logs")
    devices = [*arms, Device(kind="cpu")]
    with Cluster(devices, preload=["colorsys"], log_dir=logs) as cluster:
        yield cluster, logs


def test_registered_kinds_are_placed_like_any_device(furnished: tuple[Cluster, Path]) -> None:
    cluster, _ = furnished
    group = Echo.launch(cluster, name="arms", placement="arm:0-1")
    assert group.device_ids().wait(20) == [[0], [1]]
    assert cluster.devices[1].options["address"] == "10.0.0.1"


def test_preloaded_modules_are_there_at_once_and_output_is_kept_where_asked(
    furnished: tuple[Cluster, Path],
) -> None:
    cluster, logs = furnished
    group = Echo.launch(cluster, name="forked", placement="2", threads=1, env={"COLOUR": "red"})
    assert group.modules("colorsys").wait(20) == [["colorsys"]]
    assert group.environment("COLOUR").wait(20) == [{"COLOUR": "red"}]
    with pytest.raises(PeerDiedError, match="exit code 3"):
        group.die(3).wait(10)
    assert "last words" in (logs / "forked-0-0.log").read_text()


def test_an_environment_for_the_interpreter_gives_a_fresh_process(furnished: tuple[Cluster, Path]) -> None:
    cluster, _ = furnished
    env = {"PYTHONHASHSEED": "7", "COLOUR": "red"}
    one, twin = (
        Echo.launch_async(cluster, name=name, placement="2", threads=1, env=env) for name in ("fresh", "twin")
    )
    assert one.hash_of("text").wait(20) == twin.hash_of("text").wait(20)
    assert one.environment("COLOUR").wait(20) == [{"COLOUR": "red"}]


def kill_and_relaunch(num_kills: int, seed: int) -> None:
    """Kill random workers at random moments; every call ends in a result or in an error that names the dead."""
    choose = random.Random(seed)
    with nothing_left() as room, Cluster(devices="cpu:2") as cluster:
        room.note_sessions()
        group = Echo.launch(cluster, name="echo", threads=1, base=1)
        for _ in range(num_kills):
            victim = choose.randrange(2)
            pid = group.addresses()[victim].pid
            handles = [group.plus(number) for number in range(choose.randrange(20))]
            time.sleep(choose.random() * 0.01)
            os.kill(pid, signal.SIGKILL)
            for number, handle in enumerate(handles):
                for rank, outcome in enumerate(handle.outcomes(20)):
                    if outcome.error is None:
                        assert outcome.value == 1 + number
                    else:
                        assert isinstance(outcome.error, PeerDiedError)
                        assert rank == victim
                        assert f"echo[{victim}]" in str(outcome.error)
            group.relaunch(victim)
            assert group.plus(1).wait(20) == [2, 2]


def test_kills_at_random_moments_cost_only_the_calls_on_the_dead() -> None:
    kill_and_relaunch(num_kills=4, seed=0)


def kill_driver_after(wait_s: float, folder: Path) -> None:
    """Kill a driver wherever it is in its life: starting, launching groups, or with items and turns in full flow."""
    with nothing_left() as room:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "traffic", str(folder)],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(wait_s)
        room.note_sessions()
        process.kill()
        process.wait(10)
        assert becomes_true(lambda: not marked_processes(room.mark)), marked_processes(room.mark)
        sweep(
            room.temp_dir
        )  # a driver that dies before its agent starts leaves its folder to the next session


@pytest.mark.parametrize("wait_s", [0.3, 0.9])
def test_a_driver_killed_while_it_starts_leaves_nothing(wait_s: float, tmp_path: Path) -> None:
    kill_driver_after(wait_s, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_drivers_killed_at_random_moments_leave_nothing(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    for _ in range(50):
        kill_driver_after(choose.uniform(0.0, 3.0), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hundreds_of_kills_at_random_moments_cost_only_the_calls_on_the_dead() -> None:
    kill_and_relaunch(num_kills=300, seed=1)
