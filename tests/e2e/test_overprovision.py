"""Over-provisioned groups with the built-in engine: cut off, stopped, continued under newer weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rill.workflows.loop import StepReport
from tests.e2e.tiny import start

LONG_TAILED = (
    "loop.steps=6",
    "loop.overprovision=0.5",
    "rollout.sampling.max_new_tokens=96",
    "rollout.log_groups=100",
    "rollout.engine.max_num_seqs=8",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [("cluster.devices=1",), ("cluster.devices=3", "placement.rollout=0-1", "placement.actor=2")],
    ids=["shared", "two engines beside the trainer"],
)
def test_answers_of_the_native_engine_go_on_in_a_later_step(
    tmp_path: Path, placement: tuple[str, ...]
) -> None:
    reports: list[StepReport] = []
    run = start(tmp_path, "spare", *LONG_TAILED, *placement, observers=[reports.append])
    steps = [report.metrics for report in reports if "groups/kept" in report.metrics]
    assert [metrics["groups/kept"] for metrics in steps] == [4.0] * 6
    assert sum(metrics["groups/resumed"] for metrics in steps) > 0, "nothing was cut off"
    assert max(metrics["lag/max"] for metrics in steps) >= 1
    assert all(metrics["mismatch/kl"] < 1e-2 for metrics in steps if metrics["lag/max"] == 0)
    samples = [
        sample
        for path in (run.path / "rollouts").glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        for sample in json.loads(line)["samples"]
    ]
    mixed = [s for s in samples if len({v for v in s["versions"] if v >= 0}) > 1]
    assert mixed, "no answer holds tokens of two versions"
    for sample in mixed:
        versions = [v for v in sample["versions"] if v >= 0]
        assert versions == sorted(versions)
        assert sum(sample["sampled"]) <= 96
