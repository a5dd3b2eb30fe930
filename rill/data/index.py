"""What opening a file of rows finds out about it, kept in the cache folder: found out once on a machine, by all.

Callers: rill.data.rows and the datasets of rows. A RowIndex belongs to one source in one state: when a file of it
changes, so does the index's folder, and the folder of the old state is removed.

    <cache>/rows/<source and its state>/
        source.txt            where the source lies; a folder whose source is gone is removed by the next builder
        lines.npy …           made by one process, the others wait for it                         once()
        <settings>.npy        one number for every row, the work of all processes that open it    of_every_row()
        <settings>.parts/     blocks of it, while some are missing

        process A ── block 0 ── block 1 ─────────────── block 5 ──┐
        process B ── (0 is taken) ── block 4 ── block 2 ── 3 ─────┴── <settings>.npy, which both map into memory

A block is taken by a lock that the kernel frees when its holder dies, and is there whole or not at all: whoever is
killed leaves the rest to the others, or to the next run. Nobody needs to know how many processes there are.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import hashlib
import logging
import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rill.errors import DataError, StuckError
from rill.models.packaged import cache_folder

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

WAIT_S = 1_800.0
"""Longest wait for another process that gives no sign of progress; a dead one is not waited for."""
POLL_S = 0.01
SAMPLE_BYTES = 4_096
"""Read at the start, the middle and the end of a file, beside its size and time."""
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 64, 4_096


class RowIndex:
    """Of the source at `root`, which consists of `files`."""

    def __init__(self, root: Path, files: Sequence[Path]) -> None:
        self._root = root.resolve()
        self.folder = self._place() / _state_of(self._root, files)
        if not (self.folder / "source.txt").exists():
            self._start()

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """The file `name`, written by make(path) unless it is there."""
        path = self.folder / name
        with self._unchanged():
            if not path.exists():
                with _locked(path.with_suffix(".lock"), f"another process that makes {name} of {self._root}"):
                    if not path.exists():
                        for draft in self.folder.glob(f".{path.stem}-*"):  # of one who was killed at it
                            draft.unlink(missing_ok=True)
                        _write(path, make)
        return path

    def array_once(self, name: str, make: Callable[[], Array]) -> Array:
        """make()'s result, in memory that all processes share."""
        path = self.folder / f"{name}.npy"
        while (found := _read(self.once(path.name, lambda draft: np.save(draft, make())))) is None:
            path.unlink(missing_ok=True)  # damaged: what can be made again is made again
        return found

    def of_every_row(self, name: str, num_rows: int, number_of: Callable[[int], int]) -> Array:
        """uint64 [rows]: number_of(row), each called by one of the processes that ask at the same time.

        What it raises for a row is raised here: by all of them, since nobody can finish that row's block.
        """
        path, parts = self.folder / f"{name}.npy", self.folder / f"{name}.parts"
        if (found := _read(path, num_rows)) is not None:
            return found
        if path.exists() and _read(path, num_rows) is None:
            path.unlink(missing_ok=True)  # damaged
        work = _SharedWork(path, parts, _blocks(num_rows), number_of)
        deadline, num_left = time.monotonic() + WAIT_S, num_rows
        with self._unchanged():
            while (found := _read(path, num_rows)) is None:
                if work.advance():
                    continue
                if work.num_left < num_left:
                    deadline, num_left = time.monotonic() + WAIT_S, work.num_left
                if time.monotonic() > deadline:
                    raise StuckError(
                        f"{WAIT_S:.0f} s without progress while other processes check {num_left} blocks of rows of "
                        f"{self._root}: is one of them stopped?"
                    )
                time.sleep(POLL_S)
        shutil.rmtree(parts, ignore_errors=True)
        return found

    # --- inside -------------------------------------------------------------------------------------------

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """A source that changes takes its index's folder away from those who still read the old state."""
        try:
            yield
        except FileNotFoundError:
            if self.folder.exists():
                raise
            raise DataError(f"{self._root} was changed while it was being opened: open it again") from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DataError(
                f"no room for the index of {self._root} in {self.folder}: set RILL_CACHE to a folder with more"
            ) from error

    def _place(self) -> Path:
        place = cache_folder() / "rows"
        try:
            place.mkdir(parents=True, exist_ok=True)
            with (place / ".probe").open("w") as file:  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return place
        except OSError as error:
            reason = error.strerror
        log.warning(
            "no cache in %s (%s): every process checks all rows of %s by itself; set RILL_CACHE to a folder on a local "
            "disk that can be written",
            place, reason, self._root,
        )  # fmt: skip
        private = tempfile.mkdtemp(prefix="rill-rows-")
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return Path(private)

    def _start(self) -> None:
        """A new folder; those of this source's former states and of sources that are gone go away."""
        for other in self.folder.parent.glob("*/source.txt"):
            source = _source_in(other)
            is_past = source is not None and (source == self._root or not source.exists())
            if is_past and other.parent != self.folder:
                shutil.rmtree(other.parent, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "source.txt", lambda draft: draft.write_text(str(self._root), encoding="utf-8"))


