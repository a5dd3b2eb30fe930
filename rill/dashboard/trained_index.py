"""The index of one log of trained samples: where a sample's record lies, by its id.

Written by the indexer, read by `rollouts`, which adds what the trainer knows of a group's tokens to what was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rill.dashboard.log_index import IndexState, LogIndex
from rill.dashboard.log_reader import Block
from rill.dashboard.rollout_index import id_code
from rill.dashboard.table import read_range

SAMPLE = np.dtype([("id", "<u8"), ("offset", "<u8"), ("length", "<u4")])


class _Record(msgspec.Struct):
    id: str


_decoder = msgspec.json.Decoder(_Record)


class TrainedIndex(LogIndex[IndexState]):
    state_type = IndexState

    def __init__(self, log: Path, folder: Path, state: IndexState, *, is_writer: bool = False) -> None:
        super().__init__(log, folder, state, is_writer=is_writer)
        self._samples = self._table("samples", SAMPLE)

    def add(self, block: Block) -> None:
        rows = []
        for offset, line in block.lines:
            try:
                rows.append((id_code(_decoder.decode(line).id), offset, len(line)))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
        self._samples.append(np.array(rows, dtype=SAMPLE))

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
