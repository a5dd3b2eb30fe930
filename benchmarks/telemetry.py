"""Claim: telemetry is cheap enough to leave on: a span costs a few microseconds.

Prints one JSON line per figure: nanoseconds a call in the calling thread, the best of several rounds; and how fast
a trace is exported. Rates are of bursts as hot paths make them, with pauses in which the writer thread works.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from report import report

from rill.telemetry import trace
from rill.telemetry.metrics import MetricLog


def nanoseconds(call: Callable[[], object], *, calls: int, rounds: int, pause_s: float = 0.0) -> float:
    """Of one call: the best round, loop overhead taken off."""
    best = min(_round(call, calls, pause_s) for _ in range(rounds))
    empty = min(_round(lambda: None, calls, 0.0) for _ in range(rounds))
    return max(0.0, best - empty) / calls


def _round(call: Callable[[], object], calls: int, pause_s: float) -> float:
    time.sleep(pause_s)
    start_ns = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return time.perf_counter_ns() - start_ns


def span() -> None:
    with trace.span("step", lane="cuda:0", tokens=512):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run, whose figures mean little")
    rounds, calls = (3, 200) if parser.parse_args().quick else (40, 2000)

    def tell(name: str, call: Callable[[], object], pause_s: float = 0.0) -> None:
        value = nanoseconds(call, calls=calls, rounds=rounds, pause_s=pause_s)
        report(benchmark="telemetry", name=name, value=value, unit="ns")

    tell("span, tracing off", span)
    with tempfile.TemporaryDirectory() as folder:
        trace.configure(folder, "bench")
        tell("span", span, trace.FLUSH_S / 5)
        tell("counter", lambda: trace.counter("queue", 3), trace.FLUSH_S / 5)
        trace.shutdown()
        values = {f"figure/{index}": float(index) for index in range(40)}
        rounds, calls = 5, 200
        with MetricLog(folder) as log:
            tell("MetricLog.write, 40 figures", lambda: log.write(1, values))
        start_s = time.perf_counter()
        num_events = trace.export_chrome(folder, Path(folder) / "chrome.json")
        rate = num_events / (time.perf_counter() - start_s)
        report(benchmark="telemetry", name="export_chrome", value=rate, unit="events/s")


if __name__ == "__main__":
    main()
