"""No correction: every weight is 1. The mismatch is still measured."""

from __future__ import annotations

from typing import Literal

import torch

from rill.algorithms.base import TokenBatch
from rill.algorithms.corrections.base import Correction, CorrectionWeights
from rill.config.base import PartConfig


class NoCorrection(Correction):
    needs = frozenset()

    class Config(PartConfig):
        type: Literal["none"] = "none"

    def weights(self, batch: TokenBatch) -> CorrectionWeights:
        return CorrectionWeights(weights_N=torch.ones_like(batch.mask_N))
