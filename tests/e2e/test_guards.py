"""Guards in a real run: what is planted is named on the terminal, in the run folder and in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.telemetry.jsonl import read_lines
from tests.e2e.tiny import as_command


def test_a_constant_reward_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reward = "rollout.env.reward.function=tests.e2e.rewards:constant"
    run = as_command(tmp_path, "constant", reward, "loop.checkpoint_every=0")
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert findings["no signal"]["step"] == 3, "it speaks after three steps in a row"
    assert "mismatch" not in findings
    printed = capfd.readouterr().out
    assert printed.count("guard: step 3: no signal: reward/std is 0") == 1
    assert "guard:    step 3: no signal" in printed, "and again in the summary"
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "the reward does not see the answer" in page
