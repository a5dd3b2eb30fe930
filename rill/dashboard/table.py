"""Fixed-size rows in a file, appended by one process and read by range by others: what the indexes are made of.

A table never loads more of its file than it is asked for. Rows beyond the count that its owner has published are not
read, so a reader is safe while the writer appends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
"""As questions have it: what a browser can count to, and a table holds."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Number = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""A finite one."""


class Table:
    """`num_rows` comes from the index's state: what lies behind it in the file is a killed writer's and is cut off."""

    def __init__(self, path: Path, dtype: np.dtype[Any], num_rows: int, *, is_writer: bool = False) -> None:
        self.path = path
        self.dtype = dtype
        self.num_rows = num_rows
        self._is_writer = is_writer
        if is_writer:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.truncate(num_rows * dtype.itemsize)

    def append(self, rows: Rows) -> None:
        assert self._is_writer and rows.dtype == self.dtype
        with self.path.open("ab") as file:
            file.write(rows.tobytes())
        self.num_rows += len(rows)

    def read(self, first: int = 0, last: int | None = None) -> Rows:
        """Rows [first, last), copied out of the file."""
        end = self.num_rows if last is None else min(last, self.num_rows)
        first = max(0, first)
        if end <= first:
            return np.empty(0, self.dtype)
        size = self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, count=end - first, offset=first * size)

    def read_many(self, ranges: Iterable[tuple[int, int]]) -> list[Rows]:
        """Rows of each [first, last), all of which exist, with the file opened once."""
        size = self.dtype.itemsize
        with self.path.open("rb", buffering=0) as file:
            return [
                np.frombuffer(os.pread(file.fileno(), (last - first) * size, first * size), self.dtype)
                for first, last in ranges
            ]


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Bytes [offset, offset + length) of a file; fewer where it ends before."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def read_line(path: Path, offset: int, max_bytes: int) -> bytes:
    """The line that begins at the offset, without its newline; b"" where it is longer than `max_bytes`."""
    size = 4096
    while size <= max_bytes:
        found = read_range(path, offset, size)
        line, newline, _ = found.partition(b"\n")
        if newline or len(found) < size:
            return line
        size *= 16
    return b""
