"""Which version lies in which of two slots that take turns: one small file per slot, in shared memory.

A stamp is cleared before the first byte of a new version is written and set after the last. A reader looks before and
after it uses a bucket, so it never mistakes bytes of a newer version for those it asked for.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import weakref
from pathlib import Path

from rill.errors import WeightSyncError
from rill.types import PolicyVersion

STAMP = struct.Struct("<q")
NOT_READABLE = -1
SHARED_MEMORY = Path("/dev/shm")


class SlotStamps:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    @classmethod
    def create(cls, parent: str = "") -> SlotStamps:
        """A new folder, removed when the stamps are closed or the process ends in order."""
        place = parent or (str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else tempfile.gettempdir())
        Path(place).mkdir(parents=True, exist_ok=True)
        stamps = cls(tempfile.mkdtemp(prefix="rill-weights-", dir=place))
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
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, slot: int, value: int) -> None:
        Path(self.folder, f"slot{slot}.stamp").write_bytes(STAMP.pack(value))

    def _read(self, slot: int) -> int:
        try:
            data = Path(self.folder, f"slot{slot}.stamp").read_bytes()
        except FileNotFoundError:
            return NOT_READABLE
        return int(STAMP.unpack(data)[0]) if len(data) == STAMP.size else NOT_READABLE
