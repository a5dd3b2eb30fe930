"""The scorer that comes with each reasoning-gym task. In a worker process: some scorers search."""

from __future__ import annotations

from typing import Literal

from rill.data.tasks.gym import import_gym
from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.envs.rewards.base import Isolation, RewardConfig
from rill.types import Prompt, Trajectory


class ReasoningGymReward:
    class Config(RewardConfig):
        type: Literal["reasoning_gym"] = "reasoning_gym"
        answer: AnswerForm = AnswerForm.TAG
        """Where the answer stands in the response."""

    isolation = Isolation.PROCESS

    def __init__(self, config: Config) -> None:
        self.config = config
        import_gym()

    def score(self, prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
        entry = prompt.metadata.get("gym_entry")
        if entry is None:
            raise ValueError(
                f"prompt {prompt.id} does not come from reasoning-gym: use another reward for it"
            )
        scorer = import_gym().get_score_answer_fn(prompt.metadata["gym_task"])
        return float(scorer(answer=extract_answer(response_text, self.config.answer), entry=entry))
