"""Trainer checkpoints: masters, optimizer state and version, written with torch's distributed checkpoint.

    folder/trainer/                 appears by one rename, after everything in it is on disk
        __0_0.distcp …, .metadata   torch.distributed.checkpoint; any later number of ranks can read it
        manifest.json               every file's size and SHA-256, and what the checkpoint is of

Guarantees: a save cut off at any byte leaves what was there before, or a folder whose manifest does not match, which
load() refuses. Which of several to load, and how many to keep, is for whoever calls (rill.journal.checkpoints). A save
returns at once: one thread copies the state to host memory and writes the files, with a process group of its own. What
changes the state waits for the copy (rill.training.staging), and a second save for the first.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rill.errors import CheckpointError, StuckError
from rill.telemetry.run import sync
from rill.training.engine import TrainEngine
from rill.training.staging import Staging, StateCopy
from rill.types import PolicyVersion

FOLDER, MANIFEST = "trainer", "manifest.json"
_FORMAT = 1
_NUM_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That write and read again, a file each."""


class Checkpointer:
    """Saves and loads one engine. Every rank calls the same methods in the same order."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self._group: Any = None
        self._staging = Staging(engine.device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, folder: Path) -> None:
        """Write into `folder` behind the caller's back; wait() returns when it is whole."""
        self.wait()
        engine = self.engine
        shelf = engine.shelf if engine.rests_on_host else None
        if shelf is None:
            engine.prepare_optimizer_state()
        copy = StateCopy(self._staging, engine.state(), shelf)
        about = {
            "format": _FORMAT,
            "version": int(engine.version),
            "parameters": _fingerprint(engine),
            "optimizer": _moments(engine),
        }
        self._join()
        engine.hold(copy.wait)
        self._thread = threading.Thread(
            target=self._write_behind,
            args=(copy, folder / FOLDER, about),
            name="rill-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def wait(self, timeout_s: float = 600.0) -> None:
        """Return when no save is under way; raise what the last one raised."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise StuckError(f"checkpoint: the save has not finished in {timeout_s:.0f} s")
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(f"the checkpoint could not be written: {error}") from error

    def load(self, folder: Path) -> PolicyVersion:
        """Restore what was saved into `folder`."""
        self.wait()
        engine, chosen = self.engine, folder / FOLDER
        if not chosen.exists() and retired(chosen).exists():
            chosen = retired(chosen)
        self._check(chosen)
        about = read_manifest(chosen)
        if about["parameters"] != _fingerprint(engine):
            raise CheckpointError(
                f"{chosen} was saved from another model (parameter names, shapes or adapters differ): load it with "
                "the configuration it was saved with"
            )
        if about.get("optimizer", _moments(engine)) != _moments(engine):
            raise CheckpointError(
                f"{chosen} has the optimizer state of {about['optimizer']}, this trainer's is of {_moments(engine)}: "
                "set optimizer.type to it, or start from an export of those weights (model.path)"
            )
        engine.prepare_optimizer_state()
        state = engine.state()
        with _without_single_process_warning():
            load(
                state,
                storage_reader=FileSystemReader(chosen),
                process_group=self._group,
                no_dist=self._group is None,
            )
        engine.after_load(int(about["version"]), state)
        return engine.version

    def close(self) -> None:
        self.wait()

    # --- writing ------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """A group of its own, made on the calling thread, where all ranks are in order: what the writer sends must not
        meet what training sends."""
        if self._group is None and self.engine.world.mesh is not None:
            self._group = dist.new_group(backend="gloo")

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def _write_behind(self, copy: StateCopy, final: Path, about: dict[str, Any]) -> None:
        try:
            self._write(copy.run(), final, about)
        except BaseException as error:  # noqa: BLE001 - the thread's boundary: wait() raises it on the caller's
            self._error = error

    def _write(self, state: dict[str, Any], final: Path, about: dict[str, Any]) -> None:
        world, group = self.engine.world, self._group
        partial = final.with_name(final.name + ".partial")
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._barrier()
        with _without_single_process_warning():
            save(
                state,
                storage_writer=FileSystemWriter(partial, sync_files=True, thread_count=_NUM_THREADS),
                process_group=group,
                no_dist=group is None,
            )
        sums = _described(self._own_files(partial))
        if group is not None:
            gathered: list[Any] = [None] * world.size
            dist.all_gather_object(gathered, sums, group=group)
            sums = {name: value for part in gathered for name, value in part.items()}
        if world.rank == 0:
            write_durably(partial / MANIFEST, json.dumps({**about, "files": sums}, indent=1).encode())
            put_in_place(partial, final)
        self._barrier()

    def _own_files(self, folder: Path) -> list[Path]:
        """The files this rank wrote (`__RANK_n.distcp`); rank 0 has the metadata too."""
        rank = self.engine.world.rank
        own = sorted(folder.glob(f"__{rank}_*"))
        return [*own, folder / ".metadata"] if rank == 0 else own

    def _check(self, folder: Path) -> None:
        """Once for all ranks."""
        found = [find_damage(folder) if self.engine.world.rank == 0 else None]
        self._join()
        if self._group is not None:
            dist.broadcast_object_list(found, src=0, group=self._group)
        if found[0] is not None:
            raise CheckpointError(f"{folder} is no whole checkpoint: {found[0]}")


def put_in_place(partial: Path, final: Path) -> None:
    """`partial` takes the place of what stood at `final`, which is removed only then: removing takes its time. After a
    kill between the two renames it stands at retired(final)."""
    shutil.rmtree(retired(final), ignore_errors=True)
    if final.exists():
        final.rename(retired(final))
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(retired(final), ignore_errors=True)


def retired(final: Path) -> Path:
    return final.with_name(final.name + ".old")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    files: dict[str, Any] = manifest["files"]
    for name, expected in files.items():
        path = folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != expected["num_bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['num_bytes']}"
    found = _described([folder / name for name in files])
    changed = [name for name, expected in files.items() if found[name] != expected]
    if changed:
        return f"{changed[0]} has changed"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} has no readable {MANIFEST}: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT or "files" not in manifest:
        raise CheckpointError(f"{folder}/{MANIFEST} is not of format {_FORMAT}")
    return manifest


def _described(files: list[Path]) -> dict[str, dict[str, Any]]:
    """By name, several at a time: a digest takes longer than the writing."""
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return {path.name: found for path, found in zip(files, pool.map(describe, files), strict=True)}


def describe(path: Path) -> dict[str, Any]:
    """Digested as a whole: block by block a thread would take the interpreter from training as often."""
    num_bytes = path.stat().st_size
    digest = hashlib.sha256()
    if num_bytes:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            digest.update(data)
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _without_single_process_warning() -> Iterator[None]:
    """One process without a process group is a way rill runs, not an oversight."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _fingerprint(engine: TrainEngine) -> str:
    """Names and global shapes of what is trained: two engines with the same can read each other's state."""
    text = ";".join(f"{s.name}{tuple(s.template.shape)}" for s in sorted(engine.slots, key=lambda s: s.name))
    return hashlib.sha256(text.encode()).hexdigest()


def _moments(engine: TrainEngine) -> str:
    """What kind of optimizer state a checkpoint holds: that of 8-bit AdamW is plain AdamW's."""
    return engine.config.optimizer.type.removesuffix("8bit")
