"""What opening a file of rows finds out about it, kept in the cache folder: found out once on a machine, by all.

Callers: rill.data.rows and the datasets of rows. A RowIndex belongs to one source in one state: when a file of it
changes, so does the index's folder, and the folder of the old state is removed.

    <cache>/rows/<source and its state>/
        source.txt            where the source lies, and which of its files if not all; a folder whose source is gone is
                              removed by the next builder
        lines.npy …           made by one process; the others wait for it and map it into memory
        <settings>.npy        one number for every row

A file is there whole or not at all, and its maker holds a lock that the kernel frees when it dies: the next one who
waits makes it then.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rill.errors import DataError, StuckError
from rill.models.packaged import cache_folder

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

WAIT_S = 1_800.0
"""Longest wait for another process; a dead one is not waited for."""
POLL_S = 0.01
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
SAMPLE_BYTES = 4_096
"""Read at the start, the middle and the end of a file, beside its size and time."""


class RowIndex:
    """Of the source at `root`, which consists of `files`; `part`: of those of them alone, whatever else is there."""

    def __init__(self, root: Path, files: Sequence[Path], *, part: Sequence[Path] = ()) -> None:
        self._root = root.resolve()
        self._files = [file.resolve() for file in files]
        self._source = "\n".join(map(str, (self._root, *part)))
        self.folder = self._place() / _state_of(self._root, self._files)
        if not (self.folder / "source.txt").exists():
            self._start()

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """The file `name`, written by make(path) unless it is there."""
        path = self.folder / name
        if path.exists():
            return path
        awaited = f"another process that makes {name} of {self._root}"
        with self._unchanged(), _locked(path.with_suffix(".lock"), awaited):
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
        """uint64 [rows]: number_of(row), by one of the processes that ask. What it raises for a row is raised by all
        of them, one after the other."""
        return self.array_once(
            name, lambda: np.fromiter(map(number_of, range(num_rows)), np.uint64, num_rows)
        )

    def digests(self) -> dict[str, str]:
        """Of what the files hold, whenever they were written, by the source."""
        return {str(self._root): self.array_once("digest", self._digest).tobytes().hex()}

    # --- inside -------------------------------------------------------------------------------------------

    def _digest(self) -> Array:
        digest = hashlib.blake2b(digest_size=16)
        for path in self._files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        return np.frombuffer(digest.digest(), np.uint8)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """A source that changes takes its index's folder away from those who still read the old state."""
        try:
            yield
        except FileNotFoundError:
            if self.folder.exists():
                raise
            raise DataError(f"{self._root} was changed while it was being opened: open it again") from None
        except OSError as error:
            if error.errno not in FULL_DISK:
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
            with contextlib.suppress(OSError):  # another process has just removed it
                source = other.read_text(encoding="utf-8")
                is_past = source == self._source or not Path(source.partition("\n")[0]).exists()
                if is_past and other.parent != self.folder:
                    shutil.rmtree(other.parent, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.folder / "source.txt", lambda draft: draft.write_text(self._source, encoding="utf-8"))


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


def _read(path: Path) -> Array | None:
    """The array mapped into memory; None where it is not there or not whole."""
    try:
        found: Array = np.load(path, mmap_mode="r")
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return found


@contextlib.contextmanager
def _locked(path: Path, awaited: str) -> Iterator[None]:
    """Hold the lock; StuckError names what was `awaited` in vain."""
    deadline = time.monotonic() + WAIT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StuckError(f"waited {WAIT_S:.0f} s for {awaited}: is it stopped?") from None
                time.sleep(POLL_S)
        yield
