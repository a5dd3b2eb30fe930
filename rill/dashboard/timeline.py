"""Who did what when, for one view of the timeline: read from the trace indexes by range.

    narrow view, few spans     the spans themselves
    narrow view, many          per lane and pixel column, the share of each name        (from spans.bin)
    wide view                  the same                                                 (from bins-S.bin)

The cost of a view does not grow with the run. Times that leave here are seconds since the run's first event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rill.dashboard.log_reader import MAX_LINE_BYTES
from rill.dashboard.table import Count, Number, Rows, read_line
from rill.dashboard.trace_index import CHUNK, INSTANT, UNFINISHED, TraceIndex
from rill.errors import UserError

MAX_SPANS = 6000
"""A view with more is drawn by columns."""
MAX_CHUNKS = 400
MAX_COLUMNS = 4000
MAX_LANES = 200
FINER_THAN_BINS = 4
"""A view whose columns are narrower than a bin by more than this is drawn from spans."""
READ_ROWS = 500_000
NS = 1_000_000_000
FULL = 255
"""A share of 1 in a column."""

Lane = tuple[str, str]
"""(process, lane); a device's process is ""."""


class View(
    msgspec.Struct,
    kw_only=True,
    rename={
        "from_s": "from",
        "to_s": "to",
        "num_columns": "columns",
        "first_lane": "lane",
        "num_lanes": "lanes",
    },
):
    """What part of the timeline is asked for, under the names that an address has for it."""

    from_s: Number = 0.0
    to_s: Number = 1e300
    num_columns: Count = 1000
    first_lane: Count = 0
    num_lanes: Count = MAX_LANES


@dataclass(slots=True)
class _Columns:
    """The shares of each name in one lane, in nanoseconds a column."""

    by_name: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def add(self, name: str, values: npt.NDArray[Any]) -> None:
        known = self.by_name.get(name)
        self.by_name[name] = values if known is None else known + values

    def total(self, num_columns: int) -> npt.NDArray[Any]:
        return np.sum(list(self.by_name.values()), axis=0) if self.by_name else np.zeros(num_columns)


