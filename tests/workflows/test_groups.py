"""Samples of a group, and advantages of a batch, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.algorithms.base import one_rank
from rill.types import NOT_SAMPLED, Group, PolicyVersion, Prompt, StopReason, Trajectory
from rill.workflows.batch_advantages import with_batch_advantages
from rill.workflows.groups import oldest_version, samples_of


def algorithm(**settings: object) -> Algorithm:
    return Algorithm(AlgorithmConfig.model_validate(settings))


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


def test_a_cut_off_answer_is_not_trained_on_and_still_counts_in_the_baseline() -> None:
    made = group(trajectory(0, 1.0), trajectory(1, 0.0, stop_reason=StopReason.LENGTH))
    kept, cut = samples_of(made, algorithm(type="rloo", filters={"mask_truncated": True}), None)
    assert not cut.trajectory.loss_mask.any() and not cut.advantages.any()
    assert cut.trajectory.reward == 0.0
    np.testing.assert_allclose(kept.advantages, [0, 0, 1, 1, 1])


def test_an_answer_that_could_not_be_scored_is_left_out_of_the_loss_where_told() -> None:
    made = group(trajectory(0, 1.0), trajectory(1, 0.0, error="the reward timed out"))
    right, unknown = samples_of(made, algorithm(type="rloo", filters={"mask_failed": True}), None)
    assert not unknown.trajectory.loss_mask.any() and not unknown.advantages.any()
    np.testing.assert_allclose(right.advantages, [0, 0, 1, 1, 1])
    _, wrong = samples_of(made, algorithm(type="rloo"), None)
    np.testing.assert_allclose(wrong.advantages, [0, 0, -1, -1, -1])


def test_without_the_filter_a_cut_off_answer_is_trained_on() -> None:
    made = group(trajectory(0, 1.0), trajectory(1, 0.0, stop_reason=StopReason.LENGTH))
    _, cut = samples_of(made, algorithm(type="rloo"), None)
    np.testing.assert_allclose(cut.advantages, [0, 0, -1, -1, -1])


def test_the_greedy_baseline_reaches_advantages_that_the_trainer_computes() -> None:
    remax = algorithm(type="remax", kl={"coefficient": 0.1, "place": "reward"})
    assert not remax.is_group_scoped
    samples = samples_of(group(trajectory(0, 1.0), trajectory(1, 0.25)), remax, greedy_reward=0.5)
    zeros = np.zeros(5, np.float32)
    samples = [replace(s, old_logprobs=zeros, ref_logprobs=zeros) for s in samples]
    judged, figures = with_batch_advantages(samples, remax, one_rank)
    np.testing.assert_allclose(judged[0].advantages, [0, 0, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(judged[1].advantages, [0, 0, -0.25, -0.25, -0.25])
    assert figures["policy/kl_ref"] == 0.0


def test_figures_of_a_batch_are_means_over_all_ranks() -> None:
    kl = algorithm(type="remax", kl={"coefficient": 0.1, "place": "reward", "estimator": "k1"})
    ones = np.ones(5, np.float32)
    samples = [
        replace(s, old_logprobs=ones, ref_logprobs=np.zeros(5, np.float32))
        for s in samples_of(group(trajectory(0, 1.0)), kl, greedy_reward=0.0)
    ]
    _, alone = with_batch_advantages(samples, kl, one_rank)
    _, doubled = with_batch_advantages(samples, kl, lambda values: values * torch.tensor([2.0, 4.0]).double())
    assert alone["policy/kl_ref"] == 1.0
    assert doubled["policy/kl_ref"] == 0.5


def test_a_group_in_which_nothing_was_sampled_is_as_old_as_the_engine() -> None:
    silent = trajectory(0, 0.0, versions=np.full(5, NOT_SAMPLED, np.int32))
    assert oldest_version(group(silent), PolicyVersion(9)) == 9
    assert oldest_version(group(silent, trajectory(1, 0.0)), PolicyVersion(9)) == 4
