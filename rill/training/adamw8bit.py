"""AdamW with moments in 8 bits, by torch operations, one parameter at a time: on any device, sharded or not.

Caller: rill.training.optim; on one GPU with bf16 copies rill.training.adamw_triton takes the same step in one launch.
The moments of a step are used before they are rounded. Vectors keep float32 moments: they are few and delicate.
Which parameters have codes depends on their global shape alone, so ranks of any number agree on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rill.training.blockwise import decode, encode, num_blocks
from rill.training.slots import Slot, SlotAdamW

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""State key, and whether its values have a sign."""
SCALE_SUFFIX = "_scale"


class EightBitAdamW(SlotAdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                slot = self._slots[id(master)]
                gradient = slot.gradient()
                if gradient is not None:
                    self._step_one(slot, gradient.float() * self.gradient_scale, group)

    def _step_one(self, slot: Slot, gradient: Tensor, group: dict[str, Any]) -> None:
        state, master = self.state[slot.master], slot.master
        if "step" not in state:
            state.update(new_state(slot))
        state["step"] += 1
        number = float(state["step"])
        beta1, beta2 = group["betas"]
        moments = decoded(state)
        mean = moments["exp_avg"].lerp_(gradient, 1 - beta1)
        square = moments["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = (square.sqrt() / (1 - beta2**number) ** 0.5).add_(group["eps"])
        master.mul_(1 - group["lr"] * group["weight_decay"])
        master.addcdiv_(
            mean.to(master.dtype), divisor.to(master.dtype), value=-group["lr"] / (1 - beta1**number)
        )
        write(state, moments)


def new_state(slot: Slot) -> dict[str, Tensor]:
    """Zero moments: codes and scales for matrices, float32 for vectors."""
    master = slot.master
    state = {"step": torch.zeros((), dtype=torch.float32)}
    for key in MOMENTS:
        if slot.template.ndim < 2:
            state[key] = torch.zeros_like(master, dtype=torch.float32)
        else:
            state[key] = torch.zeros_like(master, dtype=torch.uint8)
            blocks = num_blocks(master.numel())
            state[key + SCALE_SUFFIX] = torch.zeros(blocks, dtype=torch.float32, device=master.device)
    return state


def is_coded(state: dict[str, Any]) -> bool:
    return "exp_avg" + SCALE_SUFFIX in state


def decoded(state: dict[str, Any]) -> dict[str, Tensor]:
    """The moments in float32, in new memory where they have codes."""
    if not is_coded(state):
        return {key: state[key] for key in MOMENTS}
    return {
        key: decode(state[key], state[key + SCALE_SUFFIX], is_signed=is_signed)
        for key, is_signed in MOMENTS.items()
    }


def write(state: dict[str, Any], moments: dict[str, Tensor]) -> None:
    """Put moments back where decoded() took them from."""
    for key, is_signed in MOMENTS.items():
        if is_coded(state):
            codes, scales = encode(moments[key], is_signed=is_signed)
            state[key].copy_(codes)
            state[key + SCALE_SUFFIX].copy_(scales)
        elif state[key] is not moments[key]:
            state[key].copy_(moments[key])
