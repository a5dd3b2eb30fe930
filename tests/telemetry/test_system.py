from __future__ import annotations

import json
from pathlib import Path

import pytest

from rill.telemetry import system, trace
from rill.telemetry.system import SystemSampler


def test_one_process_of_a_machine_speaks_for_it_and_another_takes_over(tmp_path: Path) -> None:
    first, second = SystemSampler(tmp_path), SystemSampler(tmp_path)
    assert {"process/cpu", "process/memory_bytes", "host/cpu", "host/memory", "host/disk"} <= set(
        first.sample()
    )
    assert set(second.sample()) == {"process/cpu", "process/memory_bytes"}
    first.close()
    assert "host/cpu" in second.sample()
    second.close()


def test_shares_are_shares_and_memory_is_bytes(tmp_path: Path) -> None:
    sampler = SystemSampler(tmp_path)
    sampler.sample()
    values = sampler.sample()
    assert all(0.0 <= values[name] <= 1.0 for name in ("host/cpu", "host/memory", "host/disk"))
    assert values["process/memory_bytes"] > 1e6
    assert values["host/net_in_bytes_per_s"] >= 0.0
    sampler.close()


def test_a_machine_that_tells_nothing_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = SystemSampler(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr("psutil.disk_usage", refuse)
    assert "process/cpu" in sampler.sample()
    sampler.close()


def test_every_traced_process_counts_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "SAMPLE_S", 0.0)
    trace.configure(tmp_path, "driver")
    trace.flush()
    log = tmp_path / "trace" / "driver.jsonl"
    try:
        for _ in range(600):
            names = {json.loads(line).get("name") for line in log.read_text().splitlines()}
            if "process/cpu" in names:
                return
            trace._tracer._stop.wait(0.1)  # type: ignore[union-attr]
    finally:
        trace.shutdown()
    raise AssertionError("no counter in a minute")
