"""Turn-level advantages: each turn of a multi-turn answer is credited with what came of it, not with the episode's sum.

return    discounted return of each turn, standardised over the same turn of the group's other samples (GTPO, arXiv
          2511.14846); a turn that no other sample reached is compared with all turns of the group
process   rewards standardised over all turns of the group, then summed from the turn on (arXiv 2402.03300 §4.1.3)

N token, T turn.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms.advantages.base import AdvantageBatch, Advantages, Scope, Scores, TokenAdvantage
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
        if self.config.form == "return":
            returns_T = turns.returns(self.config.gamma).cpu().numpy()
            advantages_T = self._by_turn(returns_T, group_T, turns.seq_T.cpu().numpy())
        else:
            scaled_T = torch.from_numpy(self._over_groups(turns.rewards_T.cpu().numpy(), group_T))
            advantages_T = discounted_tail(scaled_T, turns.seq_T.cpu(), 1.0).numpy()
        found_T = torch.from_numpy(advantages_T).to(rewards_N.device)
        return Advantages(advantages_N=turns.spread(found_T, rewards_N))

    def _over_groups(self, values_T: Scores, group_T: npt.NDArray[np.int64]) -> Scores:
        found_T = np.zeros_like(values_T)
        for group in np.unique(group_T):
            members = group_T == group
            found_T[members] = standardise(values_T[members], self.config.epsilon)
        return found_T

    def _by_turn(
        self, values_T: Scores, group_T: npt.NDArray[np.int64], seq_T: npt.NDArray[np.int64]
    ) -> Scores:
        found_T = self._over_groups(values_T, group_T)
        first_T = np.searchsorted(seq_T, seq_T)  # turns of one sequence lie one after another
        keys = np.stack([group_T, np.arange(len(seq_T)) - first_T], axis=1)
        _, number_T, count = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        for number in np.flatnonzero(count > 1):
            members = number_T.ravel() == number
            found_T[members] = standardise(values_T[members], self.config.epsilon)
        return found_T
