"""From a finished group to samples: the filter's verdict, shaped rewards, advantages where the group lives.

Pure functions over one group; called by rollout workers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rill.algorithms import Algorithm
from rill.types import NOT_SAMPLED, Group, PolicyVersion, Sample, Trajectory

GREEDY_REWARD = "greedy_reward"
"""In a trajectory's metadata: the reward of the greedy answer to its prompt, for baselines computed by the trainer."""


def shaped(trajectory: Trajectory, algorithm: Algorithm) -> Trajectory:
    """The trajectory with the penalty for an over-long answer in its reward."""
    reward = algorithm.shape_reward(trajectory.reward, trajectory.num_sampled)
    return trajectory if reward == trajectory.reward else replace(trajectory, reward=reward)


def samples_of(group: Group, algorithm: Algorithm, greedy_reward: float | None) -> list[Sample]:
    """One sample per trajectory. Advantages that need the whole batch are left at 0 for the trainer to fill."""
    if not algorithm.is_group_scoped:
        trajectories = [_with_greedy(t, greedy_reward) for t in group.trajectories]
        return [
            Sample(trajectory=trained_part(t, algorithm), advantages=np.zeros(t.num_tokens, np.float32))
            for t in trajectories
        ]
    lengths = np.array([np.count_nonzero(t.loss_mask) for t in group.trajectories])
    advantages = algorithm.group_advantages(group.rewards, lengths, greedy_reward)
    samples = []
    for whole, advantage in zip(group.trajectories, advantages, strict=True):
        t = trained_part(whole, algorithm)
        values = np.where(t.loss_mask, advantage, 0.0).astype(np.float32)
        samples.append(Sample(trajectory=t, advantages=values))
    return samples


def trained_part(trajectory: Trajectory, algorithm: Algorithm) -> Trajectory:
    """The trajectory with the loss mask it is trained with: none of it, where cut-off answers, or those that could not
    be scored, are not to be learnt.

    Their reward stays, so they count in their group's baseline.
    """
    filters = algorithm.config.filters
    is_cut_off = filters.mask_truncated and trajectory.is_truncated
    is_unknown = filters.mask_failed and trajectory.error is not None
    if not (is_cut_off or is_unknown):
        return trajectory
    return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))


def oldest_version(group: Group, now: PolicyVersion) -> PolicyVersion:
    """The oldest policy with a token in the group; `now` where nothing was sampled (every episode failed early)."""
    versions = [t.oldest_version for t in group.trajectories if t.oldest_version != NOT_SAMPLED]
    return min(versions, default=now)


def _with_greedy(trajectory: Trajectory, greedy_reward: float | None) -> Trajectory:
    if greedy_reward is None:
        return trajectory
    return replace(trajectory, metadata={**trajectory.metadata, GREEDY_REWARD: greedy_reward})


def group_metrics(group: Group) -> dict[str, float]:
    """Means over the group's samples."""
    trajectories = group.trajectories
    count = len(trajectories)
    metrics = {
        "reward/mean": float(group.rewards.mean()),
        "reward/std": float(group.rewards.std()),
        "length/response": sum(t.num_sampled for t in trajectories) / count,
        "length/total": group.num_tokens / count,
        "length/truncated": sum(t.is_truncated for t in trajectories) / count,
        "rollout/errors": sum(t.error is not None for t in trajectories) / count,
    }
    for part in sorted({name for t in trajectories for name in t.reward_parts}):
        metrics[f"reward/{part}"] = sum(t.reward_parts.get(part, 0.0) for t in trajectories) / count
    return metrics
