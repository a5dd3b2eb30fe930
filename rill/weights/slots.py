"""Which version lies in which of two slots that take turns: one small file per slot, in shared memory.

A stamp is cleared before the first byte of a new version is written and set after the last. A reader looks before and
after it uses a bucket, so it never mistakes bytes of a newer version for those it asked for.

The owner holds a lock in the folder for as long as it lives. A publisher that was killed cannot clean up after itself:
in a cluster its folder lies in the session's shared memory and goes with the session, however that ends; elsewhere the
next publisher to start removes folders whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

from rill.errors import WeightSyncError
from rill.runtime import context as runtime_context
from rill.types import PolicyVersion

STAMP = struct.Struct("<q")
NOT_READABLE = -1
SHARED_MEMORY = Path("/dev/shm")
PREFIX, OWNER = "rill-weights-", "owner.lock"
ORPHAN_AGE_S = 60.0


class SlotStamps:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._lock: IO[bytes] | None = None

    @classmethod
    def create(cls, parent: str = "") -> SlotStamps:
        """A new folder, removed when the stamps are closed or the process ends in order."""
        place = parent or _default_place()
        Path(place).mkdir(parents=True, exist_ok=True)
        _remove_orphans(Path(place))
        stamps = cls(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        stamps._lock = Path(stamps.folder, OWNER).open("wb")  # noqa: SIM115  held for as long as the owner lives
        fcntl.flock(stamps._lock, fcntl.LOCK_EX)
        weakref.finalize(stamps, shutil.rmtree, stamps.folder, ignore_errors=True)
        return stamps

    def clear(self, slot: int) -> None:
        self._write(slot, NOT_READABLE)

    def set(self, slot: int, version: PolicyVersion) -> None:
        self._write(slot, int(version))

    def check(self, slot: int, version: PolicyVersion) -> None:
        """Raise unless the slot holds this version, whole."""
        stamp = self._read(slot)
        if stamp != int(version):
            holds = "nothing readable" if stamp == NOT_READABLE else f"version {stamp}"
            raise WeightSyncError(
                f"version {version}: slot {slot} of {self.folder} holds {holds}: the publisher has gone on to newer "
                "weights, or has ended, or runs on another machine; pull the newest manifest"
            )

    def close(self) -> None:
        """The owner's side: remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def _write(self, slot: int, value: int) -> None:
        Path(self.folder, f"slot{slot}.stamp").write_bytes(STAMP.pack(value))

    def _read(self, slot: int) -> int:
        try:
            data = Path(self.folder, f"slot{slot}.stamp").read_bytes()
        except FileNotFoundError:
            return NOT_READABLE
        return int(STAMP.unpack(data)[0]) if len(data) == STAMP.size else NOT_READABLE


def _default_place() -> str:
    if runtime_context.is_set():
        return str(runtime_context.current().shm_dir)
    return str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else tempfile.gettempdir()


def _remove_orphans(place: Path) -> None:
    """Folders whose owner is dead. Young ones are left alone: their owner may be about to take its lock."""
    for folder in place.glob(f"{PREFIX}*"):
        try:
            with (folder / OWNER).open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(file.fileno()).st_mtime > ORPHAN_AGE_S:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # held by a living owner, somebody else's, or gone already
