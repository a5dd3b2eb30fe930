"""Numeric match: the extracted answer is the expected number, within a tolerance; near misses may earn a part."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rill.envs.rewards.answers import AnswerForm, extract_answer, parse_number
from rill.envs.rewards.base import InlineReward, RewardConfig
from rill.types import Prompt, Trajectory


class NumericReward(InlineReward):
    class Config(RewardConfig):
        type: Literal["numeric"] = "numeric"
        answer: AnswerForm = AnswerForm.LAST_NUMBER
        """Where the answer stands in the response."""
        absolute_tolerance: float = Field(default=1e-6, ge=0)
        """An answer this near to the expected one is right."""
        relative_tolerance: float = Field(default=1e-9, ge=0)
        """As a share of the larger of the two. So small that up to a billion the next whole number is wrong."""
        partial: float = Field(default=0.0, ge=0)
        """Value of a number that is wrong: this times 1 / (1 + relative error). 0: off."""
        correct: float = 1.0
        wrong: float = 0.0
        """Value of no number, and the floor of a wrong one."""

    config: Config

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        config = self.config
        expected = parse_number(str(prompt.answer))
        if expected is None or not math.isfinite(expected):
            raise ValueError(f"prompt {prompt.id}: the answer {prompt.answer!r} is not a number")
        found = extract_answer(response_text, config.answer)
        given = None if found is None else parse_number(found)
        if given is None or not math.isfinite(given):
            return config.wrong
        if math.isclose(
            given, expected, rel_tol=config.relative_tolerance, abs_tol=config.absolute_tolerance
        ):
            return config.correct
        if config.partial == 0.0:
            return config.wrong
        error = abs(given - expected) / max(abs(expected), 1.0)
        return max(config.wrong, config.partial / (1.0 + error))
