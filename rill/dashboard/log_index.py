"""What every index of a log has: where it stands, how it is brought up to date, how a reader opens it.

The state is a small JSON file beside the tables, replaced atomically. A writer that changes tables in place marks the
state busy meanwhile: an index that is found busy by a new writer was left by a killed one and is made again; one whose
log was replaced or cut is, too. Readers take the state as it is.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec
import numpy as np

from rill.dashboard.log_reader import Block, head_of, new_blocks, size_of
from rill.dashboard.table import Table

FORMAT = 3
"""Raised with every change of what an index holds: others are made again."""
STATE_FILE = "state.json"


class IndexState(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    read_to: int = 0
    """Bytes of the log that are indexed."""
    head: str = ""
    is_busy: bool = False
    num_rows: dict[str, int] = {}
    """Of each table."""


S = TypeVar("S", bound=IndexState)


class LogIndex(ABC, Generic[S]):
    """One log's index: as a reader sees it at one moment (`open`), or brought up to date by its one writer
    (`to_write`). A subclass makes its tables when it is made."""

    state_type: ClassVar[type[Any]]
    changes_in_place: ClassVar[bool] = False

    def __init__(self, log: Path, folder: Path, state: S, *, is_writer: bool = False) -> None:
        self.log = log
        self.folder = folder
        self.state = state
        self._is_writer = is_writer
        self._tables: dict[str, Table] = {}

    @classmethod
    def open(cls, log: Path, folder: Path) -> Self | None:
        state = load_state(folder, cls.state_type)
        return None if state is None else cls(log, folder, state)

    @classmethod
    def to_write(cls, log: Path, folder: Path) -> Self:
        return cls(log, folder, _state_to_go_on_with(folder, log, cls.state_type), is_writer=True)

    def update(self) -> Iterator[None]:
        """Index what was appended; yields after each block."""
        if self.state.read_to > size_of(self.log):
            raise ValueError(f"{self.log} was cut")
        for block in new_blocks(self.log, self.state.read_to):
            if self.changes_in_place:
                self.state.is_busy = True
                self._save()
            self.add(block)
            self.state.read_to, self.state.is_busy = block.read_to, False
            self.state.num_rows = {name: table.num_rows for name, table in self._tables.items()}
            self._save()
            yield

    @abstractmethod
    def add(self, block: Block) -> None:
        """Append to the tables what the lines hold, and count it in the state."""

    def _table(self, name: str, dtype: np.dtype[Any]) -> Table:
        """NAME.bin, as far as the state says."""
        num_rows = self.state.num_rows.get(name, 0)
        table = Table(self.folder / f"{name}.bin", dtype, num_rows, is_writer=self._is_writer)
        self._tables[name] = table
        return table

    def _save(self) -> None:
        self.state.head = head_of(self.log, self.state.read_to)
        draft = self.folder / f".{STATE_FILE}"
        draft.write_bytes(msgspec.json.encode(self.state))
        os.replace(draft, self.folder / STATE_FILE)


def load_state(folder: Path, kind: type[S]) -> S | None:
    """As saved; None where there is none, or one of another format."""
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return state if state.format == FORMAT else None


def _state_to_go_on_with(folder: Path, log: Path, kind: type[S]) -> S:
    """The saved state if it belongs to this log and is whole; else a new one, in an emptied folder."""
    state = load_state(folder, kind)
    is_whole = state is not None and not state.is_busy and state.read_to <= size_of(log)
    if state is not None and is_whole and state.head in ("", head_of(log, state.read_to)):
        return state
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return kind()
