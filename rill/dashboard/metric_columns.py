"""A run's figures by name, kept up to date by reading only what its metrics file has gained.

One per run in the server. A resumed run's rewinds are followed; a file that was cut or replaced is read again.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from rill.dashboard.log_reader import head_of, new_blocks, size_of
from rill.telemetry.metrics import METRICS_FILE, MetricRecord, mean

MAX_POINTS = 4000
"""A longer curve is averaged down to so many points."""


_decoder = msgspec.json.Decoder(MetricRecord)


class MetricColumns:
    def __init__(self, run: Path) -> None:
        self.path = run / METRICS_FILE
        self._read_to = 0
        self._head = ""
        self._rows: dict[int, dict[str, float]] = {}
        self._times: dict[int, float] = {}
        self._columns: dict[str, Any] = {}

    @property
    def version(self) -> int:
        """Grows with the file."""
        return self._read_to

    def refresh(self) -> None:
        if self.path.is_symlink() or not self.path.is_file():
            return
        if self._read_to > size_of(self.path) or self._head != head_of(self.path, self._read_to):
            self._read_to, self._rows, self._times = 0, {}, {}
        for block in new_blocks(self.path, self._read_to):
            for _, line in block.lines:
                try:
                    self._add(_decoder.decode(line))
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue  # a damaged line, or one of another version of rill
            self._read_to = block.read_to
        self._head = head_of(self.path, self._read_to)

    def last(self, name: str) -> float | None:
        """Of the latest step that has it as a number: the loss of a step that was skipped is none."""
        values = (self._rows[step].get(name, math.nan) for step in sorted(self._rows, reverse=True))
        return next(filter(math.isfinite, values), None)

    @property
    def steps(self) -> list[int]:
        return sorted(self._rows)

    @property
    def last_time_s(self) -> float:
        return max(self._times.values(), default=0.0)

    def total(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self._rows.values())

    def columns(self) -> dict[str, Any]:
        """{name: {x: steps, y: values}} with times of the steps beside; steps that many names share stand once."""
        if self._columns.get("version") == self.version:
            return self._columns
        series: dict[str, tuple[list[int], list[float]]] = {}
        for step in self.steps:
            for name, value in self._rows[step].items():
                x, y = series.setdefault(name, ([], []))
                x.append(step)
                y.append(value)
        shared: dict[tuple[float, ...], int] = {}
        out = {}
        for name, (x, y) in sorted(series.items()):
            xs, ys = thinned(x, y)
            out[name] = {"x": shared.setdefault(tuple(xs), len(shared)), "y": [written(v) for v in ys]}
        steps = self.steps[:: len(self._rows) // (MAX_POINTS + 1) + 1]
        self._columns = {
            "version": self.version,
            "x": [list(xs) for xs in shared],
            "series": out,
            "steps": steps,
            "times": [round(self._times[step], 1) for step in steps],
        }
        return self._columns

    def _add(self, record: MetricRecord) -> None:
        if record.rewind is not None:
            last = record.rewind
            self._rows = {step: row for step, row in self._rows.items() if step <= last}
            self._times = {step: at for step, at in self._times.items() if step <= last}
        elif record.step is not None and (values := record.numbers()) is not None:
            self._rows.setdefault(record.step, {}).update(values)
            self._times.setdefault(record.step, record.time_s)


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
