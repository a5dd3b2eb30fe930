"""Refuse tokens that are too old: sampled by a policy more than so many versions before this step's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rill.algorithms.base import Need, TokenBatch
from rill.algorithms.checks import required
from rill.algorithms.corrections.base import Correction, CorrectionWeights, masking
from rill.config.base import PartConfig


class LagLimit(Correction):
    needs = frozenset({Need.LAG})

    class Config(PartConfig):
        type: Literal["lag_limit"] = "lag_limit"
        max_lag: int = Field(ge=0)
        """Policy versions; an older token is dropped, its younger neighbours are not."""
        renormalise: bool = True
        """Take dropped tokens out of the aggregation's denominator too."""

    config: Config

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        """1 where lag ≤ max_lag, else 0."""
        weights_N = (required(batch, "lag_N") <= self.config.max_lag).to(batch.mask_N.dtype)
        return masking(weights_N, batch.mask_N, renormalise=self.config.renormalise)
