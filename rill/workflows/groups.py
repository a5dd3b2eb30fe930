"""From a finished group to samples: advantages where the group lives.

Pure functions over one group; called by rollout workers.
"""

from __future__ import annotations

from rill.algorithms import Algorithm
from rill.types import NOT_SAMPLED, Group, PolicyVersion, Sample, Trajectory


def samples_of(group: Group, algorithm: Algorithm, greedy: Trajectory | None) -> list[Sample]:
    """One sample per trajectory. Advantages that need more than the group are left at 0 for the trainer to fill."""
    samples = algorithm.as_samples(group.trajectories, greedy)
    return algorithm.advantages(samples)[0] if algorithm.is_group_scoped else samples


def oldest_version(group: Group, now: PolicyVersion) -> PolicyVersion:
    """The oldest policy with a token in the group; `now` where nothing was sampled (every episode failed early)."""
    versions = [t.oldest_version for t in group.trajectories if t.oldest_version != NOT_SAMPLED]
    return min(versions, default=now)


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
