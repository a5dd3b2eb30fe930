"""On-policy distillation from a recipe: on the advantage, and over the whole vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rill.errors import ConfigError
from rill.workflows.loop import StepReport
from tests.e2e import tiny
from tests.e2e.test_sft import jsonl, whole  # noqa: F401  fixtures: a supervised model is the teacher

VOCABULARY = "algorithm.distillation.form=full_vocabulary"


def taught(root: Path, teacher: Path, *overrides: str) -> list[StepReport]:
    reports: list[StepReport] = []
    settings = ("algorithm.type=distill", f'teachers=[{{model={{path="{teacher}"}}}}]', "loop.steps=5")
    tiny.start(root, "taught", *settings, *overrides, observers=[reports.append])
    return [report for report in reports if report.phase == "step" and report.step > 0]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_over_the_vocabulary_the_student_comes_nearer_to_its_teacher(
    whole: tuple,  # type: ignore[type-arg]  # noqa: F811
    tmp_path: Path,
) -> None:
    steps = taught(tmp_path, whole[0].path / "model", VOCABULARY)
    divergence = [step.metrics["distillation/kl"] for step in steps]
    assert len(divergence) == 5 and divergence[-1] < 0.7 * divergence[0]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("workflow", [(), tiny.PPO[:1]], ids=["grpo", "ppo"])
def test_on_the_advantage_a_teacher_is_a_group_of_its_own(
    whole: tuple,  # type: ignore[type-arg]  # noqa: F811
    tmp_path: Path,
    workflow: tuple[str, ...],
) -> None:
    apart = ("cluster.devices=2", "placement.teacher=1", "algorithm.advantage=gae" if workflow else "seed=3")
    steps = taught(tmp_path, whole[0].path / "model", *workflow, *apart)
    assert len(steps) == 5


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("algorithm.type=distill",), "follows one teacher"),
        (("algorithm.type=distill", VOCABULARY), "needs \\[\\[teachers\\]\\]"),
        (('teachers=[{model={path="x"}}]',), "nothing to teach"),
    ],
)
def test_teachers_and_algorithm_must_go_together(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match=says):
        tiny.resolved(tiny.RECIPE, overrides)
