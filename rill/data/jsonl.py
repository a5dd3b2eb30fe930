"""JSON lines: one row a line. Only line positions are kept; a row is read when it is asked for."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rill.data.base import Split
from rill.data.rows import RowConfig, RowDataset
from rill.errors import DataError


class JsonlDataset(RowDataset):
    class Config(RowConfig):
        type: Literal["jsonl"] = "jsonl"
        path: str
        """A file of JSON lines. Empty lines are skipped."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        super().__init__(config, split)
        self._path = Path(config.path).expanduser()
        if not self._path.is_file():
            raise DataError(f"there is no file {config.path!r} (seen from {Path.cwd()})")
        self._lock = threading.Lock()
        self._file = self._path.open("rb")
        starts, lines, position = [], [], 0
        for line_number, line in enumerate(self._file, start=1):
            if line.strip():
                starts.append(position)
                lines.append(line_number)
            position += len(line)
        self._starts = np.array(starts, dtype=np.int64)
        self._lines = np.array(lines, dtype=np.int64)
        self.index_rows()

    @property
    def title(self) -> str:
        return self._path.stem

    def num_rows(self) -> int:
        return len(self._starts)

    def where(self, number: int) -> str:
        return f"{self._path}, line {self._lines[number]}"

    def row(self, number: int) -> Any:
        with self._lock:
            self._file.seek(int(self._starts[number]))
            line = self._file.readline()
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.where(number)}, column {error.colno}: not JSON: {error.msg}: {line[:60]!r}"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._file = self._path.open("rb")
