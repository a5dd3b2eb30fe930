"""Spans, instants and counters: who did what, when, on which lane.

Called from every room's hot path. Until `configure` is called in a process everything here does nothing and costs
next to nothing; afterwards an event costs about a microsecond in the calling thread (benchmarks/telemetry.py)
and is written by a thread of its own:

    caller threads ──append──▶ queue (a deque, no lock) ──every 0.5 s──▶ writer thread ──▶ trace/<process>.jsonl
                                                        (and at exit, and on flush())

Guarantees:
- A kill loses at most the last FLUSH_S seconds. A span still open then is on file as an `open` record once it has
  lasted a flush, so a trace of a stuck or killed run says what everybody was doing.
- Times are nanoseconds of wall clock that never go back: a monotonic clock plus one offset, which the processes of
  one machine share through the run folder, so their times are comparable to the clock's own precision.
- Tracing never ends a run: a full disk stops the trace with a warning.
- A forked child starts unconfigured.

Records (one JSON object a line): `process`, `span`, `open`, `instant`, `counter`; see docs/telemetry.md.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
from collections import deque
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from rill.telemetry.chrome import TRACE_FOLDER, export_chrome, read_trace
from rill.telemetry.jsonl import LineFile, encode_line

__all__ = [
    "configure",
    "counter",
    "export_chrome",
    "flush",
    "instant",
    "is_configured",
    "read_trace",
    "shutdown",
    "span",
]

FLUSH_S = 0.5

_log = logging.getLogger(__name__)


def configure(run_dir: Path | str, process: str) -> None:
    """Start tracing in this process, into `<run_dir>/trace/<process>.jsonl`. A second call replaces the first."""
    global _tracer
    shutdown()
    try:
        _tracer = _Tracer(Path(run_dir) / TRACE_FOLDER, process)
    except OSError as error:
        _log.warning("%s is not traced: %s", process, error)
        return
    # Children of multiprocessing end with os._exit and run these finalizers in place of atexit's.
    multiprocessing_util.Finalize(None, flush, exitpriority=100)


def shutdown() -> None:
    """Write what is queued and stop. Without effect when not configured."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.close()


def is_configured() -> bool:
    return _tracer is not None


def flush() -> None:
    """Write what is queued now, e.g. before a deliberate kill."""
    if _tracer is not None:
        _tracer.flush()


def span(name: str, *, lane: str | None = None, **attributes: Any) -> Span:
    """Time a block. `lane` is the row it is drawn in; unset: the calling thread's name.

    >>> with span("generate", lane="cuda:0", sequences=8) as current:
    ...     tokens = engine.step()
    ...     current.set(tokens=tokens)
    """
    if _tracer is None:
        return _NO_SPAN
    return _OpenSpan(_tracer, name, lane, attributes)


def instant(name: str, *, lane: str | None = None, **attributes: Any) -> None:
    """Mark a moment."""
    if _tracer is not None:
        lane = lane or threading.current_thread().name
        _tracer.queue.append(("instant", name, lane, time.monotonic_ns(), 0, attributes))


def counter(name: str, value: float) -> None:
    """Record a value over time: a queue's depth, bytes in use."""
    if _tracer is not None:
        _tracer.queue.append(("counter", name, "", time.monotonic_ns(), 0, value))


