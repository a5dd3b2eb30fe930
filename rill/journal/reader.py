"""What the token log holds of a group: for whoever takes it up after the process that had it.

    a task or request is begun ──▶ is its group in a file of a process that is gone?  no ──▶ nothing to look for
                                                        │ yes
                                                        ▼
                       all files, as far as they are written ──▶ the group's sequences and events

Attempts at one sequence are put together in the order in which they began: each stands behind the tokens that it was
continued from (`base`). So what is found never depends on how long an attempt became, and no answer is preferred for
being short. Files that live processes write are read only when something of theirs may be needed; each byte once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rill.journal.records import Entry, Event, Experts, Finished, Lost, Opened, Segment, Tail
from rill.journal.token_log import FOLDER, SUFFIX
from rill.types import Floats, Ints, StopReason, TokenIds

Needed = Callable[[str], bool]
"""Whether a group is."""
CONTROLLER = "controller"
BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSequence:
    """The tokens of one answer as far as they are known."""

    token_ids: TokenIds
    logprobs: Floats
    versions: Ints
    reason: StopReason | None = None
    """None, or ABORTED: it was under way."""
    stop_text: str | None = None
    experts_TLK: Any = None
    began_s: float = 0.0
    """When the newest attempt at it began."""

    @property
    def is_finished(self) -> bool:
        return self.reason is not None and self.reason is not StopReason.ABORTED


@dataclass(slots=True)
class _Attempt:
    opened: Opened
    entries: list[Entry] = field(default_factory=list)
    finished: Finished | None = None
    experts: Any = None


class _Writer:
    """The files of one process, in order."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.is_gone = False
        self._segments: list[Segment] = []
        self._by_number: dict[int, _Attempt] = {}
        self.attempts: dict[str, list[_Attempt]] = {}
        """By sequence id."""
        self.events: dict[str, list[Event]] = {}
        """By whom they are of."""
        self.ids: dict[str, set[str]] = {}
        """Of sequences, and of whom events are, by group."""

    def add(self, path: Path) -> None:
        self._segments.append(Segment(path))

    @property
    def newest(self) -> Path:
        return self._segments[-1].path

    def damages(self) -> list[str]:
        return [f"{segment.path.name}: {damage}" for segment in self._segments for damage in segment.damages]

    def read(self, is_needed: Needed) -> None:
        """What was written since the last time, of groups that are needed."""
        for segment in self._segments:
            is_last = segment is self._segments[-1]
            tail = Tail.WHOLE if not is_last else Tail.CUT if self.is_gone else Tail.GROWING
            for record in segment.read(tail):
                self._take(record, is_needed)

    def _take(self, record: Any, is_needed: Needed) -> None:
        match record:
            case Opened() if is_needed(group_of(record.id)):
                attempt = _Attempt(record)
                self._by_number[record.number] = attempt
                self.attempts.setdefault(record.id, []).append(attempt)
                self.ids.setdefault(group_of(record.id), set()).add(record.id)
            case Finished() if record.number in self._by_number:
                self._by_number[record.number].finished = record
            case Experts() if record.number in self._by_number:
                self._by_number[record.number].experts = record.experts_TLK
            case Event() if is_needed(group_of(record.of)):
                self.events.setdefault(record.of, []).append(record)
                self.ids.setdefault(group_of(record.of), set()).add(record.of)
            case Lost():  # what was begun before takes no token from behind a gap
                self._by_number.clear()
            case list():
                for entry in record:
                    if (found := self._by_number.get(entry.number)) is not None:
                        copied = entry._replace(
                            token_ids=entry.token_ids.copy(), logprobs=entry.logprobs.copy()
                        )  # a view would keep the whole file in memory
                        found.entries.append(copied)


