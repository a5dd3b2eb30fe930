"""A decoder with one number per token in place of a vocabulary: critics and reward models.

The backbone is any Hugging Face causal language model without its head. A fresh head starts at zero, so that a new
critic predicts 0 and a new reward model prefers nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """hidden → one float32 number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_KD: Tensor) -> Tensor:
        # In float32 whatever the decoder computes in: values of nearby states differ in few bits.
        return hidden_KD.float() @ self.weight[0].float() + self.bias.float()
