"""The same seed and plan give the same bytes; so do other placements, and a run that was stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from rill.errors import RunError
from rill.journal.checkpoints import step_of, whole_checkpoints
from rill.planning.traced import read_history
from rill.telemetry.metrics import read_metrics
from rill.telemetry.run import Run
from rill.workflows.config import FlowConfig
from rill.workflows.loop import StepReport
from rill.workflows.steering import Steering
from tests.e2e.test_sft import assert_near
from tests.e2e.tiny import CORRECTED, EXACT, INVARIANT, PPO, fingerprint, resume, start

TWO_ENGINES = ("cluster.devices=3", "placement.rollout=0-1", "placement.actor=2")
ADAPTIVE = ("algorithm.kl.coefficient=0.05", "algorithm.kl.controller.type=adaptive")


class Mover(NamedTuple):
    """A pilot that puts groups on other devices after the third step."""

    placement: dict[str, str]

    def after_step(self, steering: Steering, report: StepReport) -> None:
        if report.step == 3:
            steering.switch(self.placement, FlowConfig(), ())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rollout", "actor"), [("1", "1"), ("0", "2"), ("0-1", "0")])
def test_two_engines_beside_the_trainer_that_move_give_the_same_weights(
    whole: Run, tmp_path: Path, rollout: str, actor: str
) -> None:
    """All onto one device; the engines alone; the trainer alone."""
    mover = Mover({"rollout": rollout, "actor": actor})
    split = start(tmp_path, "split", *EXACT, *TWO_ENGINES, "rollout.env_workers=1", pilot=mover)
    assert fingerprint(split) == fingerprint(whole)
    assert not any(row.values.get("sync/relaunches") for row in read_metrics(split.path))
    calls = read_history(split.path)
    assert {(call.group, *turn.devices) for call in calls for turn in call.turns} >= {
        ("rollout", 0), ("rollout", 1), ("actor", 2), ("actor", int(actor))
    }  # fmt: skip
    assert json.loads((split.path / "flow.json").read_text())["edges"]


@pytest.mark.slow
def test_a_run_stopped_after_a_checkpoint_and_resumed_gives_the_same_weights(
    whole: Run, tmp_path: Path
) -> None:
    assert fingerprint(stopped_and_resumed(tmp_path, *EXACT)) == fingerprint(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streamed_chunks_give_the_same_weights_on_any_placement(tmp_path: Path) -> None:
    """Training on the first chunk while the others are sampled, or on all of them after it: the same bits."""
    chunks = (INVARIANT, CORRECTED, "flow.granularity=1", "loop.order=admission")
    shared = start(tmp_path, "shared", *chunks)
    streamed = start(tmp_path, "streamed", *chunks, *TWO_ENGINES)
    apart = start(tmp_path, "apart", *chunks, *TWO_ENGINES, "rollout.env_workers=2")
    assert fingerprint(streamed) == fingerprint(shared) == fingerprint(apart)
    whole = start(tmp_path, "whole", INVARIANT, CORRECTED)
    assert fingerprint(whole) != fingerprint(shared), "other chunks round otherwise"
    assert_near(whole, shared, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        ("cluster.devices=2", "placement.rollout=0-1", "placement.actor=1"),
        ("cluster.devices=3", "placement.rollout=0-2", "placement.actor=0"),
    ],
    ids=["one of two engines beside the trainer", "one of three engines with the trainer"],
)
def test_hybrid_placement_gives_the_same_weights_as_shared_and_split(
    whole: Run, tmp_path: Path, placement: tuple[str, ...]
) -> None:
    assert fingerprint(start(tmp_path, "hybrid", *EXACT, *placement)) == fingerprint(whole)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ppo_with_four_models_gives_the_same_weights_twice_in_any_placement_and_resumed(
    tmp_path: Path,
) -> None:
    settings = (*EXACT, *PPO)
    shared = start(tmp_path, "shared", *settings)
    apart = ("cluster.devices=4", "placement.rollout=0", "placement.actor=1", "placement.critic=2")
    split = start(tmp_path, "split", *settings, *apart, "placement.reference=3")
    assert fingerprint(split) == fingerprint(shared)
    assert fingerprint(stopped_and_resumed(tmp_path, *settings)) == fingerprint(shared)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sft", [(), ("sft.steps=4",)], ids=["nothing saved", "after the supervised steps"])
def test_a_run_resumed_before_its_first_step_was_saved_gives_the_same_weights(
    tmp_path: Path, sft: tuple[str, ...]
) -> None:
    settings = (INVARIANT, "loop.checkpoint_every=0", *sft)
    phases: list[str] = []
    run = stopped(tmp_path, *settings)
    newest = [step_of(folder) for folder in whole_checkpoints(run)][-1:]
    assert newest == ([0] if sft else [])
    resume(run, observers=[lambda report: phases.append(report.phase)])
    assert "warm-up" not in phases, "what was learnt is not learnt again"
    assert fingerprint(run) == fingerprint(start(tmp_path, "undisturbed", *settings))


@pytest.mark.slow
def test_another_seed_gives_other_weights(whole: Run, tmp_path: Path) -> None:
    assert fingerprint(start(tmp_path, "other", *EXACT, "seed=4")) != fingerprint(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_resumed_run_keeps_the_kl_coefficient_and_the_names_of_refilled_groups(tmp_path: Path) -> None:
    settings = (INVARIANT, "algorithm.filters.drop_equal_rewards=true", *ADAPTIVE)
    whole = start(tmp_path, "whole", *settings)
    assert fingerprint(stopped_and_resumed(tmp_path, *settings)) == fingerprint(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps_ahead", [1, 2])
def test_an_asynchronous_run_resumes_with_the_groups_it_had_begun(tmp_path: Path, steps_ahead: int) -> None:
    reports: list[StepReport] = []
    settings = (*TWO_ENGINES, f"loop.max_lag={steps_ahead}", "loop.order=admission")
    run = stopped(tmp_path, *settings)
    resume(run, observers=[reports.append])
    assert reports[-1].step == 4
    assert max(report.metrics.get("lag/max", 0.0) for report in reports) <= steps_ahead


def stopped_and_resumed(root: Path, *settings: str) -> Run:
    return resume(stopped(root, *settings))


def stopped(root: Path, *settings: str) -> Run:
    """Ends after its third step; its last checkpoint is of the second."""

    def stop(report: StepReport) -> None:
        if report.phase == "step" and report.step == 3:
            raise RunError("stopped by the test")

    with pytest.raises(RunError, match="stopped by the test"):
        start(root, "stopped", *settings, observers=[stop])
    return Run.open("stopped", root=root)
