"""Folders for what one process hands to others as files: removed however that process ends.

In a cluster they lie in the session's shared memory and go with it. Elsewhere they are held like a session's folder
(session.py); after a kill -9, whoever next opens a session or such a folder there removes them.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Self

from rill.runtime import context as runtime_context
from rill.runtime.process.session import SESSION_PREFIX, SHM_ROOT, is_shm_usable, make_held, sweep


class ScratchFolder:
    """A folder of this process's own; others may read it for as long as this process keeps it."""

    def __init__(self, purpose: str, root: Path | str | None = None) -> None:
        """Inside `root`; by default in the cluster's shared memory, else the machine's, else among temporary files."""
        if root is None and runtime_context.is_set():
            root = runtime_context.current().site.shm_dir
        place = Path(root or (SHM_ROOT if is_shm_usable() else tempfile.gettempdir()))
        place.mkdir(parents=True, exist_ok=True)
        sweep(place)
        self.path = place / f"{SESSION_PREFIX}{purpose}-{secrets.token_hex(6)}"
        self._lock = make_held(self.path)
        self._remove = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def close(self) -> None:
        self._remove()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
