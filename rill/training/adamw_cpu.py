"""AdamW in one pass over memory on the CPU: scale, moments, master and the module's bfloat16 copy together.

Caller: rill.training.optim, for type "adamw" on the CPU where the kernels are. The update is torch.optim.AdamW's; state
has the same names, so checkpoints are interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rill.models.cpu_training import AdamWRates, TrainingKernels
from rill.training.parallel import local
from rill.training.slots import OptimizerConfig, Slot, adam_defaults, parameter_groups


class CpuAdamW(torch.optim.Optimizer):
    """A slot without a gradient is left alone."""

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig, kernels: TrainingKernels) -> None:
        self._slots = {id(s.master): s for s in slots}
        self._kernels = kernels
        self.gradient_scale = 1.0
        super().__init__(parameter_groups(slots, config.weight_decay), adam_defaults(config))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                slot = self._slots[id(master)]
                grad = slot.gradient()
                if grad is None:
                    continue
                state = self.state[master]
                if "step" not in state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(master)
                    state["exp_avg_sq"] = torch.zeros_like(master)
                state["step"] += 1
                rates = AdamWRates(
                    gradient_scale=self.gradient_scale,
                    learning_rate=group["lr"],
                    weight_decay=group["weight_decay"],
                    betas=group["betas"],
                    epsilon=group["eps"],
                    step=int(state["step"]),
                )
                copy = local(slot.template.detach()) if slot.has_copy else None
                self._kernels.adamw_(
                    master, grad.contiguous(), state["exp_avg"], state["exp_avg_sq"], copy, rates
                )
