"""From trajectories to samples with advantages: pure functions, called where the data lives.

Guarantees: a reward lands where it was given (by token, by turn, or at the end); baselines go by (group, agent) and an
episode counts once in them, however many samples it gave; what failed is in no baseline and in no loss unless
filters.train_failed asks for it; the over-long penalty is part of the advantage and never of Trajectory.reward, and
like that the same on every sample of an agent's episode.

N token, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch
from rill.algorithms.base import Metric, Reduce
from rill.algorithms.filters import FilterConfig, overlong_penalty
from rill.types import Bits, Floats, Sample, Trajectory

if TYPE_CHECKING:
    from rill.algorithms.algorithm import Algorithm

GREEDY_REWARD = "greedy_reward"
"""In a trajectory's metadata: its agent's reward in the greedy episode of its prompt."""


def as_samples(
    trajectories: Sequence[Trajectory],
    filters: FilterConfig,
    greedy: Sequence[Trajectory],
) -> list[Sample]:
    """One sample to each trajectory, its advantages still 0. `greedy` are those of the greedy episode."""
    samples = []
    greedy_rewards = {t.agent: t.reward + p for t, p in zip(greedy, _penalties(greedy, filters), strict=True)}
    for trajectory in trajectories:
        if greedy:  # where an agent had no part in it, it was given nothing
            reward = greedy_rewards.get(trajectory.agent, 0.0)
            trajectory = replace(trajectory, metadata={**trajectory.metadata, GREEDY_REWARD: reward})
        samples.append(Sample(trajectory=trajectory, advantages=_zeros(trajectory)))
    return samples


def fill_advantages(
    samples: Sequence[Sample], algorithm: Algorithm, reduce: Reduce, keeps: Callable[[int], bool]
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with advantages, and returns where the estimator has them, in their order; metrics over all ranks.
    One whose number of tokens is not kept counts in its group's baseline all the same."""
    filters = algorithm.config.filters
    left_out = _left_out(samples, filters, algorithm.advantage.min_samples)
    scored = [s for s, out in zip(samples, left_out, strict=True) if not out]
    masks = [_trained(s.trajectory, filters, keeps) for s in scored]
    result = algorithm.batch_advantages(advantage_batch(scored, masks, filters), reduce)
    lengths = [s.num_tokens for s in scored]
    has_returns = result.returns_N is not None
    returns = [None] * len(scored) if result.returns_N is None else _cut(result.returns_N, lengths)
    refused = [False] * len(scored) if result.left_out_S is None else result.left_out_S.tolist()
    columns = (masks, _cut(result.advantages_N, lengths), returns, refused)
    found = iter(zip(*columns, strict=True))
    filled = []
    for sample, out in zip(samples, left_out, strict=True):
        t, nothing = sample.trajectory, _zeros(sample.trajectory)
        mask, values, gains, is_refused = (
            (t.loss_mask, nothing, nothing if has_returns else None, True) if out else next(found)
        )
        t = replace(t, loss_mask=np.zeros_like(mask) if is_refused else mask)
        filled.append(replace(sample, trajectory=t, advantages=values, returns=gains))
    return filled, reduced_metrics(result.metrics, reduce)


def advantage_batch(
    samples: Sequence[Sample], masks: Sequence[Bits], filters: FilterConfig
) -> AdvantageBatch:
    """What an estimator sees of the samples."""
    found = [s.trajectory for s in samples]
    penalties = _penalties(found, filters)
    lengths = torch.tensor([t.num_tokens for t in found], dtype=torch.int64)
    is_spread = any(t.rewards is not None for t in found)
    whole = [set(t.reward_parts) for t in found if t.error is None]  # what failed may have no parts
    names = set.intersection(*whole) if whole else {name for t in found for name in t.reward_parts}
    return AdvantageBatch(
        mask_N=_flat([mask.astype(np.float32) for mask in masks]),
        seq_N=torch.repeat_interleave(torch.arange(len(found)), lengths),
        num_seqs=len(found),
        rewards_S=_column([t.reward + p for t, p in zip(found, penalties, strict=True)]),
        group_S=_numbers([(t.group_id, t.agent) for t in found]),
        episode_S=_numbers([(_episode(t), t.agent) for t in found]),
        lengths_S=_column([float(np.count_nonzero(t.loss_mask)) for t in found]),
        parts_S={name: _column([t.reward_parts.get(name, 0.0) for t in found]) for name in sorted(names)},
        is_scored=bool(whole),
        greedy_rewards_S=_greedy(found),
        token_rewards_N=_flat(
            [placed_rewards(t, m, p) for t, m, p in zip(found, masks, penalties, strict=True)]
        )
        if is_spread
        else None,
        turn_N=_flat([t.turn_ids for t in found]).to(torch.int64),
        anchor_N=_anchors(found),
        logprobs_N=_field(samples, "old_logprobs"),
        ref_logprobs_N=_field(samples, "ref_logprobs"),
        values_N=_field(samples, "values"),
        energies_N=_field(samples, "energies"),
    )


