"""Reading a run's trace files, and merging them into one file for Perfetto or chrome://tracing.

Works on a run that goes on, has ended or was killed, and on a copied folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rill.errors import UserError
from rill.telemetry.jsonl import encode_line, read_records

TRACE_FOLDER = "trace"
DEVICE_LANE = "device "
"""How the lanes of devices begin; a lock's holder writes its turns there."""


class Event(msgspec.Struct, kw_only=True):
    """One record of a trace file."""

    kind: str
    """ "span", "open" (a span that never ended), "instant" or "counter"."""
    at_ns: int
    process: str = ""
    name: str = ""
    duration_ns: int = 0
    lane: str = ""
    value: float = 0.0
    attributes: dict[str, Any] = {}


def read_trace(run_dir: Path | str) -> Iterator[Event]:
    """All events of all processes, process by process, in the order they were written.

    A span that was still open when its process last wrote comes as one `open` event that lasts until then.
    """
    for path in sorted((Path(run_dir) / TRACE_FOLDER).glob("*.jsonl")):
        yield from _read_process(path)


def export_chrome(run_dir: Path | str, out: Path | str) -> int:
    """Merge all processes of a run into one trace file; returns the number of events.

    Processes become processes and lanes become threads. Spans of one lane that overlap without nesting (concurrent
    tasks) are spread over rows of that lane, because the viewers draw a row as a stack.
    """
    folder = Path(run_dir) / TRACE_FOLDER
    if not any(folder.glob("*.jsonl")):
        raise UserError(f"no trace in {run_dir}: there is no file in {folder}")
    out = Path(out)
    draft = out.with_name(out.name + ".part")
    num_events = 0
    with draft.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for pid, path in enumerate(sorted(folder.glob("*.jsonl")), start=1):
            events = sorted(_read_process(path), key=lambda e: (e.at_ns, -e.duration_ns))
            for record in _chrome_records(pid, path.stem, events):
                file.write(separator + encode_line(record)[:-1])
                separator = b",\n"
            num_events += len(events)
        file.write(b"\n]}\n")
    os.replace(draft, out)
    return num_events


def _read_process(path: Path) -> Iterator[Event]:
    process = path.stem
    last_ns = 0
    still_open: dict[tuple[str, str, int], Event] = {}
    for event in read_records(path, Event):
        if (
            event.kind == "process"
        ):  # a resumed run appends to the same file: its earlier life's spans ended there
            yield from _ended_at(still_open, last_ns)
            still_open.clear()
            process = event.process or process
            continue
        event.process = process
        last_ns = max(last_ns, event.at_ns + event.duration_ns)
        key = (event.name, event.lane, event.at_ns)
        if event.kind == "open":
            still_open[key] = event
            continue
        if event.kind == "span":
            still_open.pop(key, None)
        yield event
    yield from _ended_at(still_open, last_ns)


def _ended_at(still_open: dict[tuple[str, str, int], Event], last_ns: int) -> Iterator[Event]:
    for event in still_open.values():
        event.duration_ns = max(0, last_ns - event.at_ns)
        yield event


def _chrome_records(pid: int, process: str, events: list[Event]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    rows = _Rows()
    for event in events:
        at_us = event.at_ns / 1000
        if event.kind == "counter":
            args: dict[str, Any] = {"value": event.value}
            yield {"ph": "C", "name": event.name, "pid": pid, "tid": 0, "ts": at_us, "args": args}
            continue
        end_ns = event.at_ns + event.duration_ns
        tid = rows.place(event.lane, event.at_ns, end_ns)
        record = {"name": event.name, "cat": event.lane, "pid": pid, "tid": tid, "ts": at_us}
        if event.kind == "instant":
            yield {"ph": "i", "s": "t", **record, "args": event.attributes}
        else:
            args = {**event.attributes, "unfinished": True} if event.kind == "open" else event.attributes
            yield {"ph": "X", **record, "dur": event.duration_ns / 1000, "args": args}
    for tid, name in rows.names.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


class _Rows:
    """Gives every span a row (a Chrome thread) in which it nests. Spans come in order of their start."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._lanes: dict[
            str, list[tuple[int, list[int]]]
        ] = {}  # lane -> rows, each (tid, ends of open spans)

    def place(self, lane: str, start_ns: int, end_ns: int) -> int:
        rows = self._lanes.setdefault(lane, [])
        for tid, ends in rows:
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or end_ns <= ends[-1]:
                ends.append(end_ns)
                return tid
        tid = len(self.names) + 1
        self.names[tid] = lane if not rows else f"{lane} ({len(rows) + 1})"
        rows.append((tid, [end_ns]))
        return tid
