"""Checkpoints of a whole run: whole or not at all; damaged ones are passed over by name."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rill.errors import CheckpointError, PeerDiedError, WorkerError
from rill.journal.checkpoints import MANIFEST, RunCheckpoints, damage_of, step_of, whole_checkpoints
from rill.runtime.address import WorkerAddress
from rill.runtime.handle import Handle
from rill.telemetry.run import Run, write_atomically
from rill.workflows.loop import StepReport, restored


class Done:
    """A handle whose call is over."""

    def __init__(self, error: WorkerError | None = None) -> None:
        self._error = error

    def wait(self, timeout_s: float) -> list[Any]:
        if self._error is not None:
            raise self._error
        return [None]

    def done(self) -> bool:
        return True


class OneNumber:
    """A group of one worker whose state is a number in a file."""

    def __init__(self) -> None:
        self.number = 0

    def save(self, folder: str) -> Done:
        Path(folder).mkdir(parents=True)
        (Path(folder) / "number").write_text(str(self.number))
        return Done()

    def wait_saved(self, timeout_s: float) -> Done:
        return Done()

    def load(self, folder: str) -> Done:
        try:
            self.number = int((Path(folder) / "number").read_text())
        except (OSError, ValueError) as error:
            failure = WorkerError("no number", group="one", rank=0, remote_traceback="")
            failure.__cause__ = CheckpointError(f"{folder} cannot be read: {error}")
            return Done(failure)
        return Done()


def saved(root: Path, *steps: int) -> tuple[Run, RunCheckpoints, OneNumber]:
    run, group = Run.create("r", root=root), OneNumber()
    checkpoints = RunCheckpoints(run, {"one": group}, 3, 1.0)  # type: ignore[dict-item]
    for step in steps:
        group.number = 10 * step
        checkpoints.save(step)
    checkpoints.settle()
    return run, checkpoints, group


def test_one_that_cannot_be_written_is_named_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpoints, group = saved(tmp_path, 2)

    def full(folder: str) -> Done:
        Path(folder).mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(group, "save", full)
    with pytest.raises(
        CheckpointError, match=r"step 4 could not.* MB free .*No space left.*of step 2 is whole"
    ):
        checkpoints.save(4)
    assert [path.name for path in run.checkpoints_dir.iterdir()] == ["step-000002"]
    assert checkpoints.load_latest() == 2


def test_the_newest_whole_one_is_loaded_and_only_so_many_are_kept(tmp_path: Path) -> None:
    run, checkpoints, group = saved(tmp_path, 1, 2, 3, 4)
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [2, 3, 4]
    (whole_checkpoints(run)[-1] / MANIFEST).unlink()
    assert checkpoints.load_latest() == 3
    assert group.number == 30


def test_what_a_kill_left_of_one_that_was_written_or_removed_goes_when_the_run_is_resumed(
    tmp_path: Path,
) -> None:
    run, _, group = saved(tmp_path, 1, 2, 3)
    (run.checkpoints_dir / "step-000001" / MANIFEST).unlink()
    (run.checkpoints_dir / "step-000004" / "one").mkdir(parents=True)
    resumed = RunCheckpoints(run, {"one": group}, 3, 1.0)  # type: ignore[dict-item]
    assert resumed.load_latest() == 3
    assert sorted(path.name for path in run.checkpoints_dir.iterdir()) == ["step-000002", "step-000003"]


def test_a_copy_that_somebody_keeps_beside_them_does_not_count_and_is_left_alone(tmp_path: Path) -> None:
    run, checkpoints, _ = saved(tmp_path, 1, 2)
    (run.checkpoints_dir / "step-000001").rename(run.checkpoints_dir / "step-000001-good")
    (run.checkpoints_dir / "step-notes").mkdir()
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [2]
    assert checkpoints.load_latest() == 2
    assert {path.name for path in run.checkpoints_dir.iterdir()} == {
        "step-000001-good",
        "step-000002",
        "step-notes",
    }


def test_those_beyond_what_is_kept_do_not_count_at_once_and_their_files_are_gone_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_remove = threading.Event()
    removes = shutil.rmtree

    def slowly(folder: Path, **how: bool) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_remove.wait(60)
        removes(folder, **how)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    run, checkpoints, _ = saved(tmp_path, 1, 2, 3, 4)
    with checkpoints:
        assert [step_of(folder) for folder in whole_checkpoints(run)] == [2, 3, 4]
        checkpoints.save(5)  # does not wait for the removal of the first
        may_remove.set()
    kept = ["step-000003", "step-000004", "step-000005"]
    assert sorted(path.name for path in run.checkpoints_dir.iterdir()) == kept


def test_one_that_a_group_cannot_read_is_passed_over_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, checkpoints, group = saved(tmp_path, 1, 2)
    (whole_checkpoints(run)[-1] / "one" / "number").write_text("?")
    with caplog.at_level(logging.WARNING, "rill"):
        assert checkpoints.load_latest() == 1
    assert group.number == 10
    assert "step-000002" in caplog.text and "passed over" in caplog.text


def test_a_rank_that_is_lost_while_it_loads_is_told_while_its_peers_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoints, group = saved(tmp_path, 1)
    loading = Handle("one.load", [WorkerAddress("one", rank, "node0") for rank in (0, 1)])
    loading.lose(1, "died during a call")
    monkeypatch.setattr(group, "load", lambda folder: loading)
    with pytest.raises(PeerDiedError, match=r"one\[1\] died during a call"):
        checkpoints.load_latest()


def test_nothing_but_damaged_ones_is_an_error_and_none_at_all_is_none(tmp_path: Path) -> None:
    run, checkpoints, _ = saved(tmp_path, 1)
    (whole_checkpoints(run)[-1] / "one" / "number").unlink()
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints .* the newest: .*cannot be read"):
        checkpoints.load_latest()
    fresh = RunCheckpoints(Run.create("fresh", root=tmp_path), {}, 1, 1.0)
    assert fresh.load_latest() is None


def test_what_is_saved_is_not_written_a_second_time(tmp_path: Path) -> None:
    """A kill in between would lose it, and with it perhaps the only one."""
    _, checkpoints, group = saved(tmp_path, 2)
    group.number = -1
    checkpoints.save(2)
    run = checkpoints._run
    number = run.checkpoints_dir / "step-000002" / "one" / "number"
    assert number.read_text() == "20"
    again = RunCheckpoints(run, {"one": group}, 3, 1.0)  # type: ignore[dict-item]
    assert again.load_latest() == 2
    group.number = -1
    again.save(2)
    assert number.read_text() == "20"


def test_what_is_saved_after_a_damaged_one_was_passed_over_is_the_newest(tmp_path: Path) -> None:
    run, _, group = saved(tmp_path, 10, 20)
    (run.checkpoints_dir / "step-000020" / "one" / "number").write_text("torn")
    keeps_one = RunCheckpoints(run, {"one": group}, 1, 1.0)  # type: ignore[dict-item]
    assert keeps_one.load_latest() == 10
    group.number = 120
    keeps_one.save(12)
    keeps_one.settle()
    assert RunCheckpoints(run, {"one": group}, 1, 1.0).load_latest() == 12 and group.number == 120  # type: ignore[dict-item]


def test_observers_are_told_where_a_run_goes_on_that_has_passed_over_a_damaged_one(tmp_path: Path) -> None:
    """They have figures of the steps after it, which are taken again."""
    run, checkpoints, _ = saved(tmp_path, 10, 20)
    told: list[StepReport] = []
    assert restored(checkpoints, 30, [told.append]) == 20 and not told
    (run.checkpoints_dir / "step-000020" / "one" / "number").write_text("torn")
    assert restored(checkpoints, 30, [told.append]) == 10
    assert [(report.phase, report.step) for report in told] == [("restart", 10)]


def test_a_checkpoint_counts_once_its_files_are_written_behind_training(tmp_path: Path) -> None:
    run, checkpoints, group = saved(tmp_path, 1)
    group.number = 20
    checkpoints.save(2)
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [1]
    checkpoints.settle_if_done()
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [1, 2]


def test_a_checkpoint_is_on_disk_before_it_counts_and_those_before_it_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss of power there is one that is whole."""
    synced, fsync, unlink = set[int](), os.fsync, Path.unlink

    def noted(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        fsync(fd)

    def checked(path: Path, text: str) -> None:
        files = [each for each in path.parent.rglob("*") if each.is_file()]
        assert files and {each.stat().st_ino for each in files} <= synced
        write_atomically(path, text)

    def gone(path: Path, missing_ok: bool = False) -> None:
        newest = run.checkpoints_dir / "step-000005"
        assert {each.stat().st_ino for each in (newest, newest / MANIFEST, run.checkpoints_dir)} <= synced
        unlink(path, missing_ok)

    run, checkpoints, _ = saved(tmp_path, 1, 2, 3)
    checkpoints.settle()
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr("rill.journal.checkpoints.write_atomically", checked)
    monkeypatch.setattr(Path, "unlink", gone)
    checkpoints.save(5)
    checkpoints.settle()
    monkeypatch.undo()
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [2, 3, 5]


def test_a_damaged_file_is_found_by_its_checksum_and_the_best_is_kept(tmp_path: Path) -> None:
    run = Run.create("scored", root=tmp_path)
    group = OneNumber()
    checkpoints = RunCheckpoints(run, {"one": group}, 1, 1.0)  # type: ignore[dict-item]
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.1)):
        group.number = step
        checkpoints.save(step, score)
        checkpoints.settle()
    assert [step_of(folder) for folder in whole_checkpoints(run)] == [2, 4], "the best and the newest"
    best, newest = whole_checkpoints(run)
    assert damage_of(best, deep=True) == damage_of(newest, deep=True) == ""
    (part,) = [path for path in newest.rglob("*") if path.is_file() and path.parent != newest]
    part.write_text(part.read_text() + " ")
    assert "checksum" in damage_of(newest)
    assert RunCheckpoints(run, {"one": group}, 1, 1.0).load_latest() == 2  # type: ignore[dict-item]
