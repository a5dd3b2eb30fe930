"""A run's figures by name, kept up to date by reading only what its metrics file has gained.

The server has one FollowedFigures for a run and several threads that ask it; each gets the Figures of its moment, which
do not change while it looks at them. Resumed runs' rewinds are followed; a file that was cut or replaced is read again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from rill.dashboard.log_reader import head_of, new_blocks, size_of
from rill.telemetry.metrics import METRICS_FILE, MetricRecord, MetricRow, mean, rows_with

MAX_POINTS = 4000
"""A longer curve is averaged down to so many points."""


_decoder = msgspec.json.Decoder(MetricRecord)


@dataclass(frozen=True, kw_only=True)
class Figures:
    rows: Sequence[MetricRow] = ()
    """In order of steps."""
    version: int = 0
    """Grows with the file."""

    def last(self, name: str) -> float | None:
        """Of the latest step that has it as a number: the loss of a step that was skipped is none."""
        values = (row.values.get(name, math.nan) for row in reversed(self.rows))
        return next(filter(math.isfinite, values), None)

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]

    @property
    def last_time_s(self) -> float:
        return max((row.time_s for row in self.rows), default=0.0)

    def total(self, name: str) -> float:
        return sum(row.values.get(name, 0.0) for row in self.rows)

    @cached_property
    def columns(self) -> dict[str, Any]:
        """{name: {x: steps, y: values}} with times of the steps beside; steps that many names share stand once."""
        series: dict[str, tuple[list[int], list[float]]] = {}
        for row in self.rows:
            for name, value in row.values.items():
                x, y = series.setdefault(name, ([], []))
                x.append(row.step)
                y.append(value)
        shared: dict[tuple[float, ...], int] = {}
        out = {}
        for name, (x, y) in sorted(series.items()):
            xs, ys = thinned(x, y)
            out[name] = {"x": shared.setdefault(tuple(xs), len(shared)), "y": [written(v) for v in ys]}
        timed = self.rows[:: len(self.rows) // (MAX_POINTS + 1) + 1]
        return {
            "version": self.version,
            "x": [list(xs) for xs in shared],
            "series": out,
            "steps": [row.step for row in timed],
            "times": [round(row.time_s, 1) for row in timed],
        }


class FollowedFigures:
    """The figures of a file that grows."""

    def __init__(self, run: Path) -> None:
        self._path = run / METRICS_FILE
        self._head = ""
        self._rows: dict[int, MetricRow] = {}
        self._figures = Figures()
        self._reading = threading.Lock()

    def now(self) -> Figures:
        with self._reading:
            if not self._path.is_symlink() and self._path.is_file():
                self._read()
            return self._figures

    def _read(self) -> None:
        read_to = self._figures.version
        if read_to > size_of(self._path) or self._head != head_of(self._path, read_to):
            read_to, self._rows, self._figures = 0, {}, Figures()
        for block in new_blocks(self._path, read_to):
            for _, line in block.lines:
                try:
                    self._rows = rows_with(self._rows, _decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue  # a damaged line, or one of another version of rill
            read_to = block.read_to
        self._head = head_of(self._path, read_to)
        if read_to != self._figures.version:
            self._figures = Figures(rows=[self._rows[step] for step in sorted(self._rows)], version=read_to)


def thinned(x: list[int], y: list[float], most: int = MAX_POINTS) -> tuple[list[float], list[float]]:
    """At most so many points, each the mean of its neighbours."""
    if len(x) <= most:
        return list(map(float, x)), y
    edges = [round(i * len(x) / most) for i in range(most + 1)]
    spans = list(zip(edges, edges[1:], strict=False))
    return ([float(x[(a + b - 1) // 2]) for a, b in spans], [mean(y[a:b]) for a, b in spans])


def written(value: float) -> float | None:
    """Five digits are enough for a curve; what is not a number is a gap."""
    return float(f"{value:.5g}") if abs(value) < float("inf") else None
