"""Data sets of the Hugging Face hub, by name: their parquet or JSON-lines files, fetched into the hub's cache.

    data = { type = "hub", name = "openai/gsm8k", subset = "main", split = "train", answer_after = "####" }

The files of a split are found by their names, as the hub's own viewer finds them. A repository that has its rows in
another form is read from the parquet files that the hub makes of it (its branch refs/convert/parquet).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Literal

from rill.data.base import Split
from rill.data.jsonl import JsonlDataset
from rill.data.parquet import ParquetDataset
from rill.data.rows import SequenceConfig
from rill.errors import DataError
from rill.models.hub import hub_files, hub_folder
from rill.types import Prompt

CONVERTED = "refs/convert/parquet"
ENDINGS = (".parquet", ".jsonl")


class HubDataset:
    class Config(SequenceConfig):
        type: Literal["hub"] = "hub"
        name: str
        """OWNER/NAME, or OWNER/NAME@REVISION (a branch, a tag or a commit)."""
        subset: str = ""
        """Which of its subsets (the hub calls them configurations, too), e.g. "main". Empty: it has one only."""
        split: str = "train"
        """Which of its splits."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        name, files = _found(config)
        folder = hub_folder(name, "dataset", files)
        # Paths of the cache change with every revision; ids of rows should not.
        task = config.task or config.name.partition("@")[0]
        settings = {**config.model_dump(exclude={"type", "name", "subset", "split"}), "task": task}
        paths = [folder / file for file in files]
        self._rows: ParquetDataset | JsonlDataset
        if files[0].endswith(".parquet"):
            rows = ParquetDataset.Config(path=str(folder), **settings)
            self._rows = ParquetDataset(rows, split, paths)
        else:
            self._rows = JsonlDataset(JsonlDataset.Config(path=str(paths[0]), **settings), split)
        (digest,) = self._rows.digests.values()
        self.digests = {config.name: digest}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        return self._rows[index]

    def check_every(self, check: Callable[[Prompt], object]) -> None:
        self._rows.check_every(check)


def _found(config: HubDataset.Config) -> tuple[str, list[str]]:
    """The repository with its revision, and the files of the split there."""
    listed = hub_files(config.name, "dataset")
    if files := files_of(listed, config.subset, config.split):
        return config.name, files
    readable = [file for file in listed if file.endswith(ENDINGS)]
    if not readable and "@" not in config.name:
        converted = f"{config.name}@{CONVERTED}"
        if files := files_of(hub_files(converted, "dataset"), config.subset, config.split):
            return converted, files
    raise DataError(
        f"{config.name} has no files of subset {config.subset!r} and split {config.split!r}; it has "
        f"{', '.join(readable[:8]) or 'no parquet or JSON-lines files'}{' …' if len(readable) > 8 else ''}"
    )


def files_of(listed: list[str], subset: str, split: str) -> list[str]:
    """Those of one kind whose path names the subset and the split: main/train-00000-of-00001.parquet, test.jsonl."""
    named = re.compile(rf"(?:.*[-_.])?{re.escape(split)}(?:[-_.].*)?")
    for ending in ENDINGS:
        files = []
        for file in listed:
            path = PurePosixPath(file)
            is_split = any(named.fullmatch(part) for part in (path.stem, *path.parts[:-1]))
            is_subset = not subset or any(part == subset for part in path.parts[:-1])
            if path.suffix == ending and is_split and is_subset:
                files.append(file)
        subsets = {PurePosixPath(file).parts[0] for file in files if len(PurePosixPath(file).parts) > 1}
        if not subset and len(subsets) > 1:
            raise DataError(f"it has the subsets {', '.join(sorted(subsets))}: set `subset` to one of them")
        if ending == ".jsonl" and len(files) > 1:
            raise DataError(
                f"{', '.join(files)} are several JSON-lines files: fetch them and join them into one"
            )
        if files:
            return sorted(files)
    return []
