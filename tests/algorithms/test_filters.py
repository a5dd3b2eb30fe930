import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rill.algorithms import Algorithm, AlgorithmConfig, DropReason
from rill.algorithms.filters import OverlongConfig, overlong_penalty
from tests.algorithms.trajectories import trajectory


def keep(rewards, **filters):
    trajectories = [trajectory(f"t{i}", reward=r) for i, r in enumerate(rewards)]
    verdict = Algorithm(AlgorithmConfig(filters=filters)).keep(trajectories)
    assert verdict.keep is (verdict.reason is None)
    return verdict.reason


def test_dynamic_sampling_drops_groups_that_teach_nothing():
    assert keep([1, 1, 1], drop_equal_rewards=True) is DropReason.EQUAL_REWARDS
    assert keep([1, 0, 1], drop_equal_rewards=True) is None
    assert keep([0.3, 0.3 + 1e-12], drop_equal_rewards=True) is DropReason.EQUAL_REWARDS
    assert keep([1, 1, 1]) is None
    assert keep([1.0], drop_equal_rewards=True) is None


def test_difficulty_is_a_band_of_mean_reward():
    band = {"min_mean_reward": 0.2, "max_mean_reward": 0.8}
    assert keep([0, 0, 0, 0.4], **band) is DropReason.TOO_HARD
    assert keep([1, 1, 1, 0.6], **band) is DropReason.TOO_EASY
    assert keep([1, 0], **band) is None


def test_empty_and_broken_groups_are_dropped_by_name():
    assert keep([]) is DropReason.EMPTY
    assert keep([1.0, float("nan")]) is DropReason.NOT_FINITE


def test_the_overlong_penalty_grows_over_the_buffer():
    config = OverlongConfig(limit_tokens=100, buffer_tokens=20, penalty=2.0)
    found = [overlong_penalty(n, config) for n in (0, 80, 85, 90, 100, 500)]
    assert found == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0]


@given(n=st.integers(0, 1000), limit=st.integers(1, 500), buffer=st.integers(1, 500), penalty=st.floats(0, 3))
def test_the_overlong_penalty_is_bounded_and_never_rewards_length(n, limit, buffer, penalty):
    config = OverlongConfig(limit_tokens=limit, buffer_tokens=min(buffer, limit), penalty=penalty)
    here, longer = overlong_penalty(n, config), overlong_penalty(n + 1, config)
    assert -penalty <= longer <= here <= 0


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValidationError, match="more than limit_tokens"):
        OverlongConfig(limit_tokens=10, buffer_tokens=11)
