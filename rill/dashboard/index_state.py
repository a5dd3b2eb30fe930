"""Where an index stands: a small JSON file beside its tables, replaced atomically.

The writer marks the state busy while it changes tables. An index that is found busy by a new writer was left by a
killed one and is made again; one whose log was replaced or cut is, too. Readers take the state as it is.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TypeVar

import msgspec

from rill.dashboard.log_reader import head_of, size_of

FORMAT = 1
"""Raised with every change of what an index holds: others are made again."""
STATE_FILE = "state.json"


class IndexState(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    read_to: int = 0
    """Bytes of the log that are indexed."""
    head: str = ""
    is_busy: bool = False


S = TypeVar("S", bound=IndexState)


def load_state(folder: Path, kind: type[S]) -> S | None:
    """As saved; None where there is none, or one of another format."""
    try:
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return state if state.format == FORMAT else None


def state_to_go_on_with(folder: Path, log: Path, kind: type[S]) -> S:
    """The saved state if it belongs to this log and is whole; else a new one, in an emptied folder."""
    state = load_state(folder, kind)
    if (
        state is not None
        and not state.is_busy
        and state.read_to <= size_of(log)
        and (state.read_to == 0 or state.head == head_of(log, state.read_to))
    ):
        return state
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return kind()


def save_state(folder: Path, log: Path, state: IndexState) -> None:
    state.head = head_of(log, state.read_to)
    draft = folder / f".{STATE_FILE}"
    draft.write_bytes(msgspec.json.encode(state))
    os.replace(draft, folder / STATE_FILE)
