"""Which version lies in which of two slots that take turns: one small file per slot, in shared memory.

A stamp is cleared before the first byte of a new version is written and set after the last. A reader looks before and
after it uses a bucket, so it never mistakes bytes of a newer version for those it asked for.

A publisher that was killed cannot clean up after itself: its folder is a scratch folder of the runtime, which goes with
the cluster's session, or is swept by the next that is opened in its place.
"""

from __future__ import annotations

import struct
from pathlib import Path

from rill.errors import WeightSyncError
from rill.runtime.process.scratch import ScratchFolder
from rill.types import PolicyVersion

STAMP = struct.Struct("<q")
NOT_READABLE = -1


class SlotStamps:
    def __init__(self, folder: str, scratch: ScratchFolder | None = None) -> None:
        """Of a folder that another process owns; `create` makes one."""
        self.folder = folder
        self._scratch = scratch

    @classmethod
    def create(cls, parent: str = "") -> SlotStamps:
        """A new folder, removed when the stamps are closed or the process ends, in whatever way."""
        scratch = ScratchFolder("weights", parent or None)
        return cls(str(scratch.path), scratch)

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
        if self._scratch is not None:
            self._scratch.close()

    def _write(self, slot: int, value: int) -> None:
        Path(self.folder, f"slot{slot}.stamp").write_bytes(STAMP.pack(value))

    def _read(self, slot: int) -> int:
        try:
            data = Path(self.folder, f"slot{slot}.stamp").read_bytes()
        except FileNotFoundError:
            return NOT_READABLE
        return int(STAMP.unpack(data)[0]) if len(data) == STAMP.size else NOT_READABLE
