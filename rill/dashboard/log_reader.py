"""The new lines of a log that is being written, with where each begins, in blocks of bounded size.

Called by the indexes. A line longer than MAX_LINE_BYTES is passed over without being held in memory; a line without
its newline is left for the next time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 4 * 1024 * 1024
MAX_LINE_BYTES = 64 * 1024 * 1024
HEAD_BYTES = 256


@dataclass(frozen=True, slots=True)
class Block:
    lines: list[tuple[int, bytes]]
    """(offset in the log, line without its newline)"""
    read_to: int


def new_blocks(path: Path, offset: int) -> Iterator[Block]:
    """Whole lines from `offset` on. Every block says how far the log is read with it."""
    is_skipping = False
    with path.open("rb") as file:
        file.seek(offset)
        pending = b""
        while True:
            got = file.read(BLOCK_BYTES)
            if not got:
                return
            end = got.rfind(b"\n")
            if end < 0:
                pending = b"" if is_skipping else pending + got
                if len(pending) > MAX_LINE_BYTES:
                    pending, is_skipping = b"", True
                continue
            whole, rest = got[: end + 1], got[end + 1 :]
            read_to = file.tell() - len(rest)
            if is_skipping:
                whole = whole[whole.find(b"\n") + 1 :]
            data = pending + whole
            yield Block(_split(data, read_to - len(data)), read_to)
            pending, is_skipping = rest, False


def head_of(path: Path, num_bytes: int) -> str:
    """What tells a log from another one of the same name: its first bytes, at most HEAD_BYTES of them."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(min(num_bytes, HEAD_BYTES))).hexdigest()[:16]


def size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _split(data: bytes, begin: int) -> list[tuple[int, bytes]]:
    lines = []
    for line in data.split(b"\n"):
        if line:
            lines.append((begin, line))
        begin += len(line) + 1
    return lines
