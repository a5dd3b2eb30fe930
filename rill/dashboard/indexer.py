"""Keeps the indexes of runs up to date: `.index/` in each run folder, or in a temporary folder where that is read-only.

    run's processes ──append──▶ trace, rollouts, trained/*.jsonl ──this──▶ .index/ ──read by range──▶ the server

`rill dashboard` runs it as a process of its own, so that parsing a large log takes nothing from the pages; `rill
report` calls `bring_up_to_date` before it reads. Two indexers of one run do not meet: the second finds the lock taken
and leaves the index to the first. A log that cannot be indexed is left out; the others are not.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rill.dashboard.log_index import STATE_FILE, LogIndex, load_state
from rill.dashboard.log_reader import size_of
from rill.dashboard.rollout_index import RolloutIndex
from rill.dashboard.rollouts import Rollouts
from rill.dashboard.trace_index import TraceIndex
from rill.dashboard.trained_index import TrainedIndex

INDEX_FOLDER = ".index"
TRACE, ROLLOUTS, TRAINED = "trace", "rollouts", "trained"
INDEXES: dict[str, type[LogIndex[Any]]] = {ROLLOUTS: RolloutIndex, TRAINED: TrainedIndex, TRACE: TraceIndex}
PAUSE_S = 1.0
X = TypeVar("X", bound=LogIndex[Any])
_log = logging.getLogger(__name__)


def logs_of(run: Path, kind: str) -> list[Path]:
    """The logs of a kind; only plain files that lie in the folder, so a link cannot lead out of it."""
    try:
        found = sorted((run / kind).glob("*.jsonl"))
    except OSError:
        return []
    return [path for path in found if path.is_file() and not path.is_symlink()]


def index_folder(run: Path) -> Path:
    """Where a run's index is, or is to be."""
    beside = run / INDEX_FOLDER
    if (beside.is_dir() and os.access(beside, os.W_OK)) or (not beside.exists() and os.access(run, os.W_OK)):
        return beside
    own = Path(tempfile.gettempdir()) / f"rill-index-{os.getuid()}"
    own.mkdir(mode=0o700, exist_ok=True)
    if os.lstat(own).st_uid != os.getuid():  # whoever made it could lead what is written there elsewhere
        raise PermissionError(f"{own} is another user's: set TMPDIR to a folder of your own")
    return own / hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]


def trace_indexes(run: Path) -> list[TraceIndex]:
    return _opened(run, TRACE, TraceIndex)


def rollouts(run: Path) -> Rollouts:
    """What is indexed of them by now."""
    return Rollouts(_opened(run, ROLLOUTS, RolloutIndex), _opened(run, TRAINED, TrainedIndex))


def _opened(run: Path, kind: str, index: type[X]) -> list[X]:
    folder = index_folder(run) / kind
    found = [index.open(log, folder / log.stem) for log in logs_of(run, kind)]
    return [one for one in found if one is not None]


def progress(run: Path) -> float:
    """The share of the logs' bytes that is indexed."""
    folder, done, total = index_folder(run), 0, 0
    for kind, index in INDEXES.items():
        for log in logs_of(run, kind):
            state = load_state(folder / kind / log.stem, index.state_type)
            total += size_of(log)
            done += 0 if state is None else min(state.read_to, size_of(log))
    return done / total if total else 1.0


class RunIndexer:
    """Writes the indexes of one run's logs."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._indexes: dict[Path, LogIndex[Any]] = {}

    def update(self, should_go_on: Callable[[], bool] = lambda: True) -> bool:
        """Index what is new. False where another process is at it."""
        with _held(index_folder(self.run)) as is_ours:
            if not is_ours:
                self._indexes.clear()  # another process writes them: what is known here is stale
                return False
            for kind in INDEXES:
                for log in logs_of(self.run, kind):
                    self._update_log(kind, log, should_go_on)
        return True

    def _update_log(self, kind: str, log: Path, should_go_on: Callable[[], bool]) -> None:
        index = self._indexes.get(log)
        if index is not None and index.state.read_to and not (index.folder / STATE_FILE).exists():
            index = None  # somebody has deleted it
        try:
            if index is None:
                folder = index_folder(self.run) / kind / log.stem
                index = self._indexes[log] = INDEXES[kind].to_write(log, folder)
            if size_of(log) != index.state.read_to:
                for _ in index.update():
                    if not should_go_on():
                        return
        except (OSError, ValueError, OverflowError) as error:
            _log.warning("%s cannot be indexed: %s", log, error)
            self._indexes.pop(log, None)


def bring_up_to_date(run: Path, timeout_s: float = 60.0) -> None:
    """Index everything that is there now; wait for another indexer of the run, but not for ever."""
    deadline = time.monotonic() + timeout_s
    while not RunIndexer(run).update() and time.monotonic() < deadline:
        time.sleep(0.1)


def keep_up_to_date(list_runs: Callable[[], list[Path]], parent_pid: int) -> None:
    """Until the parent is gone: the newest run first, each in turn."""
    indexers: dict[Path, RunIndexer] = {}

    def is_wanted() -> bool:
        return os.getppid() == parent_pid

    told = ""
    while is_wanted():
        began_s = time.monotonic()
        for run in list_runs():
            try:
                indexers.setdefault(run, RunIndexer(run)).update(is_wanted)
            except (
                OSError
            ) as error:  # a full disk, or a run that was removed meanwhile: the others are indexed
                if told != (told := f"{run} cannot be indexed: {error}"):
                    _log.warning(told)
        time.sleep(max(0.2, PAUSE_S - (time.monotonic() - began_s)))


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether this process may write the index."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(fd)
