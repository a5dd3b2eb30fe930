from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rill.telemetry import trace
from rill.telemetry.chrome import Event

DEADLINE_S = 20


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    trace.shutdown()
    yield
    trace.shutdown()


def events(run_dir: Path) -> dict[str, Event]:
    return {event.name: event for event in trace.read_trace(run_dir)}


def test_nothing_happens_until_it_is_configured(tmp_path: Path) -> None:
    with trace.span("quiet", tokens=1) as current:
        current.set(more=2)
    trace.instant("quiet")
    trace.counter("quiet", 1)
    trace.flush()
    assert not trace.is_configured()
    assert list(trace.read_trace(tmp_path)) == []


def test_spans_instants_and_counters_are_written(tmp_path: Path) -> None:
    before_ns = time.time_ns()
    trace.configure(tmp_path, "driver")
    with trace.span("generate", lane="cuda:0", sequences=8) as current:
        time.sleep(0.01)
        current.set(tokens=64)
    trace.instant("synced", version=3)
    trace.counter("queue", 5)
    trace.shutdown()
    found = events(tmp_path)
    span = found["generate"]
    assert (span.kind, span.process, span.lane) == ("span", "driver", "cuda:0")
    assert span.attributes == {"sequences": 8, "tokens": 64}
    assert span.duration_ns >= 10_000_000
    assert before_ns - 1_000_000_000 < span.at_ns < time.time_ns() + 1_000_000_000
    assert found["synced"].attributes == {"version": 3}
    assert found["synced"].lane == threading.current_thread().name
    assert found["queue"].value == 5


def test_a_span_that_fails_says_with_what_and_lets_the_error_pass(tmp_path: Path) -> None:
    trace.configure(tmp_path, "driver")
    with pytest.raises(ValueError), trace.span("fails"):
        raise ValueError
    trace.shutdown()
    assert events(tmp_path)["fails"].attributes == {"error": "ValueError"}


def test_events_reach_the_file_by_themselves_within_a_second(tmp_path: Path) -> None:
    trace.configure(tmp_path, "driver")
    with trace.span("soon"):
        pass
    deadline_s = time.monotonic() + DEADLINE_S
    while "soon" not in events(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert "soon" in events(tmp_path)


def test_many_threads_lose_nothing(tmp_path: Path) -> None:
    trace.configure(tmp_path, "driver")

    def work(index: int) -> None:
        for step in range(500):
            with trace.span(f"{index}-{step}"):
                pass

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.shutdown()
    assert len(events(tmp_path)) == 2000


def _killed_child(run_dir: str) -> None:
    trace.configure(run_dir, "worker-0")
    with trace.span("done"):
        pass
    with trace.span("stuck in recv", peer="worker-1"):
        time.sleep(600)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_process_leaves_its_spans_and_what_it_was_doing(tmp_path: Path, method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=_killed_child, args=(str(tmp_path),))
    child.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while "stuck in recv" not in events(tmp_path) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(DEADLINE_S)
    found = events(tmp_path)
    assert found["done"].kind == "span"
    assert found["stuck in recv"].kind == "open"
    assert found["stuck in recv"].attributes == {"peer": "worker-1"}


def _short_child(run_dir: str) -> None:
    trace.configure(run_dir, "worker-0")
    with trace.span("brief"):
        pass


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_ends_normally_flushes(tmp_path: Path, method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=_short_child, args=(str(tmp_path),))
    child.start()
    child.join(DEADLINE_S)
    assert events(tmp_path)["brief"].process == "worker-0"


def test_a_process_flushes_at_exit(tmp_path: Path) -> None:
    code = "import sys; from rill.telemetry import trace; trace.configure(sys.argv[1], 'main'); trace.instant('end')"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=DEADLINE_S)
    assert "end" in events(tmp_path)


def _is_child_configured(answer: multiprocessing.Queue[bool]) -> None:
    answer.put(trace.is_configured())


def test_a_forked_child_starts_unconfigured(tmp_path: Path) -> None:
    trace.configure(tmp_path, "driver")
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[bool] = context.Queue()
    child = context.Process(target=_is_child_configured, args=(answer,))
    child.start()
    assert answer.get(timeout=DEADLINE_S) is False
    child.join(DEADLINE_S)


def test_processes_of_one_machine_share_one_clock(tmp_path: Path) -> None:
    assert trace.shared_clock_offset_ns(tmp_path) == trace.shared_clock_offset_ns(tmp_path)


def test_a_span_that_ends_after_it_was_reported_open_is_one_span(tmp_path: Path) -> None:
    trace.configure(tmp_path, "driver")
    with trace.span("long"):
        time.sleep(trace.FLUSH_S * 1.2)
        trace.flush()
        assert events(tmp_path)["long"].kind == "open"
    trace.shutdown()
    found = [event for event in trace.read_trace(tmp_path) if event.name == "long"]
    assert [event.kind for event in found] == ["span"]


def test_a_full_disk_stops_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trace.configure(tmp_path, "driver")

    def refuse(self: object, lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rill.telemetry.jsonl.LineFile.write", refuse)
    for _ in range(2):
        trace.instant("event")
        trace.flush()
    assert caplog.text.count("tracing stops") == 1
    trace.configure(tmp_path, "a worker that starts on it")
    assert not trace.is_configured() and "a worker that starts on it is not traced" in caplog.text
    with trace.span("work"):
        pass


class Moody:
    def __str__(self) -> str:
        raise RuntimeError("not today")


@pytest.mark.parametrize(
    "value", [{(1, 2): 3}, "\ud800", Moody(), 1 << 80], ids=["keys", "surrogate", "str", "big"]
)
def test_an_attribute_that_cannot_be_written_costs_itself_and_not_the_trace(
    value: object, tmp_path: Path
) -> None:
    trace.configure(tmp_path, "driver")
    with trace.span("odd", value=value):
        pass
    trace.instant("after")
    trace.shutdown()
    found = events(tmp_path)
    assert found["odd"].kind == "span"
    assert "after" in found


def test_a_resumed_process_appends_to_its_file(tmp_path: Path) -> None:
    for life in ("first", "second"):
        trace.configure(tmp_path, "driver")
        trace.instant(life)
        trace.shutdown()
    assert set(events(tmp_path)) == {"first", "second"}
