"""Figures of a run by step: written once a step, readable at any moment.

`MetricLog` writes a step's figures to `metrics.jsonl` and to the configured sinks, `read_metrics` reads the file while
it is written. One process of a run owns its MetricLog.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rill.telemetry.jsonl import LineFile, encode_line, encode_number, read_records
from rill.telemetry.sinks.base import Account, Sink

METRICS_FILE = "metrics.jsonl"
ACCURACY = "eval/accuracy"
"""Of the held-out side; that of a set is eval/NAME/accuracy."""

_log = logging.getLogger(__name__)


class MetricLog:
    """Appends a run's figures to its metrics file and passes them to its sinks.

    A sink that fails is dropped with a warning: a tracker's bad day must not end a training run.
    """

    def __init__(self, run_dir: Path | str, sinks: Sequence[Sink] = ()) -> None:
        self._file = LineFile(Path(run_dir) / METRICS_FILE)
        self._sinks = list(sinks)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of a step. Several writes for one step add up; a repeated name takes the later value."""
        plain = {name: float(value) for name, value in values.items()}
        encoded = {name: encode_number(value) for name, value in plain.items()}
        self._file.write(encode_line({"step": step, "time_s": time.time(), "values": encoded}))
        self._pass_on(f"at step {step}", lambda sink: sink.write(step, plain))

    def tell(self, account: Account) -> None:
        """Pass the run card and some rollouts on to the sinks, when the run ends."""
        self._pass_on("at the end", lambda sink: sink.tell(account))

    def rewind(self, step: int) -> None:
        """Declare everything after `step` void, because the run goes on from its checkpoint at `step`."""
        self._file.write(encode_line({"rewind": step, "time_s": time.time()}))

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - boundary: third-party trackers raise anything
                _log.warning("sink %s did not close: %s", type(sink).__name__, error)
        self._sinks = []

    def _pass_on(self, when: str, act: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # noqa: BLE001 - boundary: third-party trackers raise anything
                _log.warning("dropping sink %s, which failed %s: %s", type(sink).__name__, when, error)
                self._sinks.remove(sink)

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricRecord(msgspec.Struct):
    """A line of the metrics file: the figures of a step, or a rewind."""

    step: int | None = None
    rewind: int | None = None
    time_s: float = 0.0
    values: dict[str, float | str] | None = None

    def numbers(self) -> dict[str, float] | None:
        """What is not a number stands there in words; other words are none of rill's."""
        try:
            return None if self.values is None else {name: float(x) for name, x in self.values.items()}
        except ValueError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """The figures of one step."""

    step: int
    time_s: float
    """When the step was first written, in seconds since the epoch."""
    values: dict[str, float]


def read_metrics(run_dir: Path | str) -> list[MetricRow]:
    """One row a step, in order of steps, without what a rewind made void. Empty when nothing is written yet."""
    rows: dict[int, MetricRow] = {}
    for record in read_records(Path(run_dir) / METRICS_FILE, MetricRecord):
        rows = rows_with(rows, record)
    return [rows[step] for step in sorted(rows)]


def rows_with(rows: dict[int, MetricRow], record: MetricRecord) -> dict[int, MetricRow]:
    """The rows by step, with what the next line of the file says. A row never changes: another takes its place."""
    if (last := record.rewind) is not None:
        return {step: row for step, row in rows.items() if step <= last}
    if record.step is not None and (values := record.numbers()) is not None:
        before = rows.get(record.step, MetricRow(step=record.step, time_s=record.time_s, values={}))
        rows[record.step] = replace(before, values={**before.values, **values})
    return rows


def accuracies(names: Iterable[str]) -> list[str]:
    """Those of evaluations among these names: of the held-out side, and behind it of the sets with a name."""
    found = {name for name in names if name.startswith("eval/") and name.endswith("/accuracy")}
    return sorted(found, key=lambda name: (name != ACCURACY, name))


def figures_of_training(rows: Sequence[MetricRow]) -> set[str]:
    """Names of those that steps have. A warm-up's, which counts up to 0, are its own: until RL has begun they are all
    there is."""
    steps = [row for row in rows if row.step > 0] or rows
    return {name for row in steps for name in row.values}


def mean(values: Sequence[float]) -> float:
    """Of those that are numbers, which the loss of a step that was skipped is not."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan
