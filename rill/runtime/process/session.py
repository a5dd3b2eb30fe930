"""The folders of a session: made at its start, held by locks, removed at its end or swept by the next session.

A session has a folder for sockets and logs under the system's temporary directory, and one for shared memory under
/dev/shm where that exists. Each holds a lock file that driver and agent hold shared; a folder whose lock can be taken
exclusively belongs to nobody, and `sweep` removes it, whichever of the two is left and whatever TMPDIR was then.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rill.errors import UserError

_log = logging.getLogger(__name__)

SESSION_PREFIX = "rill-session-"
LOCK_NAME = "session.lock"
MAX_PATH_CHARS = 86
"""A Unix socket's path may have 107 characters; its name inside the folder needs the rest."""
SHM_ROOT = Path("/dev/shm")
_NURSERY_AGE_S = 60.0


@dataclass(slots=True)
class Session:
    session_id: str
    session_dir: Path
    shm_dir: Path
    _locks: list[IO[str]] = field(repr=False)

    def close(self) -> None:
        remove_session(self.session_dir, self.shm_dir)
        for lock in self._locks:
            lock.close()


def open_session(session_id: str | None = None) -> Session:
    """Make the folders of a new session, after sweeping those left by dead ones."""
    root = Path(tempfile.gettempdir())
    sweep(root)
    session_id = session_id or secrets.token_hex(6)
    session_dir = root / f"{SESSION_PREFIX}{session_id}"
    if len(str(session_dir)) > MAX_PATH_CHARS:
        raise UserError(
            f"the temporary directory {str(root)!r} is too long for the sockets inside it: "
            f"set TMPDIR to one of at most {MAX_PATH_CHARS - len(session_dir.name) - 1} characters"
        )
    shm_dir = shm_dir_of(session_dir)
    locks = [make_held(session_dir), make_held(shm_dir)]
    (session_dir / "logs").mkdir()
    return Session(session_id, session_dir, shm_dir, locks)


def shm_dir_of(session_dir: Path) -> Path:
    """Where a session keeps its shared memory: beside /dev/shm's other files, else inside its own folder."""
    return SHM_ROOT / session_dir.name if is_shm_usable() else session_dir / "shm"


def is_shm_usable() -> bool:
    return SHM_ROOT.is_dir() and os.access(SHM_ROOT, os.W_OK)


@contextlib.contextmanager
def hold_session(*folders: Path) -> Iterator[None]:
    """Hold a session's folders: nobody sweeps them meanwhile."""
    with contextlib.ExitStack() as held:
        for folder in folders:
            _lock(held.enter_context(open(folder / LOCK_NAME, "a+")))
        yield


def remove_session(session_dir: Path, shm_dir: Path) -> None:
    shutil.rmtree(shm_dir, ignore_errors=True)
    shutil.rmtree(session_dir, ignore_errors=True)


def sweep(root: Path) -> list[str]:
    """Remove the folders of sessions that nobody holds any more, here and in shared memory; returns their names."""
    swept: list[str] = []
    young = time.time() - _NURSERY_AGE_S
    for folder in [*root.glob(f"*{SESSION_PREFIX}*"), *SHM_ROOT.glob(f"*{SESSION_PREFIX}*")]:
        try:
            if folder.name.startswith(".") and folder.stat().st_mtime > young:
                continue  # its lock may be about to be taken
            with open(folder / LOCK_NAME, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder.name)
        except OSError:  # held, gone meanwhile, or another user's
            continue
    return swept


def make_held(folder: Path) -> IO[str]:
    """Make a folder that this process holds. Under another name until it is locked: no sweep can see it unlocked."""
    nursery = folder.with_name(f".{folder.name}")
    nursery.mkdir(mode=0o700)
    lock = open(nursery / LOCK_NAME, "w+")  # noqa: SIM115  held until the session is closed
    _lock(lock)
    nursery.rename(folder)
    return lock


def _lock(file: IO[str]) -> None:
    """Shared. Over NFS that needs a file that can be read, and an exclusive lock one that can be written."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:  # then nobody can sweep it either
        _log.warning("%s cannot be locked (%s): a kill leaves its folder behind", file.name, error.strerror)