class LogReader:
    """All token logs of a run. Not thread-safe: one to a thread."""

    def __init__(self, run_dir: Path, find_needed: Callable[[], Needed | None] = lambda: None) -> None:
        """`find_needed`: asked when files are read, for what need not be kept in memory. None: everything is kept."""
        self.folder = run_dir / FOLDER
        self._find_needed = find_needed
        self._writers: dict[str, _Writer] = {}
        self._known: set[str] = set()

    def left_of(self, groups: Iterable[str]) -> set[str]:
        """The groups with which a process that is gone had to do: then look for them. Costs a listing of the folder,
        however many they are."""
        for writer in self._find_gone():
            writer.read(self._find_needed() or _everything)
        gone = [writer for writer in self._writers.values() if writer.is_gone]
        return {group for group in groups if any(group in writer.ids for writer in gone)}

    def has_left(self, group: str) -> bool:
        return bool(self.left_of([group]))

    def read_all(self) -> None:
        """Everything that is written by now, of the living too."""
        gone = self._find_gone()
        is_needed = self._find_needed() or _everything
        for writer in self._writers.values():
            if not writer.is_gone or writer in gone:
                writer.read(is_needed)

    def sequence(self, sequence_id: str) -> LoggedSequence | None:
        """As far as `read_all` has read; None where nothing of it is known."""
        found = [a for writer in self._writers.values() for a in writer.attempts.get(sequence_id, ())]
        return joined(sorted(found, key=lambda attempt: attempt.opened.time_s)) if found else None

    def sequences(self) -> Iterator[tuple[str, LoggedSequence]]:
        for sequence_id in sorted({name for w in self._writers.values() for name in w.attempts}):
            found = self.sequence(sequence_id)
            assert found is not None
            yield sequence_id, found

    def events(self, of: str) -> dict[str, Any]:
        """The last value of each key."""
        writers = sorted(self._writers.values(), key=lambda writer: began_ns(writer.stem))
        return {event.key: event.value for writer in writers for event in writer.events.get(of, ())}

    def names(self, group: str) -> set[str]:
        """Sequences, and whoever has events, of a group."""
        return {name for writer in self._writers.values() for name in writer.ids.get(group, ())}

    def batches(self) -> dict[int, list[int]]:
        """The groups of each step's batch, as the controller chose them."""
        found = self.events(CONTROLLER)
        return {
            int(key.removeprefix(f"{BATCH}/")): value
            for key, value in found.items()
            if key.startswith(f"{BATCH}/")
        }

    def damages(self) -> list[str]:
        return [line for writer in self._writers.values() for line in writer.damages()]

    def _find_gone(self) -> list[_Writer]:
        """Those that are found to be gone now. One that lives may have gone on to its next file meanwhile."""
        self._list()
        quiet = [(w, w.newest) for w in self._writers.values() if not w.is_gone and not is_held(w.newest)]
        if quiet:
            self._list()
        gone = [writer for writer, newest in quiet if writer.newest == newest]
        for writer in gone:
            writer.is_gone = True
        return gone

    def _list(self) -> None:
        for path in segments(self.folder):
            if path.name in self._known:
                continue
            self._known.add(path.name)
            stem = stem_of(path)
            writer = self._writers.setdefault(stem, _Writer(stem))
            writer.add(path)


def joined(attempts: list[_Attempt]) -> LoggedSequence:
    """Attempts at one sequence, in the order in which they began. One that stands behind tokens which nobody wrote down
    is left out, and so is one that has lost some of its own: a file of it is missing."""
    tokens, logprobs, versions = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)
    last: _Attempt | None = None
    for attempt in attempts:
        base, entries, end = attempt.opened.base, attempt.entries, attempt.finished
        rest = () if end is None else (end,)
        num_found = sum(len(part.token_ids) for part in (*entries, *rest))
        if base > len(tokens) or (end is not None and num_found < end.num_tokens):
            continue
        tokens = np.concatenate([tokens[:base], *(part.token_ids for part in (*entries, *rest))])
        logprobs = np.concatenate([logprobs[:base], *(part.logprobs for part in (*entries, *rest))])
        made_by = [np.full(len(entry.token_ids), entry.version, np.int32) for entry in entries]
        versions = np.concatenate([versions[:base], *made_by, *(part.versions for part in rest)])
        last = attempt
    finished = None if last is None else last.finished
    if finished is not None and last is not None:
        # A stop string may have taken the end of what was sampled back.
        num_whole = last.opened.base + finished.num_tokens
        tokens, logprobs, versions = tokens[:num_whole], logprobs[:num_whole], versions[:num_whole]
    return LoggedSequence(
        token_ids=tokens,
        logprobs=logprobs,
        versions=versions,
        reason=None if finished is None else finished.reason,
        stop_text=None if finished is None else finished.stop_text,
        experts_TLK=None if last is None or last.opened.base else last.experts,
        began_s=attempts[-1].opened.time_s,
    )


def _everything(group: str) -> bool:
    return True


def is_held(path: Path) -> bool:
    """Whether a living process writes to the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # it cannot be looked at now: whoever lives must not be taken for dead
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)
    return False


def segments(folder: Path) -> list[Path]:
    """All files, those of one process in order."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX)
    except FileNotFoundError:
        return []


def stem_of(path: Path) -> str:
    return path.stem.rpartition("-")[0]


def began_ns(stem: str) -> int:
    """When the process began them."""
    return int(stem.rsplit("-", 2)[1], 16)


def group_of(sequence_id: str) -> str:
    """g00000007 of "g00000007/1#policy/5f0c"."""
    return sequence_id.partition("/")[0]
