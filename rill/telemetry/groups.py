"""The figures of one finished group, computed where it was made: the controller adds them up over a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rill.types import NOT_SAMPLED, Episode, Group, PolicyVersion, Trajectory

MIN_REPETITIVE = 64
"""Tokens: shorter answers repeat themselves by chance, or because they have to."""
PRIME = 1_000_003


def oldest_version(group: Group) -> PolicyVersion | None:
    """The oldest policy with a token in the group; None where nothing was sampled (every episode failed early)."""
    versions = [t.oldest_version for t in group.trajectories if t.oldest_version != NOT_SAMPLED]
    return min(versions, default=None)


def group_metrics(group: Group) -> dict[str, float]:
    """Means over the group's samples; rewards over those that have one."""
    trajectories = group.trajectories
    count = len(trajectories)
    metrics = {
        "length/response": sum(t.num_sampled for t in trajectories) / count,
        "length/total": group.num_tokens / count,
        "length/truncated": sum(t.is_truncated for t in trajectories) / count,
        "length/repeated": sum(is_repetitive(t) for t in trajectories) / count,
        "rollout/errors": sum(t.error is not None for t in trajectories) / count,
    }
    scored = [t for t in trajectories if t.error is None]
    if scored:
        rewards = np.array([t.reward for t in scored], np.float32)
        metrics |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for part in sorted({name for t in scored for name in t.reward_parts}):
            metrics[f"reward/{part}"] = sum(t.reward_parts.get(part, 0.0) for t in scored) / len(scored)
    return metrics


def is_repetitive(trajectory: Trajectory) -> bool:
    """Whether most of its runs of four sampled tokens have been said before in it."""
    said = trajectory.token_ids[trajectory.versions != NOT_SAMPLED].astype(np.int64)
    if len(said) < MIN_REPETITIVE:
        return False
    runs = ((said[:-3] * PRIME + said[1:-2]) * PRIME + said[2:-1]) * PRIME + said[3:]
    return len(np.unique(runs)) < len(runs) / 2


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over the episodes of what environments counted, and the share that failed, by reason."""
    metrics: dict[str, float] = {}
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        metrics[f"rollout/{name}"] = sum(e.metrics.get(name, 0.0) for e in episodes) / len(episodes)
    for reason in sorted({e.failure.value for e in episodes if e.failure is not None}):
        failed = sum(e.failure is not None and e.failure.value == reason for e in episodes)
        metrics[f"rollout/failed_{reason}"] = failed / len(episodes)
    return metrics
