"""Turn-level advantages: each turn of a multi-turn answer is credited with what came of it, not with the episode's sum.

return    discounted return of each turn, standardised over the same turn of the group's other samples (GTPO, arXiv
          2511.14846); a turn that no other sample reached is compared with all turns of the group
process   rewards standardised over all turns of the group, then summed from the turn on (arXiv 2402.03300 §4.1.3)

N token, T turn.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, TokenAdvantage
from rill.algorithms.advantages.group_statistics import within_groups
from rill.algorithms.advantages.grpo import standardise
from rill.algorithms.base import Reduce
from rill.algorithms.checks import required
from rill.algorithms.segments import discounted_tail
from rill.algorithms.turns import turns_of
from rill.config.base import PartConfig


class Turn(TokenAdvantage):
    scope = Scope.GROUP
    min_samples = 2

    class Config(PartConfig):
        type: Literal["turn"] = "turn"
        form: Literal["return", "process"] = "return"
        """See above."""
        gamma: float = Field(1.0, ge=0, le=1)
        """Discount per turn (form 'return')."""
        epsilon: float = Field(1e-6, ge=0)
        """Added to the standard deviation."""

    config: Config

    def tokens(self, batch: AdvantageBatch, rewards_N: Tensor, reduce: Reduce) -> Advantages:
        turns = turns_of(batch, rewards_N)
        group_T = required(batch, "group_S")[turns.seq_T].cpu().numpy()
        scaled = partial(standardise, epsilon=self.config.epsilon)
        if self.config.form == "return":
            returns_T = turns.returns(self.config.gamma).cpu().numpy()
            seq_T = turns.seq_T.cpu().numpy()
            place_T = np.arange(len(seq_T)) - np.searchsorted(seq_T, seq_T)
            of_all_T = within_groups(returns_T, group_T, scaled)
            keys = np.stack([group_T, place_T], axis=1)
            found_T = torch.from_numpy(within_groups(returns_T, keys, scaled, alone=of_all_T))
        else:
            scaled_T = within_groups(turns.rewards_T.cpu().numpy(), group_T, scaled)
            found_T = discounted_tail(torch.from_numpy(scaled_T), turns.seq_T.cpu(), 1.0)
        return Advantages(advantages_N=turns.spread(found_T.to(rewards_N.device), rewards_N))
