"""Advantages that need the whole batch (REINFORCE++, GAE, KL in the reward), computed where the samples lie.

Statistics over ranks go through the `reduce` that the caller brings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rill.algorithms import AdvantageBatch, Algorithm, Reduce
from rill.algorithms.base import Metric
from rill.types import Floats, Sample
from rill.workflows.groups import GREEDY_REWARD


def with_batch_advantages(
    samples: Sequence[Sample], algorithm: Algorithm, reduce: Reduce
) -> tuple[list[Sample], dict[str, float]]:
    """The samples with advantages, and with returns where a critic's values are there; and figures over all ranks.

    Groups must be whole on a rank.
    """
    groups = {group: i for i, group in enumerate(dict.fromkeys(s.trajectory.group_id for s in samples))}
    lengths = [sample.num_tokens for sample in samples]
    batch = AdvantageBatch(
        mask_N=_flat([s.trajectory.loss_mask.astype(np.float32) for s in samples]),
        seq_N=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths, dtype=torch.int64)),
        num_seqs=len(samples),
        rewards_S=torch.tensor([s.trajectory.reward for s in samples], dtype=torch.float32),
        group_S=torch.tensor([groups[s.trajectory.group_id] for s in samples], dtype=torch.int64),
        logprobs_N=_column(samples, "old_logprobs"),
        greedy_rewards_S=_greedy_rewards(samples),
        ref_logprobs_N=_column(samples, "ref_logprobs"),
        values_N=_column(samples, "values"),
    )
    result = algorithm.batch_advantages(batch, reduce)
    advantages = _cut(result.advantages_N, lengths)
    returns = _cut(result.returns_N, lengths) if result.returns_N is not None else [None] * len(samples)
    judged = [
        replace(s, advantages=a, returns=r) for s, a, r in zip(samples, advantages, returns, strict=True)
    ]
    return judged, _figures(result.metrics, reduce)


def _figures(metrics: Mapping[str, Metric], reduce: Reduce) -> dict[str, float]:
    """Means over all ranks. Every rank has the same names, whatever samples it has."""
    names = sorted(name for name, metric in metrics.items() if not metric.is_max)
    if not names:
        return {}
    pairs = torch.stack([torch.stack([metrics[n].total, metrics[n].weight]).double() for n in names])
    sums = reduce(pairs).tolist()
    return {
        name: total / weight if weight else 0.0 for name, (total, weight) in zip(names, sums, strict=True)
    }


def _greedy_rewards(samples: Sequence[Sample]) -> Tensor | None:
    """What rollout workers noted of the greedy answers (see rill.workflows.groups); None without them."""
    found = [sample.trajectory.metadata.get(GREEDY_REWARD) for sample in samples]
    return None if not found or None in found else torch.tensor(found, dtype=torch.float32)


def _column(samples: Sequence[Sample], name: str) -> Tensor | None:
    values = [getattr(sample, name) for sample in samples]
    return None if any(value is None for value in values) else _flat(values)


def _flat(columns: Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns).astype(np.float32)) if columns else torch.empty(0)


def _cut(flat_N: Tensor, lengths: Sequence[int]) -> list[Floats]:
    parts = torch.split(flat_N.detach().cpu(), list(lengths))
    return [part.numpy().astype(np.float32) for part in parts]