class Timeline:
    """All trace indexes of one run at one moment."""

    def __init__(self, indexes: Sequence[TraceIndex]) -> None:
        self.indexes = [index for index in indexes if index.state.pairs]
        origins = [index.state.origin_ns or index.state.last_ns for index in self.indexes]
        starts = [start for index in self.indexes for _, start, _ in index.state.open]
        begun = [index.state.first_ns for index in indexes]
        self.begin_ns = min([at for at in (*origins, *starts, *begun) if at], default=0)
        self.end_ns = max((index.state.last_ns for index in self.indexes), default=0)
        found = {index.lane_of(pair) for index in self.indexes for pair in range(len(index.state.pairs))}
        # Devices first, then the driver, then by name.
        self.lanes: list[Lane] = sorted(found, key=lambda lane: (lane[0] != "", lane[0] != "driver", lane))

    @property
    def seconds(self) -> float:
        return max(0.0, (self.end_ns - self.begin_ns) / NS)

    def view(self, view: View) -> dict[str, Any]:
        columns = max(1, min(MAX_COLUMNS, view.num_columns))
        first = self.begin_ns + int(max(0.0, view.from_s) * NS)
        last = max(first + columns, self.begin_ns + int(min(self.seconds, view.to_s) * NS))
        lanes = self.lanes[view.first_lane : view.first_lane + min(MAX_LANES, view.num_lanes)]
        answer = self._frame(first, last, lanes)
        edges = np.linspace(first, last, columns + 1).astype(np.int64)
        rows = self._rows(first, last, (last - first) / columns, lanes)
        if rows is not None and sum(len(part) for _, part in rows) <= MAX_SPANS:
            answer |= self._as_spans(rows, lanes)
            answer["busy"] = self._union(rows, lanes, first, last)
        else:
            painted = self._binned(lanes, edges) if rows is None else self._painted(rows, lanes, edges)
            answer |= self._as_columns(painted, edges)
            answer["busy"] = (
                self._busy(painted, edges) if rows is None else self._union(rows, lanes, first, last)
            )
        return answer

    def longest(self, count: int) -> dict[str, Any]:
        """The whole run by its longest spans: for a file that holds no more."""
        rows: list[tuple[int, Rows]] = []
        for i, index in enumerate(self.indexes):
            kept = index.unfinished()
            for begin in range(0, index.spans.num_rows, READ_ROWS):
                kept = _longest(np.concatenate([kept, index.spans.read(begin, begin + READ_ROWS)]), count)
            rows.append((i, kept))
        lengths = np.sort(np.concatenate([part["length"] for _, part in rows])) if rows else np.empty(0)
        least = lengths[-count] if len(lengths) > count else 0
        rows = [(i, part[part["length"] >= least]) for i, part in rows]
        edges = np.linspace(self.begin_ns, max(self.end_ns, self.begin_ns + 1000), 1001).astype(np.int64)
        answer = self._frame(self.begin_ns, self.end_ns, self.lanes) | self._as_spans(rows, self.lanes)
        return answer | {"busy": self._busy(self._binned(self.lanes, edges), edges)}

    def _frame(self, first: int, last: int, lanes: Sequence[Lane]) -> dict[str, Any]:
        return {
            "from_s": (first - self.begin_ns) / NS,
            "to_s": (last - self.begin_ns) / NS,
            "seconds": self.seconds,
            "begin_s": self.begin_ns / NS,
            "num_lanes": len(self.lanes),
            "lanes": [{"process": process, "lane": lane} for process, lane in lanes],
        }

    def span(self, process: int, offset: int) -> dict[str, Any]:
        """Everything the log says of one span."""
        if not 0 <= process < len(self.indexes):
            raise UserError(f"there is no process {process} in this trace")
        log = self.indexes[process].log
        line = read_line(log, offset, MAX_LINE_BYTES) if offset >= 0 else b""
        try:
            record = msgspec.json.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UserError(f"no span begins at byte {offset} of {log.name}") from error
        return {"process": self.indexes[process].state.process, **record} if isinstance(record, dict) else {}

    def _rows(
        self, first: int, last: int, column_ns: float, lanes: Sequence[Lane]
    ) -> list[tuple[int, Rows]] | None:
        """The rows in view by process; None where the view is too wide for rows."""
        wanted = set(lanes)
        found = []
        for i, index in enumerate(self.indexes):
            if index.spans.num_rows > MAX_SPANS and column_ns * FINER_THAN_BINS >= (1 << index.state.shift):
                return None
            rows = index.spans_between(first, last)
            shown = np.array(
                [index.lane_of(pair) in wanted for pair in range(len(index.state.pairs))], dtype=bool
            )
            found.append((i, rows[shown[rows["pair"]]]))
        return found

    def _as_spans(self, rows: Sequence[tuple[int, Rows]], lanes: Sequence[Lane]) -> dict[str, Any]:
        places = {lane: i for i, lane in enumerate(lanes)}
        names: dict[str, int] = {}
        spans: list[list[Any]] = []
        chunks: list[list[Any]] = []
        for process, part in rows:
            index = self.indexes[process]
            for start, length, offset, pair, kind in part.tolist():
                lane, name = places[index.lane_of(pair)], index.state.pairs[pair][1]
                code = names.setdefault(name, len(names))
                begin_s = round((start - self.begin_ns) / NS, 9)
                spans.append(
                    [
                        lane,
                        code,
                        begin_s,
                        round(length / NS, 9),
                        process,
                        offset,
                        kind & (INSTANT | UNFINISHED),
                    ]
                )
                if kind & CHUNK and len(chunks) < MAX_CHUNKS:
                    chunk = self.span(process, offset).get("attributes", {}).get("chunk")
                    chunks.append([len(spans) - 1, str(chunk)])
        return {"kind": "spans", "names": list(names), "spans": spans, "chunks": chunks}

    def _painted(
        self, rows: Sequence[tuple[int, Rows]], lanes: Sequence[Lane], edges: npt.NDArray[Any]
    ) -> dict[int, _Columns]:
        """Columns from rows: spans shorter than a column add their length; longer ones fill what is left, the inner
        one before the outer."""
        places = {lane: i for i, lane in enumerate(lanes)}
        painted: dict[int, _Columns] = {i: _Columns() for i in range(len(lanes))}
        long_spans: dict[int, list[tuple[int, int, str]]] = {}
        first, width = int(edges[0]), float(edges[1] - edges[0])
        num_columns = len(edges) - 1
        for process, part in rows:
            index = self.indexes[process]
            spans = part[(part["kind"] & INSTANT) == 0]
            is_short = spans["length"] < width
            short, num_pairs = spans[is_short], len(index.state.pairs)
            at = np.clip((short["start"] - first) / width, 0, num_columns - 1).astype(np.int64)
            cells = np.bincount(short["pair"] * num_columns + at, short["length"], num_pairs * num_columns)
            for pair in _pairs(short):
                lane, name = places[index.lane_of(pair)], index.state.pairs[pair][1]
                painted[lane].add(name, cells[pair * num_columns : (pair + 1) * num_columns])
            for start, length, pair in spans[~is_short][["start", "length", "pair"]].tolist():
                span = (start, length, index.state.pairs[pair][1])
                long_spans.setdefault(places[index.lane_of(pair)], []).append(span)
        for lane, spans_of_lane in long_spans.items():
            _paint_long(painted[lane], spans_of_lane, edges)
        return painted

    def _binned(self, lanes: Sequence[Lane], edges: npt.NDArray[Any]) -> dict[int, _Columns]:
        places = {lane: i for i, lane in enumerate(lanes)}
        binned: dict[int, _Columns] = {i: _Columns() for i in range(len(lanes))}
        unfinished: dict[int, list[tuple[int, int, str]]] = {}
        for index in self.indexes:
            for pair, (_, name) in enumerate(index.state.pairs):
                place = places.get(index.lane_of(pair))
                if place is not None:
                    own = index.own_time(pair, edges)
                    if own.any():
                        binned[place].add(name, own)
            for pair, start, _ in index.state.open:
                place = places.get(index.lane_of(pair))
                if place is not None:
                    span = (start, max(0, index.state.last_ns - start), index.state.pairs[pair][1])
                    unfinished.setdefault(place, []).append(span)
        for place, spans in unfinished.items():
            _paint_long(binned[place], spans, edges)
        return binned

    def _as_columns(self, painted: dict[int, _Columns], edges: npt.NDArray[Any]) -> dict[str, Any]:
        """Shares as whole numbers up to FULL; a lane that did more than one thing at once is scaled to full."""
        width = float(edges[1] - edges[0])
        names: dict[str, int] = {}
        columns = []
        for lane, found in painted.items():
            scale = FULL / np.maximum(found.total(len(edges) - 1), width)
            for name, values in found.by_name.items():
                shares = np.ceil(values * scale - 1e-6).astype(np.int64)
                if shares.any():
                    columns.append([lane, names.setdefault(name, len(names)), shares.tolist()])
        return {"kind": "columns", "names": list(names), "columns": columns, "full": FULL}

    def _union(
        self, rows: Sequence[tuple[int, Rows]], lanes: Sequence[Lane], first: int, last: int
    ) -> list[float]:
        """The same from rows: time under several spans counts once."""
        found: dict[Lane, list[Rows]] = {lane: [] for lane in lanes}
        for process, part in rows:
            index = self.indexes[process]
            for pair in _pairs(part):
                found[index.lane_of(pair)].append(part[part["pair"] == pair])
        return [round(_covered(parts, first, last) / (last - first), 4) for parts in found.values()]

    def _busy(self, painted: dict[int, _Columns], edges: npt.NDArray[Any]) -> list[float]:
        """The share of the view in which each lane did something."""
        width = float(edges[1] - edges[0])
        return [
            round(float(np.minimum(found.total(len(edges) - 1) / width, 1.0).mean()), 4)
            for found in painted.values()
        ]


