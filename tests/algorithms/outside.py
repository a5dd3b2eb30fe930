"""A loss as a user would add it: one class in a file of their own, named in the recipe."""

from typing import Literal

import torch

from rill.algorithms.base import TokenBatch, TokenLoss
from rill.algorithms.losses.base import PolicyLoss
from rill.config.base import PartConfig


class Constant(PolicyLoss):
    class Config(PartConfig):
        type: Literal["tests.algorithms.outside:Constant"] = "tests.algorithms.outside:Constant"
        value: float = 1.0
        """Every token's loss."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __call__(self, batch: TokenBatch) -> TokenLoss:
        return TokenLoss(loss_N=torch.full_like(batch.logprobs_N, self.config.value))
