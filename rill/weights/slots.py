"""Buffers that take turns: two sets on the publisher's side, what a receiver keeps mapped of them on the other.

    publisher   stamp ← none │ write buckets │ stamp ← version        (slot = publishes mod 2)
    receiver    stamp = version? │ map, verify, hand on │ stamp = version still?

A slot's stamp, a small file, says which version lies in it: a reader that is overtaken by two publishes learns of it,
and never hands on bytes of two versions. Stamps are read and written by system calls, which no processor reorders with
the copies between them. The folder of a publisher that was killed goes with the cluster's session, or is swept by the
next that is opened in its place; receivers hear of its death and let go of what they had mapped.
"""

from __future__ import annotations

import struct
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from rill.errors import WeightSyncError
from rill.runtime import context as runtime_context
from rill.runtime.process.scratch import ScratchFolder
from rill.types import PolicyVersion
from rill.weights.base import Publisher, TransportConfig
from rill.weights.manifest import WeightManifest

T = TypeVar("T")

STAMP = struct.Struct("<q")
NOT_READABLE = -1


def write_stamp(folder: str, slot: int, version: int) -> None:
    """What lies in the slot from now on; NOT_READABLE: nothing whole."""
    Path(folder, f"slot{slot}.stamp").write_bytes(STAMP.pack(version))


def check_stamp(folder: str, slot: int, version: PolicyVersion) -> None:
    """Raise unless the slot holds this version, whole."""
    try:
        data = Path(folder, f"slot{slot}.stamp").read_bytes()
    except FileNotFoundError:
        data = b""
    stamp = STAMP.unpack(data)[0] if len(data) == STAMP.size else NOT_READABLE
    if stamp != int(version):
        holds = "nothing readable" if stamp == NOT_READABLE else f"version {stamp}"
        raise WeightSyncError(
            f"version {version}: slot {slot} of {folder} holds {holds}: the publisher has gone on to newer "
            "weights, or has ended, or runs on another machine; pull the newest manifest"
        )


class SlotPublisher(Publisher):
    """A publisher of two sets of buffers. A transport says what a buffer is and how it is reached."""

    def __init__(self, config: TransportConfig, folder: str = "") -> None:
        super().__init__(config)
        self._scratch = ScratchFolder("weights", folder or None)
        self.folder = str(self._scratch.path)
        self.buffers: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._num_published = 0

    @property
    def slot(self) -> int:
        return self._num_published % 2

    @abstractmethod
    def new_buffer(self, index: int, num_bytes: int, device: torch.device) -> Tensor: ...

    def place_of(self, device: torch.device) -> torch.device:
        """Where the buffers of tensors on `device` lie."""
        return device

    def begin(self, version: PolicyVersion) -> None:
        write_stamp(self.folder, self.slot, NOT_READABLE)

    def allocate(self, index: int, num_bytes: int, device: torch.device) -> Tensor:
        buffers, place = self.buffers[self.slot], self.place_of(device)
        if index < len(buffers) and buffers[index].numel() == num_bytes and buffers[index].device == place:
            return buffers[index]
        fresh = self.new_buffer(index, num_bytes, place)
        buffers[index : index + 1] = [fresh]
        return fresh

    def location(self, version: PolicyVersion) -> str:
        return self.folder

    def finish(self, manifest: WeightManifest) -> WeightManifest:
        del self.buffers[self.slot][len(manifest.buckets) :]
        write_stamp(self.folder, self.slot, int(manifest.version))
        self._num_published += 1
        is_in_cluster = runtime_context.is_set()
        return replace(manifest, owner=runtime_context.current().address.identity if is_in_cluster else "")

    def close(self) -> None:
        self._scratch.close()
        for buffers in self.buffers:
            buffers.clear()


class Mapped(Generic[T]):
    """What a receiver keeps mapped of one publisher, by key: let go when another one publishes, or this one is dead."""

    def __init__(self, on_drop: Callable[[], None] = lambda: None) -> None:
        """`on_drop`: to let go of what was made of it."""
        self._location = ""
        self._owner = ""
        self._kept: dict[object, T] = {}
        self._on_drop = on_drop
        if runtime_context.is_set():
            told = weakref.WeakMethod(self._on_death)

            def listener(identity: str, _: str) -> None:
                method = told()
                if method is not None:
                    method(identity)

            runtime_context.current().directory.on_death(listener)

    def get(self, manifest: WeightManifest, key: object, make: Callable[[], T]) -> T:
        """The map of that key; `make` maps it where it is not."""
        if manifest.location != self._location:
            self.clear()
            self._location, self._owner = manifest.location, manifest.owner
        mapped = self._kept.get(key)  # a death may clear it at any moment
        if mapped is None:
            mapped = self._kept[key] = make()
        return mapped

    def clear(self) -> None:
        self._kept.clear()
        self._on_drop()

    def __len__(self) -> int:
        return len(self._kept)

    def _on_death(self, identity: str) -> None:
        if identity == self._owner:
            self.clear()
