"""AdamW in one pass over memory for bf16 training, one launch for all parameters: the only door of Triton in this room.

Reads the gradient in whatever precision the backward pass left it, updates the float32 master and its two moments, and
writes the module's low-precision copy: 28 bytes a parameter move, against 44 for copying, scaling, updating and
publishing one after another. The update is torch.optim.AdamW's; state has the same names, so checkpoints are
interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rill.models.attention_packed import copy_in
from rill.training.optim import OptimizerConfig, Slot
from rill.training.parallel import local

_BLOCK = 2048
_CHUNK = 32 * _BLOCK
"""Elements of one program: large enough that few programs start, small enough that the last ones end together."""


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    addresses_ptr,
    constants_ptr,
    chunks_ptr,
    grad_scale,
    rate,
    beta1,
    beta2,
    epsilon,
    IS_EVEN: tl.constexpr,
    GRAD: tl.constexpr,
    COPY: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    row = addresses_ptr + 6 * tensor
    # The hints say what the host made sure of; without them every access would be of one element.
    master_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(tl.float32)), 16)
    square_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(tl.float32)), 16)
    grad_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(GRAD)), 16)
    copy_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(COPY)), 16)
    num_elements = tl.load(row + 5)
    if IS_EVEN:
        num_elements = tl.multiple_of(num_elements, 16)
    decay = tl.load(constants_ptr + 3 * tensor)
    correction1 = tl.load(constants_ptr + 3 * tensor + 1)
    correction2_sqrt = tl.load(constants_ptr + 3 * tensor + 2)
    for start in range(0, CHUNK, BLOCK):
        offsets = first + start + tl.arange(0, BLOCK)
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
        tl.store(copy_ptr + offsets, master.to(COPY), mask=inside)


@dataclass(slots=True)
class _Launch:
    """Tensors of one gradient and copy precision, updated together; those of odd sizes apart from the rest, whose
    ends need no care."""

    addresses: list[tuple[int, ...]]
    """master, mean, square, gradient, copy, number of elements."""
    constants: list[tuple[float, float, float]]
    """Weight decay and the two bias corrections."""
    kept: list[Tensor]
    """Gradients that must outlive the launch."""


class CopyingAdamW(torch.optim.Optimizer):
    """AdamW on slots with copies; a slot without a gradient is left alone."""

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        self._slots = {id(s.master): s for s in slots}
        self._chunks: dict[tuple[int, ...], Tensor] = {}
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
        launches: dict[tuple[bool, torch.dtype, torch.dtype], _Launch] = {}
        for group in self.param_groups:
            for master in group["params"]:
                slot = self._slots[id(master)]
                grad = slot.gradient()
                if grad is not None:
                    copy = local(slot.template.detach())
                    kind = master.numel() % 16 == 0, grad.dtype, copy.dtype
                    launch = launches.setdefault(kind, _Launch([], [], []))
                    self._add(launch, master, _aligned(grad), copy, group)
        for kind, launch in launches.items():
            self._run(launch, *kind)

    def _add(
        self, launch: _Launch, master: Tensor, grad: Tensor, copy: Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[master]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        state["step"] = state["step"].cpu()  # a checkpoint may have put it elsewhere
        state["step"] += 1
        number = float(state["step"])
        beta1, beta2 = group["betas"]
        tensors = (master, state["exp_avg"], state["exp_avg_sq"], grad, copy)
        launch.addresses.append((*(t.data_ptr() for t in tensors), master.numel()))
        launch.constants.append((group["decay"], 1.0 - beta1**number, (1.0 - beta2**number) ** 0.5))
        launch.kept.append(grad)

    def _run(self, launch: _Launch, is_even: bool, grad_dtype: torch.dtype, copy_dtype: torch.dtype) -> None:
        device = launch.kept[0].device
        sizes = tuple(a[-1] for a in launch.addresses)
        if sizes not in self._chunks:
            self._chunks[sizes] = copy_in(_chunks_of(sizes), device)
        chunks = self._chunks[sizes]
        group = self.param_groups[0]
        _adamw_kernel[(len(chunks),)](
            copy_in(np.array(launch.addresses, dtype=np.int64), device),
            copy_in(np.array(launch.constants, dtype=np.float32), device),
            chunks,
            self.gradient_scale,
            group["lr"],
            *group["betas"],
            group["epsilon"],
            IS_EVEN=is_even,
            GRAD=_TYPES[grad_dtype],
            COPY=_TYPES[copy_dtype],
            CHUNK=_CHUNK,
            BLOCK=_BLOCK,
            num_warps=8,
        )


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _aligned(grad: Tensor) -> Tensor:
    """The kernel reads 16 bytes at a time; autograd may hand out a slice that starts anywhere."""
    grad = grad.contiguous()
    return grad if grad.data_ptr() % 16 == 0 else grad.clone()


def _chunks_of(sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """int32 [programs, 2]: which tensor, and which chunk of it."""
    counts = -(-np.asarray(sizes) // _CHUNK)
    tensors = np.repeat(np.arange(len(sizes)), counts)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([tensors, numbers], axis=1).astype(np.int32)
