from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from rill.dashboard import indexer
from rill.dashboard.indexer import INDEX_FOLDER, RunIndexer, bring_up_to_date, progress
from tests.dashboard.folders import small_run


def test_a_second_indexer_leaves_a_run_to_the_first_and_waits_for_it(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    folder = run.path / INDEX_FOLDER
    folder.mkdir()
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert not RunIndexer(run.path).update()
    began_s = time.monotonic()
    bring_up_to_date(run.path, timeout_s=0.2)
    assert time.monotonic() - began_s >= 0.2
    assert progress(run.path) == 0.0
    threading.Timer(0.3, lock.close).start()
    bring_up_to_date(run.path)
    assert progress(run.path) == 1.0


def test_an_index_that_somebody_deletes_is_made_again(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    running = RunIndexer(run.path)
    running.update()
    shutil.rmtree(run.path / INDEX_FOLDER)
    running.update()
    assert progress(run.path) == 1.0
    assert [index.spans.num_rows for index in indexer.trace_indexes(run.path)] == [3, 1]


def test_a_log_that_cannot_be_read_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path)
    make = indexer.TraceIndex.to_write

    def refuse(log: Path, folder: Path) -> indexer.TraceIndex:
        if log.stem == "driver":
            raise PermissionError(f"{log} is not yours")
        return make(log, folder)

    monkeypatch.setattr(indexer.TraceIndex, "to_write", refuse)
    RunIndexer(run.path).update()
    assert [index.log.stem for index in indexer.trace_indexes(run.path)] == ["rollout[0]#0"]


def test_a_run_that_cannot_be_indexed_costs_itself_only_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = small_run(tmp_path, "bad"), small_run(tmp_path, "good")
    folder_of, rounds = indexer.index_folder, iter([[bad.path, good.path]] * 3)

    def full(run: Path) -> Path:
        if run == bad.path:
            raise OSError(28, "No space left on device")
        return folder_of(run)

    monkeypatch.setattr(indexer, "index_folder", full)
    monkeypatch.setattr(indexer, "PAUSE_S", 0.0)
    with pytest.raises(StopIteration):
        indexer.keep_up_to_date(lambda: next(rounds), os.getppid())
    assert progress(good.path) == 1.0
    assert caplog.text.count("No space left") == 1


def test_an_index_in_the_temporary_folder_is_in_one_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(tmp_path)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    own = indexer.index_folder(run.path).parent
    assert own.stat().st_mode & 0o777 == 0o700
    (tmp_path / "rill-index-12345").mkdir()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="another user's"):
        indexer.index_folder(run.path)


def test_times_that_cannot_be_are_passed_over(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    for at_ns, duration_ns in ((2**63 - 1, 9), (-5, 1), (5, -1), (2**70, 0)):
        record = {"kind": "span", "name": "x", "lane": "l", "at_ns": at_ns, "duration_ns": duration_ns}
        with (run.path / "trace" / "driver.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    RunIndexer(run.path).update()
    assert [index.spans.num_rows for index in indexer.trace_indexes(run.path)] == [3, 1]
