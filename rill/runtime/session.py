"""The folders of a session: made at its start, held by a lock, swept by the next session if nobody is left.

A session has a folder for sockets and logs under the system's temporary directory, and one for shared memory
under /dev/shm where that exists. Driver and agent each hold the lock file shared; a folder whose lock can be
taken exclusively belongs to nobody, and `sweep` removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rill.errors import UserError
from rill.runtime.process import LOCK_NAME, SESSION_PREFIX, remove_session

_SHM_ROOT = Path("/dev/shm")
MAX_PATH_CHARS = 86
"""A Unix socket's path may have 107 characters; its name inside the folder needs the rest."""
_NURSERY_AGE_S = 60.0


@dataclass(slots=True)
class Session:
    """One session's folders and this process's hold on them."""

    session_id: str
    session_dir: Path
    shm_dir: Path
    _lock: IO[str] = field(repr=False)

    def close(self) -> None:
        """Let go and remove what is left."""
        remove_session(self.session_dir, self.shm_dir)
        self._lock.close()


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
    # Made under another name and renamed once locked, so that no sweep can see it unlocked.
    nursery = root / f".{SESSION_PREFIX}{session_id}"
    nursery.mkdir(mode=0o700)
    lock = open(nursery / LOCK_NAME, "w")  # noqa: SIM115  held until close()
    fcntl.flock(lock, fcntl.LOCK_SH)
    (nursery / "logs").mkdir()
    nursery.rename(session_dir)
    shm_dir = shm_dir_of(session_dir)
    shm_dir.mkdir(mode=0o700)
    return Session(session_id, session_dir, shm_dir, lock)


def shm_dir_of(session_dir: Path) -> Path:
    """Where a session keeps its shared memory: beside /dev/shm's other files, else inside its own folder."""
    usable = _SHM_ROOT.is_dir() and os.access(_SHM_ROOT, os.W_OK)
    return _SHM_ROOT / session_dir.name if usable else session_dir / "shm"


def sweep(root: Path) -> list[str]:
    """Remove the folders of sessions that nobody holds any more; returns their names."""
    swept: list[str] = []
    young = time.time() - _NURSERY_AGE_S
    for folder in root.glob(f"*{SESSION_PREFIX}*"):
        try:
            if folder.name.startswith(".") and folder.stat().st_mtime > young:
                continue  # its lock may be about to be taken
            with open(folder / LOCK_NAME) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_session(folder, shm_dir_of(folder))
                swept.append(folder.name)
        except OSError:  # held, gone meanwhile, or another user's
            continue
    return swept
