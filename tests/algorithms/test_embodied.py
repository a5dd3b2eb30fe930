"""Every number below is worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.algorithms.embodied import (
    EmbodiedAlgorithmConfig,
    Estimator,
    Level,
    chunk_gae,
    count_of,
    explained_variance,
    group_advantages,
    judge,
    ppo_loss,
)
from rill.algorithms.filters import DropReason

GAMMA, LAM = 0.5, 0.5


def gae(rewards: list[list[float]], executed: list[list[int]], values: list[float], **how: object):  # type: ignore[no-untyped-def]
    return chunk_gae(
        np.array(rewards, np.float32),
        np.array(executed, bool),
        np.array(values, np.float32),
        gamma=GAMMA,
        lam=LAM,
        **how,  # type: ignore[arg-type]
    )


def test_a_done_inside_a_chunk_discounts_by_the_actions_that_were_executed() -> None:
    # Chunk 0 plays 2 actions, R_0 = 0; chunk 1 plays 1 of 2, R_1 = 1, what stands behind it counts for nothing.
    # Δ_1 = 1 + 0 − 0.4 = 0.6; Δ_0 = 0 + γ²·0.4 − 0.2 = −0.1; A_0 = −0.1 + γ²·λ·0.6 = −0.025.
    found = gae([[0, 0], [1, 7]], [[1, 1], [1, 0]], [0.2, 0.4], final_value=99.0, terminated=True)
    assert found.advantages_C == pytest.approx([-0.025, 0.6])
    assert found.returns_C == pytest.approx([0.175, 1.0])


def test_truncation_bootstraps_from_the_final_observation_over_the_executed_actions() -> None:
    # One chunk of 3 whose episode is cut off after 1 action: Δ = 2 + γ¹·0.8 − 0.5 = 1.9.
    found = gae([[2, 0, 0]], [[1, 0, 0]], [0.5], final_value=0.8, terminated=False)
    assert found.advantages_C == pytest.approx([1.9])


def test_rewards_inside_a_chunk_are_discounted_one_by_one() -> None:
    # R = 1 + γ·1 + γ²·1 = 1.75; V' is discounted by γ³: 1.75 + 0.125·0.8 − 0 = 1.85.
    found = gae([[1, 1, 1]], [[1, 1, 1]], [0.0], final_value=0.8, terminated=False)
    assert found.advantages_C == pytest.approx([1.85])


def test_chunks_of_one_action_are_the_textbooks_gae() -> None:
    rewards, values, final = [1.0, 0.0, 2.0], [0.3, 0.6, 0.1], 0.7
    deltas = [1 + GAMMA * 0.6 - 0.3, 0 + GAMMA * 0.1 - 0.6, 2 + GAMMA * final - 0.1]
    wanted = [deltas[0] + 0.25 * (deltas[1] + 0.25 * deltas[2]), deltas[1] + 0.25 * deltas[2], deltas[2]]
    found = gae([[r] for r in rewards], [[1]] * 3, values, final_value=final, terminated=False)
    assert found.advantages_C == pytest.approx(wanted, abs=1e-6)


def test_groups_are_known_by_id_and_not_by_order() -> None:
    found = group_advantages([1, 5, 0, 5], ["a", "b", "a", "b"])
    assert found == pytest.approx([0.5**0.5, 0.0, -(0.5**0.5), 0.0], abs=1e-4), (
        "unbiased, as GRPO is everywhere"
    )
    assert group_advantages([0.1] * 3, ["a"] * 3).tolist() == [0.0] * 3


@pytest.mark.parametrize("level", list(Level))
def test_a_probability_that_has_run_away_gives_no_infinite_loss(level: Level) -> None:
    loss, grad, _ = loss_of(level, [[200.0, 0.0], [0.0, 0.0]], [-1.0, 0.0])
    assert np.isfinite(loss.policy.item()) and np.isfinite(loss.kl.item()) and grad.isfinite().all()


@pytest.mark.parametrize(
    ("successes", "reason"),
    [
        ([], DropReason.FAILED),
        ([True], DropReason.FAILED),
        ([False] * 8, DropReason.TOO_HARD),
        ([True] * 8, DropReason.TOO_EASY),
        ([True] * 4 + [False] * 4, None),
    ],
)
def test_groups_outside_the_band_of_success_are_dropped_with_their_reason(
    successes: list[bool], reason: DropReason | None
) -> None:
    config = EmbodiedAlgorithmConfig(estimator=Estimator.GROUP, min_success=0.1, max_success=0.9)
    assert judge(config, successes).reason is reason


def test_ppo_keeps_an_episode_of_its_own() -> None:
    assert judge(EmbodiedAlgorithmConfig(), [False]).keep


def loss_of(level: Level, change: list[list[float]], advantages: list[float]):  # type: ignore[no-untyped-def]
    """The second action of the second chunk was never executed."""
    executed = torch.tensor([[True, True], [True, False]])
    now = torch.tensor(change, requires_grad=True)
    config = EmbodiedAlgorithmConfig(level=level, clip_low=0.2, clip_high=0.3)
    zeros = torch.zeros(2)
    loss = ppo_loss(
        config,
        logprobs_BJ=now,
        old_logprobs_BJ=torch.zeros(2, 2),
        executed_BJ=executed,
        advantages_B=torch.tensor(advantages),
        entropies_BJ=torch.ones(2, 2),
        values_B=zeros,
        returns_B=torch.tensor([1.0, 2.0]),
    )
    loss.policy.backward()
    assert now.grad is not None
    return loss, now.grad, count_of(level, executed)


def test_a_chunks_ratio_is_over_its_executed_actions_and_clipped_as_one() -> None:
    ln = float(np.log(2.0))
    # Chunk 0: ratio 2·1 = 2, A = 1: cut at 1.3, no gradient. Chunk 1: ratio 1 (its second action does not count).
    loss, grad, count = loss_of(Level.CHUNK, [[ln, 0.0], [0.0, ln]], [1.0, -1.0])
    assert loss.policy.item() == pytest.approx(-1.3 + 1.0)
    assert grad.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert int(count) == 2 and loss.clipped.item() == 1.0
    assert loss.entropy.item() == 3.0 and loss.value.item() == pytest.approx(0.5 * 1 + 0.5 * 4)


def test_an_actions_ratio_is_its_own() -> None:
    ln = float(np.log(2.0))
    loss, grad, count = loss_of(Level.ACTION, [[ln, 0.0], [0.0, ln]], [1.0, -1.0])
    assert loss.policy.item() == pytest.approx(-1.3 - 1.0 + 1.0)
    assert grad.tolist() == [[0.0, -1.0], [1.0, 0.0]]
    assert int(count) == 3


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_the_mean() -> None:
    returns = np.array([0.0, 1.0, 2.0], np.float32)
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(np.full(3, 1.0, np.float32), returns) == pytest.approx(0.0)
