from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rill.errors import JournalError, UserError
from rill.telemetry.run import Run, RunState, RunStatus, list_runs, write_atomically


def test_a_run_folder_holds_config_environment_and_status(tmp_path: Path) -> None:
    run = Run.create("demo", root=tmp_path, config_toml="steps = 1\n", argv=["rill", "train", "demo"])
    assert run.config_path.read_text() == "steps = 1\n"
    (start,) = json.loads(run.environment_path.read_text())
    assert start["command"] == ["rill", "train", "demo"]
    assert start["versions"]["rill"]
    assert run.state().status is RunStatus.RUNNING
    assert run.checkpoints_dir.is_dir()
    run.close()


def test_creating_never_overwrites(tmp_path: Path) -> None:
    names = [Run.create("demo", root=tmp_path).name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="run name"):
        Run.create(name, root=tmp_path)


def test_a_run_ends_finished_failed_or_interrupted(tmp_path: Path) -> None:
    with Run.create("good", root=tmp_path).running():
        pass
    with pytest.raises(ValueError), Run.create("bad", root=tmp_path).running():
        raise ValueError("no data")
    with pytest.raises(KeyboardInterrupt), Run.create("stopped", root=tmp_path).running():
        raise KeyboardInterrupt
    states = {run.name: run.state() for run in list_runs(tmp_path)}
    assert states["good"].status is RunStatus.FINISHED
    assert (states["bad"].status, states["bad"].message) == (RunStatus.FAILED, "ValueError: no data")
    assert states["stopped"].status is RunStatus.INTERRUPTED


def test_a_run_is_resumed_by_name_or_path_and_counts_its_starts(tmp_path: Path) -> None:
    Run.create("demo", root=tmp_path).close()
    created_s = Run.open("demo", root=tmp_path).state().created_s
    Run.resume("demo", root=tmp_path).close()
    resumed = Run.resume(tmp_path / "demo")
    assert resumed.state().status is RunStatus.RUNNING
    assert resumed.state().created_s == created_s
    assert len(json.loads(resumed.environment_path.read_text())) == 3
    resumed.close()


