"""Hugging Face `datasets` folders, as save_to_disk writes them. The one door for datasets.

Folders of plain parquet files (hub snapshots) are read by the parquet dataset.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from rill.data.base import Split
from rill.data.index import RowIndex
from rill.data.rows import RowDataset, SequenceConfig
from rill.errors import DataError
from rill.registry import import_extra


class FolderDataset(RowDataset):
    class Config(SequenceConfig):
        type: Literal["folder"] = "folder"
        path: str
        """A folder written by Dataset.save_to_disk or DatasetDict.save_to_disk."""
        subset: str = ""
        """Which entry of a DatasetDict, e.g. "train". Empty: the folder holds a single dataset."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        super().__init__(config, split)
        self._path = Path(config.path).expanduser()
        self._subset = config.subset
        self._rows = _load(self._path, config.subset)
        files = sorted(path for path in self._path.rglob("*") if path.is_file())
        self.index_rows(RowIndex(self._path, files))

    @property
    def title(self) -> str:
        return f"{self._path.name}/{self._subset}" if self._subset else self._path.name

    def num_rows(self) -> int:
        return len(self._rows)

    def where(self, number: int) -> str:
        return f"{self._path}{f', {self._subset}' if self._subset else ''}, row {number + 1}"

    def row(self, number: int) -> Any:
        return self._rows[number]


def _load(path: Path, subset: str) -> Any:
    datasets = import_extra("datasets", "Hugging Face dataset folders need: pip install datasets")
    if not path.is_dir():
        raise DataError(f"there is no folder {str(path)!r}")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{path} was not written by save_to_disk: {error}") from error
    if not isinstance(loaded, datasets.DatasetDict):
        if subset:
            raise DataError(f"{path} holds a single dataset: remove `subset` = {subset!r}")
        return loaded
    if subset not in loaded:
        raise DataError(f"{path} holds {', '.join(loaded)}: set `subset` to one of them, got {subset!r}")
    return loaded[subset]
