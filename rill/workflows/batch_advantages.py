"""Advantages that need the whole batch (REINFORCE++, GAE, KL in the reward), computed where the samples lie.

Statistics over ranks go through the `reduce` that the caller brings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rill.algorithms import AdvantageBatch, Algorithm, Reduce
from rill.types import Floats, Sample


def with_batch_advantages(samples: Sequence[Sample], algorithm: Algorithm, reduce: Reduce) -> list[Sample]:
    """The samples with advantages, and with returns where a critic's values are there. Groups must be whole."""
    groups = {group: i for i, group in enumerate(dict.fromkeys(s.trajectory.group_id for s in samples))}
    lengths = [sample.num_tokens for sample in samples]
    batch = AdvantageBatch(
        mask_N=_flat([s.trajectory.loss_mask.astype(np.float32) for s in samples]),
        seq_N=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths, dtype=torch.int64)),
        num_seqs=len(samples),
        rewards_S=torch.tensor([s.trajectory.reward for s in samples], dtype=torch.float32),
        group_S=torch.tensor([groups[s.trajectory.group_id] for s in samples], dtype=torch.int64),
        logprobs_N=_column(samples, "old_logprobs"),
        ref_logprobs_N=_column(samples, "ref_logprobs"),
        values_N=_column(samples, "values"),
    )
    result = algorithm.batch_advantages(batch, reduce)
    advantages = _cut(result.advantages_N, lengths)
    returns = _cut(result.returns_N, lengths) if result.returns_N is not None else [None] * len(samples)
    return [replace(s, advantages=a, returns=r) for s, a, r in zip(samples, advantages, returns, strict=True)]


def _column(samples: Sequence[Sample], name: str) -> Tensor | None:
    values = [getattr(sample, name) for sample in samples]
    return None if any(value is None for value in values) else _flat(values)


def _flat(columns: Sequence[Floats]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns).astype(np.float32)) if columns else torch.empty(0)


def _cut(flat_N: Tensor, lengths: Sequence[int]) -> list[Floats]:
    parts = torch.split(flat_N.detach().cpu(), list(lengths))
    return [part.numpy().astype(np.float32) for part in parts]
