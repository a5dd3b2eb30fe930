"""Guards in a real run: what is planted is named on the terminal, in the run folder and in the report."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rill.dashboard import indexer
from rill.errors import StuckError
from rill.telemetry.jsonl import read_lines
from rill.telemetry.run import RunStatus
from tests.e2e.tiny import as_command


def test_a_constant_reward_and_logprobs_that_are_not_the_engines_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = as_command(
        tmp_path,
        "wrong",
        "rollout.env.type=tests.e2e.faults:WrongLogprobs",
        "rollout.env.reward.type=function",
        "rollout.env.reward.function=tests.e2e.rewards:constant",
        "loop.checkpoint_every=0",
    )
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert findings["mismatch"]["step"] == 2
    assert "disagree about the same tokens" in findings["mismatch"]["meaning"]
    assert findings["no signal"]["step"] == 3, "it speaks after three steps in a row"
    printed = capfd.readouterr().out
    assert printed.count("guard: step 3: no signal: reward/std is 0") == 1
    assert re.search(r"guards +\d+ findings, told above and in the report", printed), "counted in the summary"
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert "the reward does not see the answer" in page
    for sample in indexer.rollouts(run.path).group(0, 0)["samples"]:
        pairs = zip(sample["trainer_logprobs"], sample["logprobs"], strict=True)
        assert any(abs(found - said) > 0.1 for found, said in pairs if found is not None), (
            "token by token too"
        )


@pytest.mark.slow
def test_a_hanging_reward_is_counted_and_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run = as_command(
        tmp_path,
        "hanging",
        "rollout.env.reward.function=tests.e2e.faults:hanging",
        "rollout.env.scoring.timeout_s=0.2",
        "loop.checkpoint_every=0",
    )
    findings = {finding["guard"]: finding for finding in read_lines(run.path / "guards.jsonl")}
    assert "failing rewards" in findings
    assert run.state().status is RunStatus.FINISHED


@pytest.mark.slow
def test_a_part_that_is_stuck_ends_the_run_with_who_waits_for_whom(tmp_path: Path) -> None:
    with pytest.raises(StuckError) as stuck:
        as_command(tmp_path, "stuck", "rollout.env.type=tests.e2e.faults:Stuck", "loop.step_timeout_s=60")
    message = str(stuck.value)
    assert "rollout" in message
    (report,) = (tmp_path / "stuck" / "logs").glob("stuck-*.md")
    assert str(report) in message
