"""GiGPO (arXiv 2505.10978): groups within groups. Beside its episode's advantage, a turn has one against the other
turns of the group that answered the same observation, its anchor, in whichever episode and at whichever time.

    A = A^E + ω A^S,    A^S = (G − mean of the anchor's turns) / F,    G = Σ γ^l r of what came from the turn on

F is the deviation, or 1 where `scale` is off, of both parts. An observation that was met once says nothing: A^S = 0.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, TokenAdvantage
from rill.algorithms.advantages.dr_grpo import centre
from rill.algorithms.advantages.group_statistics import (
    group_standardised,
    minus_group_mean,
    within_groups,
)
from rill.algorithms.advantages.grpo import standardise
from rill.algorithms.base import Reduce
from rill.algorithms.checks import required
from rill.algorithms.turns import turns_of
from rill.config.base import PartConfig


class GiGPO(TokenAdvantage):
    scope = Scope.GROUP
    min_samples = 2

    class Config(PartConfig):
        type: Literal["gigpo"] = "gigpo"
        weight: float = Field(1.0, ge=0)
        """ω: of the advantage among an anchor's turns."""
        gamma: float = Field(0.95, ge=0, le=1)
        """Discount per turn of what came of it."""
        scale: bool = True
        """Divide by the deviation of the group, and of the anchor's turns."""
        epsilon: float = Field(1e-6, ge=0)
        """Added to the deviation."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        config, turns = self.config, turns_of(batch, rewards_N)
        whole_S = (
            group_standardised(batch, batch.rewards_S, config.epsilon)
            if config.scale
            else minus_group_mean(batch, batch.rewards_S)
        )
        returns_T = turns.returns(config.gamma).cpu().numpy()
        anchor_T = required(batch, "anchor_N")[turns.first_token()].cpu().numpy()
        group_T = required(batch, "group_S")[turns.seq_T].cpu().numpy()
        change = partial(standardise, epsilon=config.epsilon) if config.scale else centre
        keys = np.stack([group_T, anchor_T], axis=1)
        step_T = within_groups(returns_T, keys, change, alone=np.zeros_like(returns_T))
        both_T = whole_S.double()[turns.seq_T] + config.weight * torch.from_numpy(step_T).to(turns.rewards_T)
        return Advantages(advantages_N=turns.spread(both_T, rewards_N))
