"""AdamW in one pass over memory for bf16 training: the only door of Triton in this room.

Reads the gradient in whatever precision the backward pass left it, updates the float32 master and its two moments, and
writes the module's low-precision copy: 28 bytes a parameter move, against 44 for copying, scaling, updating and
publishing one after another. The update is torch.optim.AdamW's; state has the same names, so checkpoints are
interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rill.training.optim import OptimizerConfig, Slot
from rill.training.parallel import local

_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    master_ptr,
    grad_ptr,
    mean_ptr,
    square_ptr,
    copy_ptr,
    num_elements,
    grad_scale,
    rate,
    beta1,
    beta2,
    epsilon,
    decay,
    correction1,
    correction2_sqrt,
    BLOCK: tl.constexpr,
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements
    grad = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * grad_scale
    master = tl.load(master_ptr + offsets, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + offsets, mask=inside, other=0.0)
    square = tl.load(square_ptr + offsets, mask=inside, other=0.0)
    mean = mean + (1.0 - beta1) * (grad - mean)
    square = beta2 * square + (1.0 - beta2) * grad * grad
    master = master * (1.0 - rate * decay)
    master = master - (rate / correction1) * mean / (tl.sqrt(square) / correction2_sqrt + epsilon)
    tl.store(master_ptr + offsets, master, mask=inside)
    tl.store(mean_ptr + offsets, mean, mask=inside)
    tl.store(square_ptr + offsets, square, mask=inside)
    tl.store(copy_ptr + offsets, master.to(copy_ptr.dtype.element_ty), mask=inside)


class CopyingAdamW(torch.optim.Optimizer):
    """AdamW on slots with copies; a slot without a gradient is left alone."""

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        self._slots = {id(s.master): s for s in slots}
        self.gradient_scale = 1.0
        super().__init__(
            [
                {"params": [s.master for s in slots if s.template.ndim >= 2], "decay": config.weight_decay},
                {"params": [s.master for s in slots if s.template.ndim < 2], "decay": 0.0},
            ],
            {"lr": config.learning_rate, "betas": config.betas, "epsilon": config.epsilon},
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                slot = self._slots[id(master)]
                grad = slot.gradient()
                if grad is not None:
                    self._update(master, grad.contiguous(), local(slot.template.detach()), group)

    def _update(self, master: Tensor, grad: Tensor, copy: Tensor, group: dict[str, Any]) -> None:
        state = self.state[master]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        state["step"] = state["step"].cpu() + 1
        number = float(state["step"])
        beta1, beta2 = group["betas"]
        count = master.numel()
        _adamw_kernel[(triton.cdiv(count, _BLOCK),)](
            master,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            copy,
            count,
            self.gradient_scale,
            group["lr"],
            beta1,
            beta2,
            group["epsilon"],
            group["decay"],
            1.0 - beta1**number,
            (1.0 - beta2**number) ** 0.5,
            BLOCK=_BLOCK,
        )
