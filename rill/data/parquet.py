"""Parquet files, as verl and the Hugging Face hub have them. The one door for pyarrow.

A compressed row cannot be read alone. Each file is therefore unpacked once into the index's folder, as Arrow record
batches that all processes map: a row costs the same wherever it lies, and memory does not grow with the files.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rill.data.base import Split
from rill.data.index import FULL_DISK, RowIndex
from rill.data.rows import RowDataset, SequenceConfig
from rill.errors import DataError
from rill.registry import import_extra

BATCH_ROWS = 1_024
"""Unpacked at a time: what memory has to hold."""
OPEN_FILES = 256
"""Mapped at the same time; others are opened again when they are needed."""


class ParquetDataset(RowDataset):
    class Config(SequenceConfig):
        type: Literal["parquet"] = "parquet"
        path: str
        """A parquet file, or a folder: then every *.parquet below it, in the order of their names."""

    def __init__(self, config: Config, split: Split = Split.TRAIN, files: Sequence[Path] = ()) -> None:
        """`files`: those of the folder that count. Empty: all."""
        super().__init__(config, split)
        self._root = Path(config.path).expanduser()
        found = sorted(self._root.rglob("*.parquet")) if self._root.is_dir() else [self._root]
        self._files = list(files) or found
        if not self._files or not self._files[0].is_file():
            raise DataError(f"there is no parquet file at {config.path!r}")
        index = RowIndex(self._root, self._files, part=list(files))
        sizes = index.array_once("sizes", self._count_rows)
        self._starts: list[int] = [0, *np.cumsum(sizes).tolist()]
        self.index_rows(index)

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
        try:
            table = _unpacked(self._index, file, self._files[file])
            return table.slice(number - self._starts[file], 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(number)}: text that is not UTF-8: {error.object!r:.80}") from None

    def _file_of(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _count_rows(self) -> npt.NDArray[np.int64]:
        return np.array([_num_rows(file) for file in self._files], dtype=np.int64)


@functools.lru_cache(OPEN_FILES)
def _unpacked(index: RowIndex, number: int, file: Path) -> Any:
    """The table of the index's file of that number, mapped; nothing of it is read yet."""
    import pyarrow

    path = index.once(f"{number}.arrow", lambda draft: _unpack(file, draft))
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


@contextmanager
def opened_parquet(path: Path) -> Iterator[Any]:
    """What Arrow finds wrong with the file, now or while it is read, is a DataError."""
    parquet = import_extra("pyarrow.parquet", "parquet files need: pip install pyarrow")
    import pyarrow

    try:
        yield parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:  # where it is unpacked to
            raise
        raise DataError(f"{path} is not a parquet file that can be read: {error}") from error


def read_table(path: Path, columns: Sequence[str] | None = None) -> dict[str, list[Any]]:
    """All rows, by column."""
    with opened_parquet(path) as file:
        table: dict[str, list[Any]] = file.read(columns=columns).to_pydict()
    return table


def _num_rows(path: Path) -> int:
    with opened_parquet(path) as file:
        return int(file.metadata.num_rows)


def _unpack(source: Path, target: Path) -> None:
    import pyarrow

    with (
        opened_parquet(source) as file,
        pyarrow.ipc.new_file(str(target), file.schema_arrow) as writer,
    ):
        for batch in file.iter_batches(BATCH_ROWS):
            writer.write_batch(batch)
