"""GDPO (arXiv 2601.05242): every part of the reward standardised within the group by itself, then their sum over the
batch. Parts of different spread keep their say where one sum would drown the smaller."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, TokenAdvantage
from rill.algorithms.advantages.group_statistics import episode_weights, group_standardised
from rill.algorithms.base import Reduce
from rill.algorithms.whitening import moments
from rill.config.base import PartConfig
from rill.errors import InvalidSampleError


class GDPO(TokenAdvantage):
    min_samples = 2
    reads_rewards = False

    class Config(PartConfig):
        type: Literal["gdpo"] = "gdpo"
        weights: dict[str, float] = Field(default_factory=dict)
        """Reward parts and their weights. Empty: every part that all samples have, with weight 1."""
        epsilon: float = Field(1e-6, ge=0)
        """Added to the standard deviations."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        """A_i = whiten over all episodes of Σ_k w_k (r_ik − mean_g r_k) / (std_g r_k + ε)."""
        weights = self.config.weights or dict.fromkeys(batch.parts_S, 1.0)
        missing = sorted(weights.keys() - batch.parts_S.keys())
        if batch.is_scored and (missing or not weights):
            raise InvalidSampleError(
                f"gdpo weighs the parts {sorted(weights) or '(none)'} of the reward, the samples have "
                f"{sorted(batch.parts_S) or 'none'}: use a mix of rewards, or mend advantage.weights"
            )
        total_S = torch.zeros_like(batch.rewards_S)
        for name in sorted(weights.keys() & batch.parts_S.keys()):
            part_S = batch.parts_S[name].to(total_S)
            total_S = total_S + weights[name] * group_standardised(batch, part_S, self.config.epsilon)
        mean, variance = moments(total_S, episode_weights(batch), reduce)
        white_S = ((total_S - mean) / (variance.sqrt() + self.config.epsilon)).to(total_S)
        return Advantages(advantages_N=white_S[batch.seq_N] * batch.mask_N)
