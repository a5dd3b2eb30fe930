"""The index of one trace log: every span as a fixed-size row, and how busy each lane was over the whole run.

Written by the indexer's process, read by `timeline`. For a log of ten million spans a view of any width reads a few
megabytes:

    spans.bin      one row a span, in the order of their ends          views narrow enough to show or bin single spans
    blocks.bin     earliest start and latest end of every BLOCK_ROWS   which of those rows a view needs
    bins-S.bin     for each pair (lane, name): its own time, in nanoseconds, in bins of 2^S ns      wide views
    counters.bin   (name, time, value)

"Own" time is without that of the spans nested in it, so the shares of a lane add up to how busy it was. There are at
most NUM_BINS bins; when a run outgrows them, neighbours are added and S grows by one.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rill.dashboard.log_index import IndexState, LogIndex
from rill.dashboard.log_reader import Block
from rill.dashboard.table import Rows
from rill.telemetry.chrome import DEVICE_LANE

SPAN = np.dtype([("start", "<i8"), ("length", "<i8"), ("offset", "<u8"), ("pair", "<u4"), ("kind", "<u4")])
BLOCK = np.dtype([("first", "<i8"), ("last", "<i8")])
COUNTER = np.dtype([("at", "<i8"), ("value", "<f8"), ("name", "<u4")])
BLOCK_ROWS = 4096
NUM_BINS = 32_768
FIRST_SHIFT = 20
"""Bins begin at about a millisecond."""
MAX_NS = 1 << 62
"""A time beyond this is damage, and would stretch the timeline to nothing."""
MAX_NESTED = 8192
"""Spans of a lane that may still turn out to lie inside one that has not ended."""
INSTANT, UNFINISHED, CHUNK = 1, 2, 4
"""Marks of rows; CHUNK is set where the span names the chunk it worked on."""

Row = tuple[int, int, int, int, int]
"""The fields of SPAN."""


class TraceState(IndexState, kw_only=True):
    process: str = ""
    pairs: list[tuple[str, str]] = []
    """(lane, name); a device's lane belongs to no process."""
    totals_ns: list[int] = []
    """How long the ended spans of each pair took together."""
    counter_names: list[str] = []
    origin_ns: int = 0
    """Where the first bin begins; 0: nothing is written yet."""
    shift: int = FIRST_SHIFT
    first_ns: int = 0
    """When the process began; 0: not on file."""
    last_ns: int = 0
    open: list[tuple[int, int, int]] = []
    """Spans that have not ended: (pair, start, offset)."""


class Record(msgspec.Struct):
    """A line of a trace log, its attributes unread."""

    kind: str
    at_ns: int
    name: str = ""
    lane: str = ""
    duration_ns: int = 0
    value: float = 0.0
    process: str = ""
    attributes: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(Record)