def placed_rewards(trajectory: Trajectory, mask: Bits, penalty: float) -> Floats:
    """Each reward on the last trained token up to where it was given; what came before the first one is nobody's here.
    The penalty, and what of the reward has no place, go to the last."""
    placed = _zeros(trajectory)
    trained = np.flatnonzero(mask)
    if not trained.size:
        return placed
    given = trajectory.rewards if trajectory.rewards is not None else placed.copy()
    places = np.flatnonzero(given)
    owner = np.searchsorted(trained, places, side="right") - 1
    np.add.at(placed, trained[owner[owner >= 0]], given[places[owner >= 0]])
    placed[trained[-1]] += trajectory.reward - float(given.sum()) + penalty
    return placed


def reduced_metrics(metrics: Mapping[str, Metric], reduce: Reduce) -> dict[str, float]:
    """Means over all ranks. Every rank has the same names, whatever samples it has."""
    names = sorted(name for name, metric in metrics.items() if not metric.is_max)
    if not names:
        return {}
    pairs = torch.stack([torch.stack([metrics[n].total, metrics[n].weight]).double() for n in names])
    sums = reduce(pairs).tolist()
    return {
        name: total / weight if weight else 0.0 for name, (total, weight) in zip(names, sums, strict=True)
    }


def _left_out(samples: Sequence[Sample], filters: FilterConfig, min_samples: int) -> list[bool]:
    """What failed, and what is left of a group that failures made too small to compare."""
    failed = [s.trajectory.error is not None and not filters.train_failed for s in samples]
    episodes: dict[tuple[str, str], set[str]] = {}
    broken: set[tuple[str, str]] = set()
    for sample, is_failed in zip(samples, failed, strict=True):
        t = sample.trajectory
        group = (t.group_id, t.agent)
        if is_failed:
            broken.add(group)
        else:
            episodes.setdefault(group, set()).add(_episode(t))
    small = {group for group in broken if len(episodes.get(group, ())) < min_samples}
    return [
        is_failed or (s.trajectory.group_id, s.trajectory.agent) in small
        for s, is_failed in zip(samples, failed, strict=True)
    ]


def _trained(trajectory: Trajectory, filters: FilterConfig, keeps: Callable[[int], bool]) -> Bits:
    is_off = (filters.mask_truncated and trajectory.is_truncated) or not keeps(trajectory.num_tokens)
    return np.zeros_like(trajectory.loss_mask) if is_off else trajectory.loss_mask


def _penalties(found: Sequence[Trajectory], filters: FilterConfig) -> list[float]:
    """Of each sample: that of the longest which its agent gave in its episode."""
    if filters.overlong is None:
        return [0.0] * len(found)
    longest: dict[tuple[str, str], int] = {}
    for t in found:
        longest[_episode(t), t.agent] = max(longest.get((_episode(t), t.agent), 0), t.num_sampled)
    return [overlong_penalty(longest[_episode(t), t.agent], filters.overlong) for t in found]


def _episode(trajectory: Trajectory) -> str:
    return trajectory.episode_id or trajectory.id


def _numbers(names: Sequence[object]) -> Tensor:
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names], dtype=torch.int64)


def _anchors(found: Sequence[Trajectory]) -> Tensor:
    """Of every token, the number of what lies before its turn: an observation, or the prompt."""
    numbers: dict[bytes, int] = {}
    columns = []
    for t in found:
        starts = [0, *(np.flatnonzero(np.diff(t.turn_ids)) + 1).tolist(), t.num_tokens]
        column = np.empty(t.num_tokens, dtype=np.int64)
        seen = b""
        for start, end in pairwise(starts):
            column[start:end] = numbers.setdefault(seen, len(numbers))
            seen = t.token_ids[start:end].tobytes()
        columns.append(column)
    return torch.from_numpy(np.concatenate(columns)) if columns else torch.empty(0, dtype=torch.int64)


def _greedy(found: Sequence[Trajectory]) -> Tensor | None:
    rewards = [t.metadata.get(GREEDY_REWARD) for t in found]
    return None if not rewards or None in rewards else _column([float(r) for r in rewards if r is not None])


def _field(samples: Sequence[Sample], name: str) -> Tensor | None:
    values = [getattr(sample, name) for sample in samples]
    return None if any(value is None for value in values) else _flat(values)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _flat(columns: Sequence[np.ndarray[tuple[int], np.dtype[np.generic]]]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns).astype(np.float32)) if columns else torch.empty(0)


def _cut(flat_N: Tensor, lengths: Sequence[int]) -> list[Floats]:
    parts = torch.split(flat_N.detach().cpu(), list(lengths))
    return [part.numpy().astype(np.float32) for part in parts]


def _zeros(trajectory: Trajectory) -> Floats:
    return np.zeros(trajectory.num_tokens, dtype=np.float32)
