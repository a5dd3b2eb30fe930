from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from rill.envs.base import Environment, Policy, open_environment
from rill.envs.single_turn import SingleTurn
from rill.errors import EngineError, TooLongError
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Prompt, SamplingParams, StopReason, Trajectory
from tests.envs.test_single_turn import Scripted

PROMPT = Prompt(id="p", text="1+1=", answer="2")


class Failing(SingleTurn):
    class Config(SingleTurn.Config):
        type: str  # type: ignore[assignment]
        how: Literal["raises", "engine", "cancelled", "too long"]

    config: Config

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        match self.config.how:
            case "raises":
                raise ConnectionError("the tool server said 503")
            case "too long":
                raise TooLongError("request t#0: 407 tokens, and at most 127 fit here")
            case "engine":
                raise EngineError("out of memory")
            case _:
                raise asyncio.CancelledError


def environment(how: str) -> Environment:
    config = Failing.Config.model_validate({"type": f"{__name__}:Failing", "how": how})
    return open_environment(config, build_char_tokenizer())


async def episode(how: str) -> Trajectory:
    return await environment(how).rollout(
        PROMPT, Scripted("2"), trajectory_id="t", group_id="g", sampling=SamplingParams()
    )


async def test_what_an_environment_raises_becomes_a_trajectory_that_trains_nothing_and_says_why() -> None:
    failed = await episode("raises")
    assert failed.error == "environment: ConnectionError: the tool server said 503"
    assert failed.stop_reason is StopReason.ERROR
    assert failed.reward == 0.0
    assert failed.num_sampled == 0 and not failed.loss_mask.any()
    assert (failed.id, failed.group_id, failed.prompt_id) == ("t", "g", "p")


async def test_errors_of_rills_own_and_cancelled_episodes_pass() -> None:
    with pytest.raises(EngineError):
        await episode("engine")
    with pytest.raises(asyncio.CancelledError):
        await episode("cancelled")


async def test_a_prompt_that_does_not_fit_the_context_costs_its_sample_and_not_the_run() -> None:
    failed = await episode("too long")
    assert failed.error == "environment: TooLongError: request t#0: 407 tokens, and at most 127 fit here"
    assert failed.num_sampled == 0
