"""JSON lines that can be read while they are written.

A writer appends whole lines with one system call each; a killed writer leaves at most one cut line, at the end of
what it wrote. The reader skips what is not whole, so that a log is readable at any moment of its life. A full disk
makes the writer wait, and no line is lost.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

R = TypeVar("R")

FULL_TIMEOUT_S = 600.0
"""How long a full disk is waited for, by these files and by the token log."""
RETRY_S = 1.0

_log = logging.getLogger(__name__)


def encode_line(record: Any) -> bytes:
    """One line. Values JSON has no word for become their `str`; not-a-number and infinities become strings."""
    return _encoder.encode(record) + b"\n"


def encode_number(value: float) -> float | str:
    """JSON has no NaN: "NaN", "Infinity" and "-Infinity" are read back by `float` here and `Number` in a browser."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def read_lines(path: Path, *fields: str) -> Iterator[dict[str, Any]]:
    """Every whole record of a file that has these fields."""
    for record in read_records(path, dict[str, Any]):
        if all(field in record for field in fields):
            yield record


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Every whole record of a file as a `kind`; nothing when there is no file yet. Cut or damaged lines are skipped,
    and so are records of a version of rill that wrote others."""
    decoder = msgspec.json.Decoder(kind)
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            yield record


class LineFile:
    """An append-only file of JSON lines, with one writer. Every `write` reaches the operating system before it
    returns."""

    def __init__(self, path: Path, full_timeout_s: float = FULL_TIMEOUT_S) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._full_timeout_s = full_timeout_s
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._end_cut_line()

    def write(self, lines: bytes) -> None:
        """Append whole lines (each ending in a newline), all or none of them."""
        deadline_s = time.monotonic() + self._full_timeout_s
        is_told = False
        while True:
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                return
            except OSError as error:
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - (len(lines) - len(rest)))
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() >= deadline_s:
                    raise
                if not is_told:
                    _log.warning("%s waits for room on the disk: %s", self.path, error.strerror)
                    is_told = True
            time.sleep(RETRY_S)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _end_cut_line(self) -> None:
        """What a killed writer left half-written must not swallow the first line that is appended to it."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")


def _to_json(value: Any) -> Any:
    if hasattr(value, "item"):  # NumPy and torch scalars
        try:
            return value.item()
        except (ValueError, RuntimeError):
            return str(value)
    return str(value)


_encoder = msgspec.json.Encoder(enc_hook=_to_json)
