"""Sets of ways to run a part of the workflow, none of them beaten in every respect by another.

A way is a row: the devices of each kind that it takes, the seconds a chunk needs to pass (latency), the seconds
between chunks (interval), the share of a device's memory that it fills, and the seconds to take it off the devices
and put it back (swap). `search` puts rows together; `Frontier.best` drops the beaten ones, which is what keeps an exact
search small. A row remembers what it was made of, so that a plan can be read back from the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

LATENCY, INTERVAL, MEMORY, SWAP, MIX, DEVICES = range(6)
"""Columns of a frontier's table; one for each kind of device from DEVICES on."""

_MAX_PAIRS = 1_000_000
_FEW_ROWS = 128
_BLOCK = 256


class Op(IntEnum):
    """How a row was made."""

    STAGE = 0
    """One worker on devices of its own."""
    SERIES = 1
    """Two parts on different devices, the second fed by the first: a pipeline."""
    PARALLEL = 2
    """Two parts on different devices that do not feed each other."""
    TURNS = 3
    """Two parts on the same devices, one after the other, each leaving the memory to the other."""
    TOGETHER = 4
    """Two parts on the same devices, one after the other, both staying in memory."""
    FINER = 5
    """A chunk passed through in smaller chunks."""


@dataclass(frozen=True, eq=False)
class Source:
    """What a stretch of rows was made of: `left` and `right` of a row point into these frontiers."""

    op: Op
    left: Frontier | None = None
    right: Frontier | None = None
    parts: tuple[int, int] = (0, 0)
    """The nodes of each, as a set of bits."""
    chunk: int = 0
    """Items that pass through them at a time."""


@dataclass(frozen=True, eq=False)
class Frontier:
    """A table with a row for each way. Columns: latency, interval, memory, swap, mix, then devices of each kind.

    `mix` keeps ways of different modes apart: rows beat each other only where it is equal. The search for a hybrid plan
    uses it; elsewhere it is 0.
    """

    table: Floats
    sources: tuple[Source, ...]
    source: Ints
    left: Ints
    right: Ints

    def __len__(self) -> int:
        return len(self.table)

    @classmethod
    def of(
        cls, table: Floats, source: Source, left: Ints | None = None, right: Ints | None = None
    ) -> Frontier:
        zeros = np.zeros(len(table), np.int64)
        rows = np.arange(len(table)) if left is None else left
        return cls(table, (source,), zeros, rows, zeros if right is None else right)

    @classmethod
    def union(cls, parts: Sequence[Frontier], num_kinds: int) -> Frontier:
        if not parts:
            empty = np.zeros(0, np.int64)
            return cls(np.zeros((0, DEVICES + num_kinds)), (), empty, empty, empty)
        if len(parts) == 1:
            return parts[0]
        sources: list[Source] = []
        numbers = []
        for part in parts:
            numbers.append(part.source + len(sources))
            sources.extend(part.sources)
        left, right = np.concatenate([p.left for p in parts]), np.concatenate([p.right for p in parts])
        return cls(
            np.concatenate([p.table for p in parts]), tuple(sources), np.concatenate(numbers), left, right
        )

    @property
    def latency(self) -> Floats:
        return self.table[:, LATENCY]

    @property
    def interval(self) -> Floats:
        return self.table[:, INTERVAL]

    @property
    def memory(self) -> Floats:
        return self.table[:, MEMORY]

    @property
    def devices(self) -> Floats:
        return self.table[:, DEVICES:]

    def rows(self, keep: Ints | Bools | slice) -> Frontier:
        return Frontier(self.table[keep], self.sources, self.source[keep], self.left[keep], self.right[keep])

    def without(self, *ops: Op) -> Frontier:
        is_out = np.array([source.op in ops for source in self.sources], np.bool_)
        return self.rows(~is_out[self.source]) if is_out.any() else self

    def best(self) -> Frontier:
        """Only rows that no other row equals or beats in everything; of equal rows, one."""
        return self.rows(_unbeaten(self.table))

    def best_for(self, op: Op) -> Frontier:
        """The same for use in `op`: parts that share devices wait for each other, so their intervals do not count, and
        where they take turns the swap is part of the latency."""
        if op not in (Op.TURNS, Op.TOGETHER):
            return self
        table = self.table.copy()
        table[:, INTERVAL] = 0.0
        if op is Op.TURNS:
            table[:, LATENCY] += table[:, SWAP]
            table[:, SWAP] = 0.0
        return self.rows(_unbeaten(table))


Combine: TypeAlias = Callable[[Floats, Floats], tuple[Floats, Ints, Ints]]
"""All possible pairs of rows of two tables: the new rows, and which row of each they are made of."""


def product(source: Source, combine: Combine) -> Frontier:
    """Every possible pair of rows of a source's two frontiers, in pieces that fit in memory; beaten rows are dropped
    where they are many: the caller drops the others once it has all."""
    left, right = source.left, source.right
    assert left is not None and right is not None
    found: list[Frontier] = []
    step = max(1, _MAX_PAIRS // max(1, len(right)))
    for start in range(0, len(left) if len(right) else 0, step):
        table, a, b = combine(left.table[start : start + step], right.table)
        if len(table):
            made = Frontier.of(table, source, a + start, b)
            found.append(made.best() if len(table) > _FEW_ROWS else made)
    return Frontier.union(found, left.table.shape[1] - DEVICES)


def _unbeaten(table: Floats) -> Ints:
    if len(table) <= 1:
        return np.arange(len(table))
    varies = (table[1:] != table[0]).any(axis=0)  # a column that is the same everywhere says nothing
    varies[INTERVAL] &= bool((table[:, INTERVAL] != table[:, LATENCY]).any())
    columns = [table[:, c] for c in np.flatnonzero(varies) if c != LATENCY]
    return undominated([*columns, -table[:, MIX]] if varies[MIX] else columns, table[:, LATENCY])


def undominated(axes: Sequence[Floats], value: Floats) -> Ints:
    """Indices of the rows for which no other row is at most as large on every axis and in value."""
    return _undominated_in_order(axes[0], value) if len(axes) == 1 else _undominated_in_blocks(axes, value)


def _undominated_in_order(axis: Floats, value: Floats) -> Ints:
    """Along one axis: a row stays if its value is less than all before it."""
    order = np.lexsort((value, axis))
    ordered = value[order]
    is_kept = np.ones(len(order), np.bool_)
    is_kept[1:] = ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    return np.sort(order[is_kept])


def _undominated_in_blocks(axes: Sequence[Floats], value: Floats) -> Ints:
    """Along several, by comparison with what was kept so far: in lexical order, where only rows before one beat it."""
    columns = np.stack([*axes, value])
    order = np.lexsort(columns)
    columns = columns[:, order]
    is_new = np.ones(len(order), np.bool_)
    is_new[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)  # equal rows lie side by side
    columns, order = columns[:, is_new], order[is_new]
    kept = np.zeros(0, np.int64)
    for start in range(0, len(order), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(order)))
        block = block[~_is_beaten(columns[:, block], columns[:, kept])]
        rivals = columns[:, block]
        kept = np.concatenate([kept, block[~_is_beaten(rivals, rivals, are_same=True)]])
    return np.sort(order[kept])


def _is_beaten(rows: Floats, rivals: Floats, are_same: bool = False) -> Bools:
    is_below = np.ones((rows.shape[1], rivals.shape[1]), np.bool_)
    for mine, its in zip(rows, rivals):
        is_below &= its[None, :] <= mine[:, None]
    if are_same:
        np.fill_diagonal(is_below, False)
    return np.asarray(is_below.any(axis=1), np.bool_)
