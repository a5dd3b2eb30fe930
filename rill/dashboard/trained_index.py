"""The index of one log of trained samples: where a sample's record lies, by its id.

Written by the indexer, read by `rollouts`, which adds what the trainer knows of a group's tokens to what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rill.dashboard.index_state import IndexState, load_state, save_state, state_to_go_on_with
from rill.dashboard.log_reader import new_blocks, size_of
from rill.dashboard.rollout_index import id_code
from rill.dashboard.table import Table, read_range

SAMPLE = np.dtype([("id", "<u8"), ("offset", "<u8"), ("length", "<u4")])


class TrainedState(IndexState, kw_only=True):
    num_samples: int = 0


class _Record(msgspec.Struct):
    id: str


_decoder = msgspec.json.Decoder(_Record)


class TrainedIndexer:
    """Brings the index of one log up to date."""

    def __init__(self, log: Path, folder: Path) -> None:
        self.log = log
        self.folder = folder
        self.state = state_to_go_on_with(folder, log, TrainedState)
        self._samples = Table(folder / "samples.bin", SAMPLE, self.state.num_samples, is_writer=True)

    def update(self) -> Iterable[int]:
        """Index what was appended; yields the bytes done after each block."""
        if self.state.read_to > size_of(self.log):
            raise ValueError(f"{self.log} was cut")
        for block in new_blocks(self.log, self.state.read_to):
            rows = []
            for offset, line in block.lines:
                try:
                    rows.append((id_code(_decoder.decode(line).id), offset, len(line)))
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
            self._samples.append(np.array(rows, dtype=SAMPLE))
            self.state.num_samples = self._samples.num_rows
            self.state.read_to = block.read_to
            save_state(self.folder, self.log, self.state)
            yield block.read_to


class TrainedIndex:
    """One log's index, as a reader sees it at one moment."""

    def __init__(self, log: Path, folder: Path, state: TrainedState) -> None:
        self.log = log
        self._samples = Table(folder / "samples.bin", SAMPLE, state.num_samples)

    @classmethod
    def open(cls, log: Path, folder: Path) -> TrainedIndex | None:
        state = load_state(folder, TrainedState)
        return None if state is None else cls(log, folder, state)

    def find(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The newest record of each sample that has one: a resumed run may have trained on it twice."""
        rows = self._samples.read()
        found: dict[str, dict[str, Any]] = {}
        for name in ids:
            places = np.flatnonzero(rows["id"] == np.uint64(id_code(name)))
            if len(places):
                row = rows[places[-1]]
                line = read_range(self.log, int(row["offset"]), int(row["length"]))
                try:
                    found[name] = msgspec.json.decode(line, type=dict[str, Any])
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
        return found