def _pairs(rows: Rows) -> list[int]:
    """Those that occur, without sorting: there are few pairs and many rows."""
    found: list[int] = np.flatnonzero(np.bincount(rows["pair"])).tolist()
    return found


def _covered(parts: list[Rows], first: int, last: int) -> int:
    """Nanoseconds of [first, last] that lie under any of the rows."""
    if not parts:
        return 0
    rows = np.concatenate(parts)
    order = np.argsort(rows["start"], kind="stable")
    starts = np.clip(rows["start"][order], first, last)
    ends = np.clip((rows["start"] + rows["length"])[order], first, last)
    reached = np.concatenate([[first], np.maximum.accumulate(ends)[:-1]])
    return int(np.maximum(0, ends - np.maximum(starts, reached)).sum())


def _longest(rows: Rows, count: int) -> Rows:
    return rows[np.argpartition(rows["length"], -count)[-count:]] if len(rows) > count else rows


def _paint_long(columns: _Columns, spans: list[tuple[int, int, str]], edges: npt.NDArray[Any]) -> None:
    first, width, num_columns = int(edges[0]), float(edges[1] - edges[0]), len(edges) - 1
    left = np.maximum(0.0, width - columns.total(num_columns))
    painted: dict[str, npt.NDArray[Any]] = {}
    for start, length, name in sorted(spans, key=lambda span: span[1]):
        begin, end = (start - first) / width, (start + length - first) / width
        a, b = max(0, int(begin)), min(num_columns, int(np.ceil(end)))
        if b <= a:
            continue
        share = np.ones(b - a)
        share[0] -= max(0.0, begin - a)
        share[-1] -= max(0.0, b - end)
        filled = np.minimum(left[a:b], share * width)
        left[a:b] -= filled
        painted.setdefault(name, np.zeros(num_columns))[a:b] += filled
    for name, values in painted.items():
        columns.add(name, values)
