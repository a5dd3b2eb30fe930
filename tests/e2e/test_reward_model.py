"""Runs with a reward model: a group of its own, and the same weights wherever it is placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.workflows.loop import StepReport
from tests.e2e.tiny import EXACT, PPO, fingerprint, start
from tests.workers.test_reward_model import folder  # noqa: F401  a fixture

APART = (
    "cluster.devices=2",
    "placement.rollout=0",
    "placement.actor=0",
    "placement.reference=0",
    "placement.reward=1",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workflow", [(), PPO], ids=["grpo", "ppo"])
def test_it_rewards_what_is_trained_on_and_its_placement_changes_no_bit(
    tmp_path: Path,
    folder: Path,  # noqa: F811
    workflow: tuple[str, ...],
) -> None:
    reports: list[StepReport] = []
    settings = (*EXACT, *workflow, f"reward_model.model.path={folder}", "loop.steps=3")
    shared = start(tmp_path, "shared", *settings, observers=[reports.append])
    steps = [
        report.metrics for report in reports if report.phase == "step" and "reward/model" in report.metrics
    ]
    assert len(steps) == 3 and any(step["reward/model"] != 0.0 for step in steps)
    critic = ("placement.critic=0",) if workflow else ()
    assert fingerprint(start(tmp_path, "apart", *settings, *APART, *critic)) == fingerprint(shared)
    ruled = start(tmp_path, "ruled", *EXACT, *workflow, "loop.steps=3")
    assert fingerprint(ruled) != fingerprint(shared), "the score was meant to change what is learnt"
