"""From prompt to rewarded trajectory: token-in, token-out, with every invariant kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rill.envs.base import ENVIRONMENTS, open_environment
from rill.envs.calculator import Calculator
from rill.envs.trajectory_builder import TrajectoryBuilder, response_text
from rill.errors import InvalidSampleError
from rill.inference.base import Completion
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Message, Prompt, SamplingParams, StopReason, TokenIds


class Scripted:
    """A policy that says what it is told to."""

    def __init__(self, *replies: str, stop: StopReason = StopReason.EOS) -> None:
        self.tokenizer = build_char_tokenizer()
        self.replies = list(replies)
        self.stop = stop
        self.seen: list[list[int]] = []

    async def generate(self, token_ids: TokenIds, sampling: SamplingParams) -> Completion:
        self.seen.append(token_ids.tolist())
        ids = self.tokenizer.encode(self.replies.pop(0)) + [self.tokenizer.eos_token_id]
        return completion(ids, self.stop)


def completion(ids: list[int], stop: StopReason = StopReason.EOS, version: int = 3) -> Completion:
    return Completion(
        request_id="r",
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        stop_reason=stop,
    )


def environment(name: str = "single_turn", **settings: Any) -> Any:
    config = ENVIRONMENTS.load(name).Config.model_validate({"type": name, **settings})
    return open_environment(config, build_char_tokenizer())


async def play(env: Any, policy: Scripted, prompt: Prompt) -> Any:
    try:
        return await env.rollout(prompt, policy, trajectory_id="t", group_id="g", sampling=SamplingParams())
    finally:
        env.close()


async def test_an_answer_is_rewarded_and_masked_token_by_token() -> None:
    policy = Scripted("85")
    prompt = Prompt(id="p", text="27+58=", answer="85")
    trajectory = await play(environment(), policy, prompt)
    assert trajectory.reward == 1.0 and trajectory.reward_parts == {"exact": 1.0} and trajectory.error is None
    assert policy.seen == [trajectory.token_ids[:6].tolist()]
    assert trajectory.loss_mask.tolist() == [False] * 6 + [True] * 3
    assert trajectory.versions.tolist() == [-1] * 6 + [3] * 3
    assert trajectory.logprobs.tolist() == [0.0] * 6 + [-0.5] * 3
    assert trajectory.turn_ids.tolist() == [0] * 6 + [1] * 3
    assert response_text(trajectory) == "85" and trajectory.stop_reason is StopReason.EOS
    assert (trajectory.prompt_id, trajectory.group_id, trajectory.id) == ("p", "g", "t")


async def test_chat_prompts_use_the_template() -> None:
    policy = Scripted("4")
    prompt = Prompt(id="p", messages=(Message(role="user", content="2+2?"),), answer="4")
    trajectory = await play(environment(), policy, prompt)
    assert policy.tokenizer.decode(policy.seen[0]) == "<user>2+2?<assistant>"
    assert trajectory.reward == 1.0


async def test_a_failing_reward_is_data() -> None:
    env = environment(reward={"type": "numeric"}, scoring={"failure_value": -1.0})
    trajectory = await play(env, Scripted("4"), Prompt(id="p", text="q", answer="not a number"))
    assert trajectory.reward == -1.0 and "reward numeric" in trajectory.error


def build(prompt_ids: list[int]) -> TrajectoryBuilder:
    ids = np.array(prompt_ids, dtype=np.int32)
    return TrajectoryBuilder(Prompt(id="p", text="q"), ids, trajectory_id="t", group_id="g")


def test_the_builder_keeps_observations_out_of_the_loss() -> None:
    episode = build([1, 2])
    episode.add_sampled(completion([3, 4], version=5), "ask")
    episode.add_observation(np.array([7, 8, 9], dtype=np.int32), "told", tool="calculator")
    episode.add_sampled(completion([5], version=6), "answer")
    t = episode.finish(StopReason.ENV_DONE)
    assert t.token_ids.tolist() == [1, 2, 3, 4, 7, 8, 9, 5]
    assert t.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert t.versions.tolist() == [-1, -1, 5, 5, -1, -1, -1, 6]
    assert t.turn_ids.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]
    assert [(turn.role, turn.start, turn.end) for turn in t.turns] == [
        ("prompt", 0, 2), ("assistant", 2, 4), ("tool", 4, 7), ("assistant", 7, 8),
    ]  # fmt: skip
    assert response_text(t) == "answer" and t.oldest_version == 5 and t.stop_reason is StopReason.ENV_DONE


def test_the_builder_refuses_what_no_engine_may_say() -> None:
    with pytest.raises(InvalidSampleError, match="version -1"):
        build([1]).add_sampled(completion([2], version=-1))
    bad = completion([2, 3])
    object.__setattr__(bad, "logprobs", np.array([0.0, np.nan], dtype=np.float32))
    with pytest.raises(InvalidSampleError, match="not finite"):
        build([1]).add_sampled(bad)
    object.__setattr__(bad, "logprobs", np.zeros(1, dtype=np.float32))
    with pytest.raises(InvalidSampleError, match="1 log-probabilities"):
        build([1]).add_sampled(bad)


def test_routed_experts_are_laid_along_the_tokens() -> None:
    episode = build([1, 2])
    first = completion([3, 4])
    object.__setattr__(first, "routed_experts", np.full((4, 2, 1), 7, dtype=np.int16))  # prompt included
    episode.add_sampled(first)
    episode.add_observation(np.array([9], dtype=np.int32))
    experts = episode.finish().routed_experts
    assert experts is not None and experts[:, 0, 0].tolist() == [7, 7, 7, 7, -1]


async def test_the_calculator_is_called_and_its_results_are_not_trained_on() -> None:
    policy = Scripted("<calc>27*58</calc>", "<calc>1566+4</calc>", "1570")
    prompt = Prompt(id="p", text="27*58+4=", answer="1570")
    trajectory = await play(environment("calculator"), policy, prompt)
    assert trajectory.reward == 1.0 and trajectory.stop_reason is StopReason.ENV_DONE
    assert [t.role for t in trajectory.turns] == [
        "prompt",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [t.text for t in trajectory.turns if t.role == "tool"] == ["1566", "1570"]
    for turn in trajectory.turns:
        assert trajectory.loss_mask[turn.start : turn.end].all() == (turn.role == "assistant")
    # Token-in, token-out: every call continues exactly what stands in the trajectory.
    for seen, turn in zip(policy.seen, [t for t in trajectory.turns if t.role == "assistant"], strict=True):
        assert seen == trajectory.token_ids[: turn.start].tolist()
    assert trajectory.metadata["num_tool_calls"] == 2


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
    policy = Scripted(f"<calc>{asked}</calc>", "done")
    trajectory = await play(environment("calculator"), policy, Prompt(id="p", text="q", answer="done"))
    said = next(t.text for t in trajectory.turns if t.role == "tool")
    assert said.startswith(told) and trajectory.reward == 1.0


async def test_an_episode_ends_after_its_last_allowed_call() -> None:
    policy = Scripted(*["<calc>1+1</calc>"] * 5)
    trajectory = await play(
        environment("calculator", max_calls=2), policy, Prompt(id="p", text="q", answer="x")
    )
    assert len([t for t in trajectory.turns if t.role == "tool"]) == 2 and len(policy.seen) == 3
    assert trajectory.stop_reason is StopReason.ENV_DONE and trajectory.reward == 0.0


async def test_a_cut_off_turn_keeps_its_stop_reason() -> None:
    policy = Scripted("<calc>1+", stop=StopReason.LENGTH)
    trajectory = await play(environment("calculator"), policy, Prompt(id="p", text="q", answer="x"))
    assert trajectory.stop_reason is StopReason.LENGTH and trajectory.is_truncated


def test_a_calculator_whose_results_nobody_would_see_is_refused() -> None:
    with pytest.raises(ValidationError, match="`result_template` must hold {result}"):
        Calculator.Config(result_template="<result></result>")
