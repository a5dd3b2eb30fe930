"""The work of decode attention as a list: long contexts cut into pieces that run side by side.

    contexts   A ████████████████████ 2,300     B ██ 130     C ████ 400
    list       C0  A0 A1 A2 A3 A4 A5 A6 A7  A8  B0               most tokens first

By default the cut depends on a row's own length alone, so that a row's sums run in the same order whatever the batch.
With a `piece` for all rows, which `spread` gives, a batch of little work is cut finer and keeps the whole device busy.
Made on the host by rill.inference.native, read by rill.models.ops.triton_decode.

Axes: B row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.int32]

TILE = 64
"""Tokens that a program reads at a time; pieces are whole tiles."""
WHOLE = 512
"""Tokens of the longest context that is one piece, and of a piece where a few are enough."""
LONG = 1536
PIECE = 256
"""Tokens in a piece of contexts above LONG: they are what is left in the end, when few programs have work."""
MAX_OWN_PIECES = 16
MAX_PIECES = 32
"""Of a row, by its own length alone and at all."""
WORDS = 8
"""Of one entry of the list: row, piece, pieces, row of the block tables, first token, end, context length, spare."""


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A list on the device."""

    entries: torch.Tensor  # int32 [entries, WORDS]; an entry of zeros is no work
    runs: tuple[tuple[int, int, int], ...]
    """(first row, first entry, number of entries), one launch each: buffers hold so many rows at a time."""


def spread(lengths_B: Array, num_entries: int) -> int | None:
    """Tokens in a piece with which these contexts are about num_entries of them; None: they are more as it is."""
    piece = -(-int(lengths_B.sum()) // (num_entries * TILE)) * TILE
    return piece if piece <= PIECE else None


def work_list(lengths_B: Array, table_rows_B: Array, piece: int | None = None) -> Array:
    """[entries, WORDS], for every piece of every row, those with most tokens first."""
    lengths = lengths_B.astype(np.int64)
    if piece is None:
        sizes = np.maximum(PIECE, -(-lengths // (MAX_OWN_PIECES * TILE)) * TILE)
        sizes[lengths <= LONG] = WHOLE
    else:
        sizes = np.maximum(piece, -(-lengths // (MAX_PIECES * TILE)) * TILE)
    counts = -(-lengths // sizes)
    rows = np.repeat(np.arange(len(counts)), counts)
    pieces = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = pieces * sizes[rows]
    ends = np.minimum(begins + sizes[rows], lengths[rows])
    words: Array = np.zeros((len(rows), WORDS), dtype=np.int32)
    words[:, 0] = rows
    words[:, 1] = pieces
    words[:, 2] = counts[rows]
    words[:, 3] = table_rows_B[rows]
    words[:, 4] = begins
    words[:, 5] = ends
    words[:, 6] = lengths[rows]
    return words[np.argsort(begins - ends, kind="stable")]


def work_in_runs(
    lengths_B: Array, table_rows_B: Array, max_rows: int
) -> tuple[Array, tuple[tuple[int, int, int], ...]]:
    """The list for any number of rows, and the runs of it that belong to max_rows rows each."""
    lists: list[Array] = [np.zeros((0, WORDS), dtype=np.int32)]
    runs: list[tuple[int, int, int]] = []
    num_entries = 0
    for start in range(0, len(lengths_B), max_rows):
        part = work_list(lengths_B[start : start + max_rows], table_rows_B[start : start + max_rows])
        part[:, 0] += start
        lists.append(part)
        runs.append((start, num_entries, len(part)))
        num_entries += len(part)
    return np.concatenate(lists), tuple(runs)
