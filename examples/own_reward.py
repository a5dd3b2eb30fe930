"""A reward of your own: one function.

    rill train demo rollout.env.reward.type=function rollout.env.reward.function=examples.own_reward:short_and_right

Copy this file anywhere; what stands before the colon is its module, found from the folder you start `rill` in. It
runs in a process of its own under a time limit. A sample for which it raises or hangs is not trained on; the log names
the error with its file and line, and a guard says how many there are.
"""

from rill.types import Prompt, Trajectory


def short_and_right(prompt: Prompt, response_text: str, trajectory: Trajectory) -> float:
    """1 for a right answer, and up to 1 more the fewer tokens it took. Evaluations count 1 and above as right."""
    is_right = response_text.strip().endswith(str(prompt.answer))
    return 1.0 + 1.0 / trajectory.num_sampled if is_right else 0.0
