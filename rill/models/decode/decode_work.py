"""The work of decode attention as a list: long contexts cut into pieces that run side by side.

    contexts   A ████████████████████ 2,300     B ██ 130     C ████ 400
    list       C0  A0 A1 A2 A3 A4 A5 A6 A7  A8  B0               most tokens first

By default the cut depends on a row's own length alone, so that a row's sums run in the same order whatever the batch.
With a `piece` for all rows, which `spread` gives, a batch of little work is cut finer and keeps the whole device busy.

Rows that begin with the same blocks (the samples of one prompt) are read together there: their common pieces are a
list of their own, with all rows of a group to an entry, and come before each row's pieces (`shared_work`).

    contexts   A ▒▒▒▒▒▒▒▒▒▒▒▒ ███      B ▒▒▒▒▒▒▒▒▒▒▒▒ █      C ▒▒▒▒▒▒▒▒▒▒▒▒ ██
    shared     ABC0  ABC1  ABC2        own   A3  B3  C3

Made on the host by rill.inference.native, read by rill.models.ops.triton_decode and cuda_decode.

Axes: B row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

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
"""Of one entry of the list: row (or group), piece, pieces of its own, row of the block tables, first token, end,
context length, pieces that it shares and that come before its own."""
GROUP_ROWS = 16
"""Rows that are read together; of a larger group so many at a time."""
MIN_ROWS, MIN_SHARED = 4, 512
"""Fewer rows, or fewer tokens, are not worth a launch."""


class Run(NamedTuple):
    """Rows whose parts the buffers hold at one time, and what the list says of them."""

    first_row: int
    num_rows: int
    first_entry: int
    num_entries: int


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """A list on the device."""

    entries: Tensor  # int32 [entries, WORDS]; an entry of zeros is no work
    runs: tuple[Run, ...]
    pieces: Tensor | None  # int32 [rows]: that are to be joined; None: every row is one
    members: Tensor | None = None  # int32 [groups, GROUP_ROWS]; -1: none
    shared: Tensor | None = None  # int32 [entries, WORDS] of groups, as many as are launched
    num_new: int | None = None
    """At most so many of a row's last tokens are written in this step. None: any may be."""


@dataclass(frozen=True, slots=True)
class SharedWork:
    """What the rows of groups have in common."""

    tokens_B: Array
    """How many leading tokens of each row are read with others. 0: none."""
    members: Array
    entries: Array


def spread(lengths_B: Array, num_entries: int) -> int | None:
    """Tokens in a piece with which these contexts are about num_entries of them; None: they are as many as it is."""
    if len(lengths_B) >= num_entries:
        return None
    piece = -(-int(lengths_B.sum()) // (num_entries * TILE)) * TILE
    return piece if piece <= PIECE else None


def shared_work(lengths_B: Array, table_rows_B: Array, prefixes_B: Array, keys_B: Array) -> SharedWork | None:
    """prefixes_B: tokens, whole blocks, that a row has in common with all rows of the same key. None: no groups."""
    candidates = np.flatnonzero((prefixes_B >= MIN_SHARED) & (prefixes_B < lengths_B))
    order = candidates[np.argsort(keys_B[candidates], kind="stable")]
    _, starts, counts = np.unique(keys_B[order], return_index=True, return_counts=True)
    groups = [
        order[at : min(at + GROUP_ROWS, start + count)]
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        if count >= MIN_ROWS
        for at in range(start, start + count, GROUP_ROWS)
        if start + count - at >= MIN_ROWS
    ]
    if not groups:
        return None
    firsts = np.array([rows[0] for rows in groups])
    tokens_B, tokens_G = np.zeros_like(lengths_B), prefixes_B[firsts]
    members: Array = np.full((len(groups), GROUP_ROWS), -1, dtype=np.int32)
    for index, rows in enumerate(groups):
        members[index, : len(rows)] = rows
        tokens_B[rows] = tokens_G[index]
    entries = _entries(tokens_G, table_rows_B[firsts], _shared_sizes(tokens_G), np.zeros_like(tokens_G))
    return SharedWork(tokens_B, members, entries)


def work_list(
    lengths_B: Array, table_rows_B: Array, piece: int | None = None, shared_B: Array | None = None
) -> Array:
    """[entries, WORDS], for every piece of every row, those with most tokens first; shared_B: SharedWork.tokens_B."""
    shared = np.zeros_like(lengths_B) if shared_B is None else shared_B
    lengths = lengths_B.astype(np.int64) - shared
    most = np.where(shared > 0, MAX_OWN_PIECES, MAX_OWN_PIECES if piece is None else MAX_PIECES)
    least = -(-lengths // (most * TILE)) * TILE
    sizes = np.maximum(PIECE if piece is None else piece, least)
    if piece is None:
        sizes[lengths <= LONG] = WHOLE
    return _entries(lengths, table_rows_B, sizes, shared)


def _shared_sizes(tokens: Array) -> Array:
    """Of the pieces of a group's tokens: at most MAX_OWN_PIECES of them."""
    sizes: Array = np.maximum(PIECE, -(-tokens // (MAX_OWN_PIECES * TILE)) * TILE)
    return sizes


def _entries(
    lengths: npt.NDArray[np.integer[Any]], tables: Array, sizes: npt.NDArray[np.integer[Any]], before: Array
) -> Array:
    """Pieces of `lengths` tokens each, that come after `before` tokens which are read with others."""
    counts = -(-lengths // sizes)
    rows = np.repeat(np.arange(len(counts)), counts)
    pieces = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = pieces * sizes[rows]
    ends = np.minimum(begins + sizes[rows], lengths[rows])
    num_shared = -(-before // _shared_sizes(before))
    words: Array = np.zeros((len(rows), WORDS), dtype=np.int32)
    words[:, 0] = rows
    words[:, 1] = pieces + num_shared[rows]
    words[:, 2] = counts[rows]
    words[:, 3] = tables[rows]
    words[:, 4] = begins + before[rows]
    words[:, 5] = ends + before[rows]
    words[:, 6] = (lengths + before)[rows]
    words[:, 7] = num_shared[rows]
    return words[np.argsort(begins - ends, kind="stable")]


def pieces_of(entries: Array, num_rows: int) -> Array:
    """[rows]: how many pieces each is made of, those that it shares included."""
    pieces: Array = np.zeros(num_rows, dtype=np.int32)
    pieces[entries[:, 0]] = entries[:, 2] + entries[:, 7]
    return pieces


def work_in_runs(
    lengths_B: Array, table_rows_B: Array, max_rows: int
) -> tuple[Array, Array, tuple[Run, ...]]:
    """The list for any number of rows, each row's pieces, and the runs of it that belong to max_rows rows each."""
    lists: list[Array] = [np.zeros((0, WORDS), dtype=np.int32)]
    runs: list[Run] = []
    num_entries = 0
    for start in range(0, len(lengths_B), max_rows):
        lengths = lengths_B[start : start + max_rows]
        part = work_list(lengths, table_rows_B[start : start + max_rows])
        part[:, 0] += start
        lists.append(part)
        runs.append(Run(start, len(lengths), num_entries, len(part)))
        num_entries += len(part)
    entries = np.concatenate(lists)
    return entries, pieces_of(entries, len(lengths_B)), tuple(runs)
