"""A session's folders: nobody's are swept, somebody's never, whatever TMPDIR was and whichever of the two is left."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rill.runtime.process.session import SESSION_PREFIX, hold_session, open_session, shm_dir_of, sweep
from tests.child import environment

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Shorter than pytest's own: there are sockets inside."""
    with tempfile.TemporaryDirectory(prefix="rill-t-") as name:
        yield Path(name)


@pytest.fixture
def temp_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(folder))
    return folder


def test_a_session_that_is_held_is_not_swept_and_leaves_nothing_when_it_is_closed(temp_dir: Path) -> None:
    session = open_session()
    (session.shm_dir / "payload").write_bytes(b"x")
    assert session.session_dir.name not in sweep(temp_dir)
    assert (session.shm_dir / "payload").exists()
    session.close()
    assert not session.session_dir.exists() and not session.shm_dir.exists()


def test_shared_memory_is_swept_though_its_session_folder_is_gone(temp_dir: Path) -> None:
    session = open_session()
    shutil.rmtree(session.session_dir)  # a cleaner of temporary files, or another TMPDIR now
    assert session.shm_dir.name not in sweep(temp_dir)
    for lock in session._locks:
        lock.close()
    assert session.shm_dir.name in sweep(temp_dir / "elsewhere")
    assert not session.shm_dir.exists()


def test_an_agent_that_outlives_its_driver_keeps_the_folders(temp_dir: Path) -> None:
    session = open_session()
    with hold_session(session.session_dir, session.shm_dir):
        for lock in session._locks:
            lock.close()
        assert session.session_dir.name not in sweep(temp_dir)
    assert session.session_dir.name in sweep(temp_dir)
    assert not session.shm_dir.exists()


def over_nfs(file: Any, operation: int) -> None:
    mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    wanted = os.O_RDONLY if operation & fcntl.LOCK_SH else os.O_WRONLY
    if mode not in (wanted, os.O_RDWR):
        raise OSError(errno.EBADF, "Bad file descriptor")
    flock(file, operation)


flock = fcntl.flock


def test_folders_are_held_and_swept_over_nfs_as_well(temp_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a shared lock needs a file that can be read, and an exclusive one a file that can be written."""
    monkeypatch.setattr("rill.runtime.process.session.fcntl.flock", over_nfs)
    session = open_session()
    with hold_session(session.session_dir, session.shm_dir):
        for lock in session._locks:
            lock.close()
        assert session.session_dir.name not in sweep(temp_dir)
    assert session.session_dir.name in sweep(temp_dir)


def test_a_place_without_locks_is_used_and_told(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without(file: object, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr("rill.runtime.process.session.fcntl.flock", without)
    session = open_session()
    assert "cannot be locked (Operation not supported)" in caplog.text
    assert session.session_dir.name not in sweep(temp_dir), "nor is it swept"
    session.close()
    assert not session.session_dir.exists()


SCRIPT = """
import os, sys, time
import numpy as np
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
cluster = Cluster(devices="cpu:1")
Channel.create(cluster, "c").put(np.ones(1_000_000))
print(cluster.session.session_dir.name, os.getpid(), flush=True)
time.sleep(60)
"""


def test_everything_killed_at_once_is_removed_by_the_next_session_wherever_it_starts(folder: Path) -> None:
    """Driver, agent and hub at one moment: nobody is left to clean up."""
    own, other = folder / "own", folder / "other"
    own.mkdir()
    other.mkdir()
    env = environment(TMPDIR=str(own))
    driver = subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    name, _ = driver.stdout.readline().split()
    shm_dir = shm_dir_of(own / name)
    assert any(path.suffix for path in shm_dir.iterdir())
    everybody = [psutil.Process(driver.pid), *psutil.Process(driver.pid).children(recursive=True)]
    assert len(everybody) >= 3
    for process in everybody:
        process.suspend()  # so that none of them sees another's death
    for process in everybody:
        process.kill()
    driver.wait()
    driver.stdout.close()
    starting = subprocess.run(
        [
            sys.executable,
            "-c",
            "from rill.runtime.process.session import open_session; open_session().close()",
        ],
        env={**env, "TMPDIR": str(other)},
        timeout=30,
    )
    assert starting.returncode == 0
    assert not shm_dir.exists()
    assert [name for name in sweep(own) if name.startswith(SESSION_PREFIX)]
    assert not list(own.iterdir())
