"""Trajectories by hand: a prompt of two tokens, then answers by turn with an observation between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rill.types import NOT_SAMPLED, Trajectory


def trajectory(
    name: str, *, reward: float = 0.0, turns: tuple[int, ...] = (3,), group: str = "g", **more: Any
) -> Trajectory:
    """`turns` are the trained tokens of each turn; one observed token lies between two turns."""
    sampled = [False, False]
    turn_ids = [0, 0]
    for number, length in enumerate(turns):
        if number:
            sampled.append(False)
            turn_ids.append(2 * number)
        sampled += [True] * length
        turn_ids += [2 * number + 1] * length
    mask = np.array(sampled)
    return Trajectory(
        **{
            "id": name,
            "group_id": group,
            "prompt_id": "p",
            "token_ids": np.arange(len(mask), dtype=np.int32),
            "logprobs": np.where(mask, -1.0, 0.0).astype(np.float32),
            "versions": np.where(mask, 1, NOT_SAMPLED).astype(np.int32),
            "loss_mask": mask,
            "turn_ids": np.array(turn_ids, dtype=np.int32),
            "reward": reward,
            **more,
        }
    )


def rewards_at(trajectory_length: int, **places: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """rewards_at(9, at4=1.0): the reward 1 at token 4."""
    given = np.zeros(trajectory_length, dtype=np.float32)
    for place, value in places.items():
        given[int(place.removeprefix("at"))] = value
    return given
