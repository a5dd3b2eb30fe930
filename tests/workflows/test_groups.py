"""How old a group is."""

from __future__ import annotations

import numpy as np

from rill.types import NOT_SAMPLED, Group, PolicyVersion, Prompt, Trajectory
from rill.workflows.groups import oldest_version


def trajectory(number: int, reward: float, **fields: object) -> Trajectory:
    """Two prompt tokens, three answer tokens."""
    values: dict[str, object] = {
        "id": f"g/{number}",
        "group_id": "g",
        "prompt_id": "p",
        "token_ids": np.arange(5, dtype=np.int32),
        "logprobs": np.zeros(5, np.float32),
        "versions": np.array([-1, -1, 4, 4, 5], np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 1], np.bool_),
        "turn_ids": np.zeros(5, np.int32),
        "reward": reward,
    }
    return Trajectory(**{**values, **fields})  # type: ignore[arg-type]


def group(*trajectories: Trajectory) -> Group:
    return Group(id="g", prompt=Prompt(id="p"), trajectories=trajectories)


def test_a_group_in_which_nothing_was_sampled_is_as_old_as_the_engine() -> None:
    silent = trajectory(0, 0.0, versions=np.full(5, NOT_SAMPLED, np.int32))
    assert oldest_version(group(silent), PolicyVersion(9)) == 9
    assert oldest_version(group(silent, trajectory(1, 0.0)), PolicyVersion(9)) == 4
