"""Attention of one sequence in plain torch: what kernels are held against."""

from __future__ import annotations

import torch

from rill.models.eager import ScoreRule
from rill.models.ops.torch_kernels import _attend


def attend_one(
    query_QHD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Causal attention of the last Q of T tokens."""
    context = torch.tensor([len(key_TKD)], device=query_QHD.device)
    return _attend(query_QHD[None], key_TKD[None], value_TKD[None], context, rule)[0]
