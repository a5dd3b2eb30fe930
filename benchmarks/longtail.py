"""The load that several benchmarks share: one question, one answer, and a response length drawn from a long tail.

Random weights end their answers at random, so a benchmark that wants realistic lengths has to set them. `LongTail`
draws the length of every sample from a log-normal distribution, by the sample's id alone: the same run asks for the
same tokens on every machine, at any lag.

answer_tokens = 0   the whole response has the drawn length and is trained on; its reward is a coin (for step times).
answer_tokens > 0   an ordinary answer is sampled and scored first; then a tail of the drawn length follows, which costs
                    sampling and training time like any other token but stays out of the loss (for learning curves).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from typing import Any

import numpy as np
from pydantic import Field

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.types import Prompt

LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class LongTail(Environment):
    class Config(Environment.Config):
        type: str
        median_tokens: int = Field(384, ge=1)
        sigma: float = Field(0.7, ge=0)
        """Spread of the logarithm of the length. 0: every response has the median length."""
        max_tokens: int = Field(1024, ge=1)
        warmup_groups: int = Field(0, ge=0)
        """The first so many groups get responses of `warmup_tokens`: a cheap first step that compiles everything."""
        warmup_tokens: int = Field(32, ge=1)
        longer_from: int = Field(0, ge=0)
        """Groups from this one on get responses `longer` times as long: a model that learns to reason, all at once."""
        longer: float = Field(1.0, gt=0)
        answer_tokens: int = Field(0, ge=0)
        """Longest answer before the tail. 0: the whole response is the tail."""
        tool_s: float = Field(0.0, ge=0)
        """That an answer waits before its tail, as for a slow tool (answer_tokens > 0)."""
        reward_s: float = Field(0.0, ge=0)
        """Of plain Python that scores each response (answer_tokens = 0)."""

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> float:
        config, policy = self.config, agents.policy
        length = self.length_of(agents.episode_id, agents.group_id)
        if config.answer_tokens == 0:
            await policy.generate(task, max_new_tokens=length, ignore_eos=True)
            end_s = time.thread_time() + config.reward_s
            while time.thread_time() < end_s:  # holds the interpreter, as a user's parser does
                pass
            return float(number_of(agents.episode_id + "reward") % 2)
        answer = await policy.generate(task, max_new_tokens=config.answer_tokens)
        await asyncio.sleep(config.tool_s)
        await policy.generate(answer.then(""), max_new_tokens=length, ignore_eos=True, is_trained=False)
        return float(extract_answer(answer.text, AnswerForm.LAST_NUMBER) == str(task.answer))

    def length_of(self, trajectory_id: str, group_id: str) -> int:
        config = self.config
        number = int(group_id[1:]) if group_id[:1] == "g" and group_id[1:].isdigit() else 0
        if number < config.warmup_groups:
            return config.warmup_tokens
        normal = np.random.default_rng(number_of(trajectory_id)).standard_normal()
        length = max(1, min(config.max_tokens, round(config.median_tokens * math.exp(config.sigma * normal))))
        return round(length * config.longer) if number >= config.longer_from else length


def random_question(index: int, seed: int) -> dict[str, Any]:
    """For the dataset "generated": a question of 100 to 200 random characters."""
    rng = np.random.default_rng((seed, index))
    letters = rng.integers(0, len(LETTERS), rng.integers(100, 201))
    return {"question": "".join(LETTERS[i] for i in letters), "answer": "0"}


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