class TraceIndex(LogIndex[TraceState]):
    state_type = TraceState
    changes_in_place = True

    def __init__(self, log: Path, folder: Path, state: TraceState, *, is_writer: bool = False) -> None:
        super().__init__(log, folder, state, is_writer=is_writer)
        self.spans = self._table("spans", SPAN)
        self.counters = self._table("counters", COUNTER)
        self._blocks = self._table("blocks", BLOCK)
        self._pair_codes = {pair: i for i, pair in enumerate(state.pairs)}
        self._counter_codes = {name: i for i, name in enumerate(state.counter_names)}
        self._open = {(pair, start): offset for pair, start, offset in state.open}
        self._unclaimed: dict[str, deque[tuple[int, int]]] = {}
        self._bins = _Bins(folder, state)

    def add(self, block: Block) -> None:
        rows: list[Row] = []
        claims: list[tuple[int, int, int]] = []
        counters: list[tuple[int, float, int]] = []
        state, decode, span_ended = self.state, _decoder.decode, self._span_ended
        for offset, line in block.lines:
            try:
                record = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if not 0 <= record.at_ns <= record.at_ns + record.duration_ns < MAX_NS:
                continue
            kind = record.kind
            if kind == "span":
                span_ended(record, offset, rows, claims)
            elif kind == "counter":
                counters.append((record.at_ns, record.value, self._counter_code(record.name)))
            elif kind == "process":
                rows += self._end_open_spans()
                state.process = record.process or state.process
                state.first_ns = state.first_ns or record.at_ns
            elif kind == "open":
                self._open[self._pair_code(record.lane, record.name), record.at_ns] = offset
                state.last_ns = max(state.last_ns, record.at_ns)
            elif kind == "instant":
                rows.append((record.at_ns, 0, offset, self._pair_code(record.lane, record.name), INSTANT))
                state.last_ns = max(state.last_ns, record.at_ns)
        state.open = [(pair, start, offset) for (pair, start), offset in self._open.items()]
        self._append(np.array(rows, dtype=SPAN), claims)
        if counters:
            self.counters.append(np.array(counters, dtype=COUNTER))

    def _span_ended(
        self, record: Record, offset: int, rows: list[Row], claims: list[tuple[int, int, int]]
    ) -> None:
        """Called for every span of a log: what is inside it ended before it, and is claimed by it."""
        start, length, lane = record.at_ns, record.duration_ns, record.lane
        pair = self._pair_codes.get((lane, record.name))
        if pair is None:
            pair = self._pair_code(lane, record.name)
        if start + length > self.state.last_ns:
            self.state.last_ns = start + length
        attributes = record.attributes
        rows.append(
            (start, length, offset, pair, CHUNK if attributes and b'"chunk"' in bytes(attributes) else 0)
        )
        if self._open:
            self._open.pop((pair, start), None)
        ended = self._unclaimed.get(lane)
        if ended is None:
            ended = self._unclaimed[lane] = deque(maxlen=MAX_NESTED)
        while ended and ended[-1][0] >= start:
            claims.append((*ended.pop(), pair))
        ended.append((start, length))

    def _end_open_spans(self) -> list[Row]:
        """A resumed run appends to the same log: what its earlier life left open ended with it."""
        last = self.state.last_ns
        rows = [
            (start, max(0, last - start), offset, pair, UNFINISHED)
            for (pair, start), offset in self._open.items()
        ]
        self._open.clear()
        self._unclaimed.clear()
        return rows

    def _append(self, rows: Rows, claims: list[tuple[int, int, int]]) -> None:
        if not len(rows):
            return
        self.spans.append(rows)
        self._summarise_blocks()
        spans = rows[(rows["kind"] & INSTANT) == 0]
        self._bins.add(spans["start"], spans["length"], spans["pair"], 1.0)
        for pair in np.unique(spans["pair"]).tolist():
            self.state.totals_ns[pair] += int(spans["length"][spans["pair"] == pair].sum())
        if claims:
            start, length, pair = np.array(claims, dtype=np.int64).T
            self._bins.add(start, length, pair, -1.0)

    def _summarise_blocks(self) -> None:
        """Blocks are summed up as they fill; readers look through the last, unfinished one."""
        begin = self._blocks.num_rows * BLOCK_ROWS
        num_full = (self.spans.num_rows - begin) // BLOCK_ROWS
        if num_full:
            rows = self.spans.read(begin, begin + num_full * BLOCK_ROWS)
            starts = rows["start"].reshape(num_full, BLOCK_ROWS)
            ends = (rows["start"] + rows["length"]).reshape(num_full, BLOCK_ROWS)
            blocks = np.empty(num_full, BLOCK)
            blocks["first"], blocks["last"] = starts.min(axis=1), ends.max(axis=1)
            self._blocks.append(blocks)

    def _pair_code(self, lane: str, name: str) -> int:
        pair = (lane, name)
        code = self._pair_codes.get(pair)
        if code is None:
            code = self._pair_codes[pair] = len(self.state.pairs)
            self.state.pairs.append(pair)
            self.state.totals_ns.append(0)
        return code

    def _counter_code(self, name: str) -> int:
        code = self._counter_codes.get(name)
        if code is None:
            code = self._counter_codes[name] = len(self.state.counter_names)
            self.state.counter_names.append(name)
        return code

    # --- reading ------------------------------------------------------------------------------------------

    def lane_of(self, pair: int) -> tuple[str, str]:
        """(process, lane): a device is one lane, whoever holds it."""
        lane = self.state.pairs[pair][0]
        return ("", lane) if lane.startswith(DEVICE_LANE) else (self.state.process or self.log.stem, lane)

    def spans_between(self, first_ns: int, last_ns: int) -> Rows:
        """The rows that touch the time, the unfinished ones among them."""
        blocks = self._blocks.read()
        touched = np.flatnonzero((blocks["last"] >= first_ns) & (blocks["first"] <= last_ns))
        parts = [
            self.spans.read(int(run[0]) * BLOCK_ROWS, (int(run[-1]) + 1) * BLOCK_ROWS)
            for run in np.split(touched, np.flatnonzero(np.diff(touched) > 1) + 1)
            if len(run)
        ]
        parts.append(self.spans.read(len(blocks) * BLOCK_ROWS))
        parts.append(self.unfinished())
        rows = np.concatenate(parts)
        touching: Rows = rows[(rows["start"] <= last_ns) & (rows["start"] + rows["length"] >= first_ns)]
        return touching

    def own_time(self, pair: int, edges_ns: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Nanoseconds between neighbouring edges that the pair was at work."""
        state = self.state
        width = 1 << state.shift
        low = max(0, int((edges_ns[0] - state.origin_ns) >> state.shift) - 1)
        high = min(NUM_BINS, int((edges_ns[-1] - state.origin_ns) >> state.shift) + 2)
        if high <= low:
            return np.zeros(len(edges_ns) - 1)
        path = bins_path(self.folder, state.shift)
        bins = np.fromfile(path, np.float32, count=high - low, offset=(pair * NUM_BINS + low) * 4)
        total = np.concatenate([[0.0], np.cumsum(np.maximum(bins, 0.0), dtype=np.float64)])
        at = state.origin_ns + (low + np.arange(len(total))) * width
        own: npt.NDArray[Any] = np.diff(np.interp(edges_ns, at, total))
        return own

    def unfinished(self) -> Rows:
        last = self.state.last_ns
        return np.array(
            [
                (start, max(0, last - start), offset, pair, UNFINISHED)
                for pair, start, offset in self.state.open
            ],
            dtype=SPAN,
        )


class _Bins:
    """The bins of every pair, added to in place, so that only touched pages are written."""

    def __init__(self, folder: Path, state: TraceState) -> None:
        self._folder = folder
        self._state = state
        self._mapped: npt.NDArray[Any] = np.empty((0, NUM_BINS), np.float32)

    def add(
        self, start: npt.NDArray[Any], length: npt.NDArray[Any], pair: npt.NDArray[Any], sign: float
    ) -> None:
        if not len(start):
            return
        state = self._state
        if not state.origin_ns:
            state.origin_ns = int(start.min())
        self._make_room(int((start + length).max()))
        begin = np.maximum(start - state.origin_ns, 0)
        end = np.maximum(begin, start + length - state.origin_ns)
        first, last = begin >> state.shift, end >> state.shift
        row = pair.astype(np.int64) * NUM_BINS
        in_first = np.minimum(end, (first + 1) << state.shift) - begin
        in_last = np.where(last > first, end - (last << state.shift), 0)
        cells, inverse = np.unique(np.concatenate([row + first, row + last]), return_inverse=True)
        sums = np.bincount(inverse, weights=np.concatenate([in_first, in_last]) * sign, minlength=len(cells))
        self._mapped.reshape(-1)[cells] += sums.astype(np.float32)
        width = sign * (1 << state.shift)
        for i in np.flatnonzero(last > first + 1):
            self._mapped[pair[i], int(first[i]) + 1 : int(last[i])] += width

    def _make_room(self, end_ns: int) -> None:
        state, shift = self._state, self._state.shift
        while (end_ns - state.origin_ns) >> shift >= NUM_BINS:
            shift += 1
        num_pairs = len(state.pairs)
        if shift == state.shift and len(self._mapped) >= num_pairs:
            return
        before = bins_path(self._folder, state.shift)
        saved = self._map(before, num_pairs) if before.exists() else None
        if shift == state.shift:
            self._mapped = self._map(before, num_pairs)
            return
        target = self._map(bins_path(self._folder, shift), num_pairs)
        if saved is not None:
            factor = 1 << (shift - state.shift)
            target[:, : NUM_BINS // factor] = saved.reshape(num_pairs, -1, factor).sum(axis=2)
        self._mapped, state.shift = target, shift
        # A reader that still has the old state finds no file, and asks again.
        with contextlib.suppress(FileNotFoundError):
            before.unlink()

    def _map(self, path: Path, num_pairs: int) -> npt.NDArray[Any]:
        room = max(16, 1 << (num_pairs - 1).bit_length())  # grown by doubling
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:  # a full disk is an error here: in mapped memory it would be a SIGBUS, which ends the process
            os.posix_fallocate(fd, 0, room * NUM_BINS * 4)
        finally:
            os.close(fd)
        return np.memmap(path, np.float32, "r+", shape=(room, NUM_BINS))[:num_pairs]


def bins_path(folder: Path, shift: int) -> Path:
    return folder / f"bins-{shift}.bin"