def test_a_run_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    run = Run.create("demo", root=tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        Run.resume("demo", root=tmp_path)
    run.close()
    Run.resume("demo", root=tmp_path).close()


def test_a_run_that_somebody_looks_at_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard looks every second, and so may what starts the run again."""
    Run.create("demo", root=tmp_path).close()
    looking = os.open(tmp_path / "demo" / ".lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("rill.telemetry.run.time.sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    Run.resume("demo", root=tmp_path).close()
    os.close(looking)


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(24, "Too many open files")]
)
def test_a_run_whose_lock_cannot_be_opened_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    run = Run.create("demo", root=tmp_path)
    seen, opening = Run.open("demo", root=tmp_path), os.open

    def refused(path: Path, flags: int, *rest: int) -> int:
        if Path(path).name == ".lock":
            raise error
        return opening(path, flags, *rest)

    with monkeypatch.context() as patched:
        patched.setattr("rill.telemetry.run.os.open", refused)
        assert seen.state().status is RunStatus.RUNNING
    run.close()
    assert seen.state().status is RunStatus.INTERRUPTED


def test_looking_at_a_run_needs_no_right_to_write_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create("demo", root=tmp_path)
    opening, modes = os.open, list[int]()

    def seen(path: Path, flags: int, *rest: int) -> int:
        modes.append(flags & os.O_ACCMODE)
        return opening(path, flags, *rest)

    monkeypatch.setattr("rill.telemetry.run.os.open", seen)
    Run.open("demo", root=tmp_path).state()
    assert modes and set(modes) == {os.O_RDONLY}
    run.close()


def test_a_place_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("rill.telemetry.run.fcntl.flock", without)
    with pytest.raises(UserError, match=r"cannot be locked \(Operation not supported\).*--root"):
        Run.create("demo", root=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_ends_a_run_is_told_where_there_is_no_room_to_write_it_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create("demo", root=tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(JournalError, match="cannot be written"), run.running():
        monkeypatch.setattr("rill.telemetry.run.write_atomically", full)
        raise JournalError("the token log cannot be written")
    assert Run.open("demo", root=tmp_path).state().status is RunStatus.INTERRUPTED


def test_what_could_not_be_written_leaves_the_old_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomically(tmp_path / "status.json", "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "status.json", "new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"status.json": "old"}


def test_an_unknown_run_suggests_the_nearest(tmp_path: Path) -> None:
    Run.create("demo", root=tmp_path).close()
    with pytest.raises(UserError, match="did you mean 'demo'"):
        Run.open("dmeo", root=tmp_path)


def _hold(root: str, ready: multiprocessing.Queue[int]) -> None:
    Run.create("killed", root=root)
    ready.put(1)
    signal.pause()


def test_a_killed_run_reads_as_interrupted_and_can_be_resumed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready: multiprocessing.Queue[int] = context.Queue()
    child = context.Process(target=_hold, args=(str(tmp_path), ready))
    child.start()
    ready.get(timeout=30)
    assert Run.open("killed", root=tmp_path).state().status is RunStatus.RUNNING
    child.kill()
    child.join(30)
    state = Run.open("killed", root=tmp_path).state()
    assert state.status is RunStatus.INTERRUPTED
    assert "without saying why" in state.message
    Run.resume("killed", root=tmp_path).close()


def _die_halfway(root: str) -> None:
    Run._save_state = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    Run.create("job", root=root)


def test_a_run_that_is_killed_while_it_is_created_is_not_in_the_way_of_its_name(tmp_path: Path) -> None:
    """`--resume auto` looks for the name: half a run there would make it begin a new one every time."""
    child = multiprocessing.get_context("spawn").Process(target=_die_halfway, args=(str(tmp_path),))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL and list_runs(tmp_path) == []
    assert Run.create("job", root=tmp_path).name == "job"


def test_a_run_lasts_until_now_until_it_ended_or_until_its_last_figures() -> None:
    now_s = time.time()
    state = RunState(status=RunStatus.RUNNING, created_s=now_s - 60, changed_s=now_s - 60, pid=1, host="here")
    assert 60 <= state.lasted_s(0.0) < 70
    assert replace(state, status=RunStatus.FINISHED, changed_s=now_s - 20).lasted_s(0.0) == pytest.approx(40)
    assert replace(state, status=RunStatus.INTERRUPTED).lasted_s(now_s - 30) == pytest.approx(30)


def test_runs_are_listed_oldest_first_and_other_folders_ignored(tmp_path: Path) -> None:
    for name in ("b", "a"):
        Run.create(name, root=tmp_path).close()
    (tmp_path / "notes").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["b", "a"]
    assert list_runs(tmp_path / "nowhere") == []


def test_a_place_where_no_runs_can_be_kept_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nope")):
        with pytest.raises(UserError, match="no runs can be kept in"):
            Run.create("r", root=root)


@pytest.mark.parametrize("status", ["", '{"status": "runn', '{"status": "paused"}', "[]"])
def test_a_damaged_status_hides_neither_the_run_nor_its_neighbours_and_it_can_be_resumed(
    tmp_path: Path, status: str
) -> None:
    Run.create("sound", root=tmp_path).close()
    damaged = Run.create("damaged", root=tmp_path)
    damaged.close()
    damaged.status_path.write_text(status)
    damaged.environment_path.write_text('[{"cut')
    states = {run.name: run.state() for run in list_runs(tmp_path)}
    assert states["damaged"].status is RunStatus.UNKNOWN
    assert "status.json cannot be read" in states["damaged"].message
    assert states["sound"].status is RunStatus.INTERRUPTED
    resumed = Run.resume("damaged", root=tmp_path)
    assert resumed.state().status is RunStatus.RUNNING
    assert len(resumed.starts()) == 1
    resumed.close()


def test_a_status_of_a_newer_rill_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    run = Run.create("newer", root=tmp_path)
    saved = json.loads(run.status_path.read_text())
    run.status_path.write_text(json.dumps({**saved, "status": "finished", "mood": "good"}))
    run.close()
    assert run.state().status is RunStatus.FINISHED
