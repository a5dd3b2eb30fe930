"""Every preset in every RL workflow: it takes a step, or is refused with one line before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.algorithms import PRESETS
from rill.errors import ConfigError
from rill.workflows.loop import StepReport
from tests.e2e.tiny import RECIPE, resolved, start

TEACHER = 'teachers=[{model={path="x"}}]'
NEEDS_TEACHER = {"distill"}
WORKFLOWS = ("grpo", "ppo")


def settings(preset: str, workflow: str) -> list[str]:
    return [
        f"workflow={workflow}",
        f"algorithm.type={preset}",
        *([TEACHER] if preset in NEEDS_TEACHER else []),
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_fits_its_workflow_or_is_refused_in_one_line(preset: str, workflow: str) -> None:
    try:
        config = resolved(RECIPE, settings(preset, workflow))
    except ConfigError as refusal:
        said = str(refusal)
        assert len(said.splitlines()) == 1 and ":" in said, said
    else:
        assert config.algorithm.type == preset


def test_some_presets_fit_each_workflow_and_none_fits_neither() -> None:
    def fits(preset: str, workflow: str) -> bool:
        try:
            resolved(RECIPE, settings(preset, workflow))
        except ConfigError:
            return False
        return True

    fitting = {workflow: {p for p in PRESETS if fits(p, workflow)} for workflow in WORKFLOWS}
    assert {"grpo", "dapo", "reinforce_pp", "remax"} <= fitting["grpo"]
    assert "ppo" in fitting["ppo"] and not fitting["ppo"] & {"grpo", "rloo"}
    assert fitting["grpo"] | fitting["ppo"] == set(PRESETS)


def test_what_is_too_long_for_the_trainer_is_for_the_critic_unless_it_says_otherwise() -> None:
    """With on_too_long = skip a run would end at an answer that its critic cannot take."""
    chosen = [
        "workflow=ppo",
        "algorithm.type=ppo",
        "trainer.on_too_long=skip",
        "trainer.micro_batch_tokens=99",
    ]
    critic = resolved(RECIPE, chosen).model_dump()["critic"]
    assert (critic["on_too_long"], critic["micro_batch_tokens"]) == ("skip", 99)
    critic = resolved(RECIPE, [*chosen, "critic.micro_batch_tokens=50"]).model_dump()["critic"]
    assert (critic["on_too_long"], critic["micro_batch_tokens"]) == ("skip", 50)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("algorithm.type=ppo",), "critic"),
        (("workflow=ppo", "algorithm.type=grpo"), "trains a critic"),
        (("rollout.group_size=1",), "at least 2"),
        (("rollout.sampling.top_p=0.9",), "cuts the distribution"),
        (("flow.edges={critic=2}",), "groups that consume samples"),
    ],
)
def test_what_cannot_run_is_refused_at_once(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(RECIPE, overrides)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("apart", [(), ("cluster.devices=3", "placement.rollout=0", "placement.actor=1-2")])
@pytest.mark.parametrize(
    "algorithm",
    [
        ("algorithm.type=reinforce_pp",),
        ("algorithm.type=remax",),
        ("algorithm.type=grpo", "algorithm.kl.coefficient=0.05", "algorithm.kl.place=reward"),
        ("workflow=ppo", "algorithm.type=ppo", "algorithm.kl.coefficient=0.05", "algorithm.kl.place=reward"),
    ],
    ids=lambda chosen: "-".join(each.rpartition("=")[2] for each in chosen),
)
def test_those_that_need_more_than_a_group_take_a_step_on_one_rank_and_on_two(
    tmp_path: Path, algorithm: tuple[str, ...], apart: tuple[str, ...]
) -> None:
    reports: list[StepReport] = []
    small = ("loop.steps=1", "eval.num_prompts=0", "trainer.compute_dtype=bfloat16", "flow.granularity=2")
    start(tmp_path, "step", *algorithm, *apart, *small, observers=[reports.append])
    assert reports[-1].step == 1 and reports[-1].metrics["policy/loss"] == reports[-1].metrics["policy/loss"]
