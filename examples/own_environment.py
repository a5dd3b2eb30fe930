"""An environment of your own: one function. The model is told when it is wrong, and may try again.

    rill train demo rollout.env.type=function rollout.env.function=examples.own_environment:second_try

    prompt │ "…=411" │ "\nwrong, again: " │ "…501"
             sampled    observation, mask 0  sampled; the reward is the last answer's

Every token that the model samples is kept as it came, with its mask, version and log-probability, whatever you do.
"""

from rill.envs.agent import Agents
from rill.envs.rewards.answers import AnswerForm, extract_answer
from rill.types import Prompt


async def second_try(task: Prompt, agents: Agents, tries: int = 2) -> float:
    """1 for a right answer at last, half of it for one that needed to be told."""
    reply = await agents.policy.generate(task)
    for tries_used in range(tries):
        if extract_answer(reply.text, AnswerForm.LAST_NUMBER) == str(task.answer):
            return 1.0 if tries_used == 0 else 0.5
        if tries_used + 1 < tries:
            reply = await agents.policy.generate(reply.then("\nwrong, again: ", role="user"))
    return 0.0