class _SharedWork:
    """One number for every row, block by block, by as many processes as there are."""

    def __init__(
        self, path: Path, parts: Path, blocks: Sequence[range], number_of: Callable[[int], int]
    ) -> None:
        self._path = path
        self._parts = parts
        self._blocks = blocks
        self._number_of = number_of
        self.num_left = len(blocks)
        """Blocks that were missing when advance() began."""

    def advance(self) -> bool:
        """Do the blocks that nobody holds, or put all together. False: others hold what is left."""
        self._parts.mkdir(exist_ok=True)
        todo = [b for b in range(len(self._blocks)) if not self._part(b).exists()]
        self.num_left = len(todo)
        try:
            return self._work(todo) if todo else self._join()
        except FileNotFoundError:
            if self._parts.exists():
                raise
            return True  # another process has put them together and cleaned up

    def _work(self, todo: Sequence[int]) -> bool:
        left, has_worked = deque(todo), False
        while left and not self._path.exists():
            block = left.popleft()
            part, rows = self._part(block), self._blocks[block]
            with _try_lock(part.with_suffix(".lock")) as is_mine:
                if not is_mine:
                    # Somebody works here: go on elsewhere, so that each has a stretch of the file to itself.
                    left.rotate(random.randrange(len(left)) if left else 0)
                elif not part.exists() and not self._path.exists():
                    _write_array(part, np.fromiter(map(self._number_of, rows), np.uint64, len(rows)))
                    has_worked = True
        return has_worked or self._path.exists()

    def _join(self) -> bool:
        read = [_read(self._part(b), len(rows)) for b, rows in enumerate(self._blocks)]
        bad = [b for b, part in enumerate(read) if part is None]
        for b in bad:
            self._part(b).unlink(missing_ok=True)
        if not bad:
            _write_array(
                self._path, np.concatenate([np.empty(0, np.uint64), *(p for p in read if p is not None)])
            )
        return True

    def _part(self, block: int) -> Path:
        return self._parts / f"{block}.npy"


def _state_of(root: Path, files: Sequence[Path]) -> str:
    """A name for the source as it is now."""
    digest = hashlib.blake2b(str(root).encode(), digest_size=12)
    for path in files:
        status = path.stat()
        digest.update(f"\0{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        with path.open("rb") as file:
            for start in (0, status.st_size // 2, max(0, status.st_size - SAMPLE_BYTES)):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _blocks(num_rows: int) -> list[range]:
    """Few enough to be files, many enough to be shared."""
    size = min(max(num_rows // 64, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS)
    return [range(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _write(path: Path, make: Callable[[Path], object]) -> None:
    """A reader sees the whole file or none, whatever happens to this process."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        make(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _write_array(path: Path, array: Array) -> None:
    _write(path, lambda draft: np.save(draft, array))


def _read(path: Path, length: int | None = None) -> Array | None:
    """The array mapped into memory; None where it is not there, not whole or not of this length."""
    try:
        found: Array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if length is None or len(found) == length else None


def _source_in(path: Path) -> Path | None:
    try:
        return Path(path.read_text(encoding="utf-8"))
    except OSError:  # another process has just removed it
        return None


@contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Whether the lock is ours while the block lasts."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def _locked(path: Path, awaited: str) -> Iterator[None]:
    """Hold the lock; StuckError names what was `awaited` in vain."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with _try_lock(path) as is_mine:
            if is_mine:
                yield
                return
        if time.monotonic() > deadline:
            raise StuckError(f"waited {WAIT_S:.0f} s for {awaited}: is it stopped?")
        time.sleep(POLL_S)
