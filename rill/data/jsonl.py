"""JSON lines: one row a line. Line positions are found once and mapped; a row is read when it is asked for."""

from __future__ import annotations

import json
import threading
from array import array
from codecs import BOM_UTF8 as BOM
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rill.data.base import Split
from rill.data.index import RowIndex
from rill.data.rows import RowDataset, SequenceConfig
from rill.errors import DataError


class JsonlDataset(RowDataset):
    class Config(SequenceConfig):
        type: Literal["jsonl"] = "jsonl"
        path: str
        """A file of JSON lines. Empty lines are skipped."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        super().__init__(config, split)
        self._path = Path(config.path).expanduser()
        if self._path.is_dir():
            raise DataError(
                f"{config.path!r} is a folder: name a file of JSON lines in it; for a folder of parquet files set "
                'type = "parquet"'
            )
        if not self._path.is_file():
            raise DataError(f"there is no file {config.path!r} (seen from {Path.cwd()})")
        self._lock = threading.Lock()
        self._file = self._path.open("rb")
        index = RowIndex(self._path, [self._path])
        self._lines = index.array_once("lines", self._scan)
        """int64 [rows, 2]: where the row starts, and the number of its line."""
        if len(self._lines) == 0:
            raise DataError(f"{config.path!r} is empty: it needs one JSON object a line")
        self.index_rows(index)

    @property
    def title(self) -> str:
        return self._path.stem

    def num_rows(self) -> int:
        return len(self._lines)

    def where(self, number: int) -> str:
        return f"{self._path}, line {self._lines[number, 1]}"

    def row(self, number: int) -> Any:
        with self._lock:
            self._file.seek(int(self._lines[number, 0]))
            line = self._file.readline().rstrip(b"\r\n")
        try:
            row = json.loads(line.decode("utf-8"))
            if b"\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode()
            return row
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.where(number)}, column {error.colno}: not JSON: {error.msg}: {line[:60]!r}"
            ) from None
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.where(number)}: not UTF-8 at byte {error.start + 1} of the line: save the file as UTF-8"
            ) from None
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(f"{self.where(number)}: {half!r} is half a character, not text") from None
        except (
            ValueError,
            RecursionError,
        ) as error:  # a number of thousands of digits, thousands of brackets
            raise DataError(f"{self.where(number)}: cannot be read: {error}") from None

    def _scan(self) -> npt.NDArray[np.int64]:
        found, position = array("q"), 0
        with self._path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                mark = len(BOM) if line_number == 1 and line.startswith(BOM) else 0
                if line[mark:].strip():
                    found.extend((position + mark, line_number))
                position += len(line)
        return np.frombuffer(found, dtype=np.int64).reshape(-1, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()
        self._file = self._path.open("rb")
