"""Token logs are removed, file by file, once nobody can need them: every group in a file is trained on or dropped, and
the oldest checkpoint that is kept was taken after that. Called by the driver when a checkpoint is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rill.journal.reader import CONTROLLER, group_of, is_held, segments, stem_of
from rill.journal.records import Event, Experts, Finished, Opened, Segment, Tail
from rill.journal.token_log import FOLDER


class Compaction:
    """Reads every file once, when it is ended."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._groups: dict[Path, set[str]] = {}
        """That an ended file has to do with."""
        self._names: dict[str, dict[int, str]] = {}
        """Groups by sequence number, of each process."""

    def run(self, is_needed: Callable[[str], bool]) -> int:
        """How many files were removed. What a living process writes to stays."""
        paths = segments(self._folder)
        newest = {stem_of(path): path for path in paths}
        num_removed = 0
        for path in paths:
            if path == newest[stem_of(path)] and is_held(path):
                continue
            if path not in self._groups:
                self._groups[path] = self._read(
                    path, Tail.CUT if path == newest[stem_of(path)] else Tail.WHOLE
                )
            if not any(map(is_needed, self._groups[path])):
                path.unlink(missing_ok=True)
                num_removed += 1
        return num_removed

    def _read(self, path: Path, tail: Tail) -> set[str]:
        names = self._names.setdefault(stem_of(path), {})
        groups: set[str] = set()
        segment = Segment(path)
        for record in segment.read(tail):
            match record:
                case Opened():
                    names[record.number] = group_of(record.id)
                    groups.add(names[record.number])
                case Event():
                    groups.add(group_of(record.of))
                case Finished() | Experts():
                    groups.add(names.get(record.number, ""))
                case list():
                    groups.update(names.get(entry.number, "") for entry in record)
        if segment.damages:
            groups.add(CONTROLLER)  # kept, to be looked at: whose the lost records were is not known
        return groups
