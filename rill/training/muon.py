"""Muon: momentum made orthogonal, for the matrices inside the decoder.

Caller: rill.training.optim. It needs whole matrices, so a sharded one is gathered through its slot's template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rill.training.parallel import full, like, local_slice
from rill.training.slots import OptimizerConfig, Slot


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton–Schulz:  W ← W − lr · 0.2 · sqrt(max(rows, columns)) · orthogonal(M).

    The factor gives updates the size of AdamW's, so both share one learning rate. A sharded matrix is gathered, the
    iteration runs on the whole of it on every rank, and each rank keeps its part.
    """

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        self._slots = {id(s.master): s for s in slots}
        super().__init__(
            [s.master for s in slots],
            {"lr": config.learning_rate, "momentum": config.momentum, "weight_decay": config.weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                # A rank whose shard of an uneven matrix is empty still takes part in the gather.
                state = self.state[master]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(master)
                grad = master.grad if master.grad is not None else torch.zeros_like(master)
                state["momentum"].lerp_(grad, 1 - group["momentum"])
                nesterov = grad.lerp(state["momentum"], group["momentum"])
                template = self._slots[id(master)].template
                whole = full(like(nesterov, template))
                update = local_slice(orthogonalise(whole).to(master.dtype), template)
                master.mul_(1 - group["lr"] * group["weight_decay"])
                master.add_(update, alpha=-group["lr"] * 0.2 * max(whole.shape) ** 0.5)


def orthogonalise(matrix: Tensor, num_steps: int = 5) -> Tensor:
    """An approximate U Vᵀ of matrix = U S Vᵀ by a quintic Newton–Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
