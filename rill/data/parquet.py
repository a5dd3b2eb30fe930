"""Parquet files, as verl and the Hugging Face hub have them. The one door for pyarrow."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any, Literal

from rill.data.base import Split
from rill.data.rows import RowConfig, RowDataset
from rill.errors import DataError, MissingExtraError


class ParquetDataset(RowDataset):
    class Config(RowConfig):
        type: Literal["parquet"] = "parquet"
        path: str
        """A parquet file, or a folder: then every *.parquet below it, in the order of their names."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        super().__init__(config, split)
        self._root = Path(config.path).expanduser()
        self._files = sorted(self._root.rglob("*.parquet")) if self._root.is_dir() else [self._root]
        if not self._files or not self._files[0].is_file():
            raise DataError(f"there is no parquet file at {config.path!r}")
        self._tables = [_read(file) for file in self._files]
        self._starts = [0]
        for table in self._tables:
            self._starts.append(self._starts[-1] + table.num_rows)
        self.index_rows()

    @property
    def title(self) -> str:
        return self._root.stem

    def num_rows(self) -> int:
        return self._starts[-1]

    def where(self, number: int) -> str:
        file = self._file_of(number)
        return f"{self._files[file]}, row {number - self._starts[file] + 1}"

    def row(self, number: int) -> Any:
        file = self._file_of(number)
        return self._tables[file].slice(number - self._starts[file], 1).to_pylist()[0]

    def _file_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1


def _read(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError("parquet files need: pip install pyarrow") from error
    try:
        return pyarrow.parquet.read_table(path, memory_map=True)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from error
