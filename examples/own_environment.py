"""An environment of your own: the model is told when it is wrong, and may try again.

    rill train demo rollout.env.type=examples.own_environment:SecondTry rollout.env.reward.type=exact \
        rollout.env.reward.answer=last_number

    prompt │ "…=411" │ "\nwrong, again: " │ "…501"
             sampled    observation, mask 0  sampled; the reward is the last answer's

Token-in, token-out: `TrajectoryBuilder` keeps masks, versions and log-probabilities right, whatever the turns are.
"""

import numpy as np

from rill.envs.base import Policy
from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.envs.single_turn import SingleTurn
from rill.envs.trajectory_builder import TrajectoryBuilder
from rill.types import Prompt, SamplingParams, Trajectory


class SecondTry(SingleTurn):
    class Config(SingleTurn.Config):
        type: str  # type: ignore[assignment]
        tries: int = 2
        """Answers the model may give. 1: as `single_turn`."""
        complaint: str = "\nwrong, again: "
        """What it reads before another try."""

    config: Config

    async def rollout(
        self, prompt: Prompt, policy: Policy, *, trajectory_id: str, group_id: str, sampling: SamplingParams
    ) -> Trajectory:
        episode = TrajectoryBuilder(
            prompt, self.encoder.encode(prompt), trajectory_id=trajectory_id, group_id=group_id
        )
        complaint = np.asarray(self.encoder.encode_text(self.config.complaint, special=False))
        for tries_left in reversed(range(self.config.tries)):
            completion = await policy.generate(episode.token_ids, sampling)
            text = self.encoder.decode(completion.token_ids)
            episode.add_sampled(completion, text)
            if extract_answer(text, AnswerForm.LAST_NUMBER) == str(prompt.answer) or not tries_left:
                break
            episode.add_observation(complaint, self.config.complaint, role="user")
        return await self.rewards.score(prompt, episode.finish())
