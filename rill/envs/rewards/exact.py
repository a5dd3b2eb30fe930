"""Exact match: the extracted answer is, character by character, the expected one."""

from __future__ import annotations

from typing import Literal

from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.envs.rewards.base import InlineReward, RewardConfig
from rill.types import Prompt, Trajectory


class ExactReward(InlineReward):
    class Config(RewardConfig):
        type: Literal["exact"] = "exact"
        answer: AnswerForm = AnswerForm.WHOLE
        """Where the answer stands in the response."""
        ignore_case: bool = False
        ignore_space: bool = False
        """Compare without any white space."""
        correct: float = 1.0
        """Value of a right answer."""
        wrong: float = 0.0
        """Value of a wrong or missing answer."""

    config: Config

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.id} has no answer to compare with")
        expected = prompt.answer if isinstance(prompt.answer, list | tuple) else [prompt.answer]
        given = extract_answer(response_text, self.config.answer)
        if given is None:
            return self.config.wrong
        is_right = any(self._normal(given) == self._normal(str(answer)) for answer in expected)
        return self.config.correct if is_right else self.config.wrong

    def _normal(self, text: str) -> str:
        text = "".join(text.split()) if self.config.ignore_space else text.strip()
        return text.casefold() if self.config.ignore_case else text