class Span:
    """What `span` gives: a context manager. This one, used when tracing is off, does nothing."""

    __slots__ = ()

    def set(self, **attributes: Any) -> None:
        """Add attributes that are known only later."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class _OpenSpan(Span):
    __slots__ = ("_tracer", "attributes", "lane", "name", "start_ns")

    def __init__(self, tracer: _Tracer, name: str, lane: str | None, attributes: dict[str, Any]) -> None:
        self._tracer = tracer
        self.name = name
        self.lane = lane or threading.current_thread().name
        self.attributes = attributes
        self.start_ns = 0

    def set(self, **attributes: Any) -> None:
        # A new dict, because the writer thread may be reading the old one.
        self.attributes = {**self.attributes, **attributes}

    def __enter__(self) -> Self:
        self.start_ns = time.monotonic_ns()
        self._tracer.open_spans[id(self)] = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_ns = time.monotonic_ns()
        if kind is not None:
            self.set(error=kind.__name__)
        tracer = self._tracer
        tracer.open_spans.pop(id(self), None)
        tracer.queue.append(
            ("span", self.name, self.lane, self.start_ns, end_ns - self.start_ns, self.attributes)
        )


class _Tracer:
    """The queue, the file and the writer thread of one process."""

    def __init__(self, folder: Path, process: str) -> None:
        self.queue: deque[tuple[str, str, str, int, int, Any]] = deque()
        self.open_spans: dict[int, _OpenSpan] = {}
        self._folder = folder
        self._offset_ns = shared_clock_offset_ns(folder)
        self._file: LineFile | None = LineFile(folder / f"{process.replace('/', '_')}.jsonl", 0.0)
        self._reported: set[tuple[int, int]] = set()
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        header = {
            "kind": "process",
            "process": process,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "at_ns": time.monotonic_ns() + self._offset_ns,
        }
        self._file.write(encode_line(header))
        self._thread = threading.Thread(target=self._write_until_stopped, name="rill-trace", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        with self._write_lock:
            if self._file is None:
                self.queue.clear()
                return
            # Snapshot the open spans first: one that ends meanwhile then has its record after its `open` record.
            lines = [*self._open_lines(), *self._queued_lines()]
            if not lines:
                return
            try:
                self._file.write(b"".join(lines))
            except OSError as error:
                _log.warning("tracing stops: cannot write %s: %s", self._file.path, error)
                self._file.close()
                self._file = None

    def close(self) -> None:
        self._stop.set()
        self.flush()
        self._thread.join(timeout=5.0)
        with self._write_lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write_until_stopped(self) -> None:
        from rill.telemetry.system import SAMPLE_S, SystemSampler  # psutil takes a while to import

        sampler, next_s = SystemSampler(self._folder), time.monotonic() + SAMPLE_S
        while not self._stop.wait(FLUSH_S):
            if time.monotonic() >= next_s:
                next_s += SAMPLE_S
                for name, value in sampler.sample().items():
                    self.queue.append(("counter", name, "", time.monotonic_ns(), 0, value))
            self.flush()
        sampler.close()

    def _open_lines(self) -> list[bytes]:
        """One record for each span that has been open for a whole flush, once."""
        spans = list(self.open_spans.items())
        self._reported &= {(key, span.start_ns) for key, span in spans}
        latest_ns = time.monotonic_ns() - int(FLUSH_S * 1e9)
        lines = []
        for key, open_span in spans:
            mark = (key, open_span.start_ns)
            if open_span.start_ns > latest_ns or mark in self._reported:
                continue
            self._reported.add(mark)
            event = ("open", open_span.name, open_span.lane, open_span.start_ns, 0, open_span.attributes)
            lines.append(self._encode(event))
        return lines

    def _queued_lines(self) -> list[bytes]:
        return [self._encode(self.queue.popleft()) for _ in range(len(self.queue))]

    def _encode(self, event: tuple[str, str, str, int, int, Any]) -> bytes:
        kind, name, lane, start_ns, duration_ns, rest = event
        record: dict[str, Any] = {"kind": kind, "name": name, "at_ns": start_ns + self._offset_ns}
        if kind == "counter":
            record["value"] = rest
        else:
            record["lane"] = lane
            if kind == "span":
                record["duration_ns"] = duration_ns
            if rest:
                record["attributes"] = rest
        try:
            return encode_line(record)
        except Exception as error:  # noqa: BLE001 - boundary: attributes are any caller's objects
            unwritable = {"unwritable": f"{type(error).__name__}: {error}"}
            record = {
                "kind": kind,
                "name": name,
                "at_ns": record["at_ns"],
                "lane": lane,
                "attributes": unwritable,
            }
            return encode_line({**record, "duration_ns": duration_ns} if kind == "span" else record)


def shared_clock_offset_ns(folder: Path) -> int:
    """What to add to this machine's monotonic clock to get wall-clock time, the same for all its processes.

    The first process to ask measures it and leaves it in the folder under the machine's boot id. Without a boot id
    (not Linux) each process measures its own.
    """
    own_ns = time.time_ns() - time.monotonic_ns()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return own_ns
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"clock-{boot_id}.json"
    if not path.exists():
        draft = folder / f".clock-{os.getpid()}-{threading.get_ident()}"
        draft.write_bytes(msgspec.json.encode({"offset_ns": own_ns}))
        try:
            os.link(draft, path)  # atomic, and fails where another process was first
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    offset_ns: int = msgspec.json.decode(path.read_bytes())["offset_ns"]
    return offset_ns


def _forget_after_fork() -> None:
    global _tracer
    _tracer = None


_NO_SPAN = Span()
_tracer: _Tracer | None = None

os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(shutdown)
