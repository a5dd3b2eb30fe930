from __future__ import annotations

import pytest
from pydantic import ValidationError

from rill.envs.calculator import Calculator
from rill.types import Prompt, StopReason, Trajectory
from tests.envs.scripted import Scripted, environment, play


async def played(policy: Scripted, answer: str, **settings: object) -> Trajectory:
    episode = await play(
        environment("calculator", **settings), policy, Prompt(id="p", text="q", answer=answer)
    )
    (sample,) = episode.samples
    return sample


async def test_the_calculator_is_called_and_its_results_are_not_trained_on() -> None:
    policy = Scripted("<calc>27*58</calc>", "<calc>1566+4</calc>", "1570")
    sample = await played(policy, "1570")
    assert sample.reward == 1.0
    roles = [t.role for t in sample.turns]
    assert roles == ["prompt", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [t.text for t in sample.turns if t.role == "tool"] == [
        "<result>1566</result>",
        "<result>1570</result>",
    ]
    for turn in sample.turns:
        assert sample.loss_mask[turn.start : turn.end].all() == (turn.role == "assistant")
    # Token-in, token-out: every call continues exactly what stands in the sample.
    for seen, turn in zip(policy.seen, [t for t in sample.turns if t.role == "assistant"], strict=True):
        assert seen == sample.token_ids[: turn.start].tolist()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("1/0", "error"),
        ("__import__('os')", "error"),
        ("2**10", "1024"),
        ("9**9**9**9", "error"),
        ("1+", "error"),
        ("7/2", "3.5"),
        ("-(3-5)*2", "4"),
        ("(" * 500 + "1" + ")" * 500, "error"),
    ],
)
async def test_the_calculator_survives_any_expression(asked: str, told: str) -> None:
    sample = await played(Scripted(f"<calc>{asked}</calc>", "done"), "done")
    said = next(t.text for t in sample.turns if t.role == "tool")
    assert said.startswith(f"<result>{told}") and sample.reward == 1.0


async def test_an_episode_ends_after_its_last_allowed_call() -> None:
    policy = Scripted(*["<calc>1+1</calc>"] * 5)
    sample = await played(policy, "x", max_calls=2)
    assert len([t for t in sample.turns if t.role == "tool"]) == 2 and len(policy.seen) == 3
    assert sample.reward == 0.0


async def test_a_cut_off_turn_keeps_its_stop_reason() -> None:
    sample = await played(Scripted("<calc>1+", stop=StopReason.LENGTH), "x")
    assert sample.stop_reason is StopReason.LENGTH and sample.is_truncated


def test_a_calculator_whose_results_nobody_would_see_is_refused() -> None:
    with pytest.raises(ValidationError, match="`result_template` must hold {result}"):
        Calculator.Config(result_template="<result></result>")
