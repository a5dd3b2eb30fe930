from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from rill.errors import InvalidSampleError
from rill.types import (
    NOT_SAMPLED,
    Group,
    Prompt,
    Sample,
    StopReason,
    Trajectory,
    Turn,
)


def trajectory(**changes: Any) -> Trajectory:
    """Two prompt tokens, two sampled by version 3, one observation, one sampled by version 4."""
    fields: dict[str, Any] = {
        "id": "t0",
        "group_id": "g0",
        "prompt_id": "p0",
        "token_ids": np.array([1, 2, 3, 4, 5, 6], dtype=np.int32),
        "logprobs": np.array([0, 0, -1, -2, 0, -3], dtype=np.float32),
        "versions": np.array([-1, -1, 3, 3, -1, 4], dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 0, 1], dtype=np.bool_),
        "turn_ids": np.array([0, 0, 1, 1, 2, 3], dtype=np.int32),
        "turns": (Turn(index=0, role="user", start=0, end=2),),
    }
    return Trajectory(**{**fields, **changes})


def test_a_trajectory_counts_its_tokens_by_who_made_them() -> None:
    found = trajectory()
    assert (found.num_tokens, found.num_prompt_tokens, found.num_sampled) == (6, 2, 3)
    assert found.oldest_version == 3


def test_a_trajectory_without_sampled_tokens_is_all_prompt() -> None:
    found = trajectory(versions=np.full(6, NOT_SAMPLED, dtype=np.int32))
    assert (found.num_prompt_tokens, found.num_sampled, found.oldest_version) == (6, 0, NOT_SAMPLED)


@pytest.mark.parametrize("name", ["logprobs", "versions", "loss_mask", "turn_ids", "routed_experts"])
def test_a_per_token_field_of_another_length_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidSampleError, match=f"{name} has 5 entries for 6 tokens"):
        trajectory(**{name: np.zeros(5, dtype=np.float32)})


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        trajectory().reward = 1.0  # type: ignore[misc]


def test_truncation_is_a_stop_reason() -> None:
    assert trajectory(stop_reason=StopReason.LENGTH).is_truncated
    assert not trajectory().is_truncated


def test_a_group_refuses_the_trajectory_of_another() -> None:
    with pytest.raises(InvalidSampleError, match="says group 'g1' but lies in 'g0'"):
        Group(id="g0", prompt=Prompt(id="p0"), trajectories=(trajectory(group_id="g1"),))


def test_a_group_adds_up() -> None:
    members = (trajectory(reward=1.0), trajectory(id="t1"))
    group = Group(id="g0", prompt=Prompt(id="p0"), trajectories=members)
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.num_tokens == 12


def test_a_sample_checks_its_fields_against_the_trajectory() -> None:
    sample = Sample(trajectory=trajectory(), advantages=np.zeros(6, dtype=np.float32))
    assert (sample.id, sample.num_tokens) == ("t0", 6)
    with pytest.raises(InvalidSampleError, match="old_logprobs has 4 entries"):
        Sample(
            trajectory=trajectory(),
            advantages=np.zeros(6, dtype=np.float32),
            old_logprobs=np.zeros(4, dtype=np.float32),
        )


def test_a_trajectory_survives_the_way_between_processes() -> None:
    back = pickle.loads(pickle.dumps(trajectory()))
    assert back.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert back.turns == trajectory().turns
