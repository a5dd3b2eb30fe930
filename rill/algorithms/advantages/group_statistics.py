"""Means and deviations of groups within a flat batch; an episode counts once, however many sequences it gave.

S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Scores
from rill.algorithms.checks import required
from rill.algorithms.segments import seq_sum


def within_groups(
    values: Scores,
    keys: npt.NDArray[Any],
    change: Callable[[Scores], Scores],
    *,
    alone: Scores | None = None,
) -> Scores:
    """`change` of the values of each group; a group is what has one key (a row of `keys`, where it is a matrix). With
    `alone`, a group of one has its value from there."""
    found = np.zeros_like(values) if alone is None else alone.copy()
    fewest = 1 if alone is None else 2
    _, number, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    for group in np.flatnonzero(count >= fewest):
        members = number.ravel() == group
        found[members] = change(values[members])
    return found


def episode_weights(batch: AdvantageBatch) -> Tensor:
    """1 / (sequences of the same episode), for each sequence."""
    if batch.episode_S is None:
        return torch.ones_like(batch.rewards_S)
    _, number_S, count = torch.unique(batch.episode_S, return_inverse=True, return_counts=True)
    weights_S: Tensor = 1.0 / count.to(batch.rewards_S)[number_S]
    return weights_S


def minus_group_mean(batch: AdvantageBatch, values_S: Tensor) -> Tensor:
    """v_i − mean of its group; a group of one has mean 0. Equal values give exact zeros."""
    return _centred(batch, values_S)[0]


def of_first_sequence(batch: AdvantageBatch, values_S: Tensor) -> Tensor:
    """The value of its episode's first sequence, for each sequence: that one begins where the episode does."""
    if batch.episode_S is None:
        return values_S
    _, first, number = np.unique(batch.episode_S.cpu().numpy(), return_index=True, return_inverse=True)
    return values_S[torch.from_numpy(first[number])]


def over_episode(batch: AdvantageBatch, values_S: Tensor) -> Tensor:
    """The sum over its episode's sequences, for each sequence."""
    return values_S if batch.episode_S is None else sum_over(batch.episode_S, values_S)


def sum_over(key_S: Tensor, values_S: Tensor) -> Tensor:
    """The sum over the sequences that share its key, for each sequence."""
    return _sum_of_groups(values_S, torch.unique(key_S, return_inverse=True)[1])


def minus_others_mean(batch: AdvantageBatch, values_S: Tensor) -> Tensor:
    """v_i − mean of its group's other episodes: E/(E − 1) · (v_i − mean); an only one has mean 0. The values of an
    episode's sequences are the same."""
    centred_S, size_S, _ = _centred(batch, values_S)
    return torch.where(size_S > 1.5, centred_S * size_S / (size_S - 1).clamp(min=0.5), centred_S)


def group_standardised(batch: AdvantageBatch, values_S: Tensor, epsilon: float) -> Tensor:
    """(v_i − mean of its group) / (unbiased std of its group + ε); a group of one has mean 0 and std 1."""
    centred_S, size_S, number_S = _centred(batch, values_S)
    squares_S = _sum_of_groups(centred_S.square() * episode_weights(batch), number_S)
    deviation_S = (squares_S / (size_S - 1).clamp(min=1e-9)).sqrt()
    deviation_S = torch.where(size_S > 1.5, deviation_S, torch.ones_like(deviation_S))
    return torch.where(centred_S == 0, centred_S, centred_S / (deviation_S + epsilon))


def _centred(batch: AdvantageBatch, values_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(v − mean, episodes of its group, number of its group) for each sequence."""
    _, number_S = torch.unique(required(batch, "group_S"), return_inverse=True)
    weights_S = episode_weights(batch)
    size_S = _sum_of_groups(weights_S, number_S)
    mean_S = _sum_of_groups(values_S * weights_S, number_S) / size_S
    centred_S = torch.where(size_S > 1.5, values_S - mean_S, values_S)
    count = int(number_S.max()) + 1 if number_S.numel() else 0
    ends = [
        torch.zeros(count, dtype=values_S.dtype, device=values_S.device).scatter_reduce(
            0, number_S, values_S, reduce=reduction, include_self=False
        )[number_S]
        for reduction in ("amin", "amax")
    ]
    is_equal_S = (ends[0] == ends[1]) & (size_S > 1.5)
    return torch.where(is_equal_S, torch.zeros_like(centred_S), centred_S), size_S, number_S


def _sum_of_groups(values_S: Tensor, number_S: Tensor) -> Tensor:
    """The sum over each sequence's group, given to each sequence."""
    count = int(number_S.max()) + 1 if number_S.numel() else 0
    return seq_sum(values_S, number_S, count)[number_S]
