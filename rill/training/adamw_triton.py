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


@dataclass(frozen=True, slots=True)
class _Update:
    """One slot's part in the next launch."""

    slot: Slot
    arrived: Tensor
    """The slot's gradient; while it is still that one, what was prepared holds."""
    grad: Tensor
    """The same values where the kernel can read them."""
    state: dict[str, Any]
    decay: float

    @property
    def kind(self) -> tuple[bool, torch.dtype, torch.dtype]:
        """One launch takes one precision of gradients and copies; odd sizes go apart, for their ends need care."""
        return self.slot.master.numel() % 16 == 0, self.grad.dtype, self.slot.template.dtype

    def addresses(self) -> tuple[int, ...]:
        """Of master, mean, square, gradient and copy, and the number of elements."""
        state, copy = self.state, local(self.slot.template.detach())
        tensors = (self.slot.master, state["exp_avg"], state["exp_avg_sq"], self.grad, copy)
        return (*(t.data_ptr() for t in tensors), copy.numel())


class CopyingAdamW(torch.optim.Optimizer):
    """AdamW on slots with copies; a slot without a gradient is left alone."""

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        self._slots = {id(s.master): s for s in slots}
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        self._updates: list[_Update] = []
        self._launches: list[tuple[tuple[bool, torch.dtype, torch.dtype], tuple[Tensor, ...]]] = []
        self.gradient_scale = 1.0
        super().__init__(
            [
                {"params": [s.master for s in slots if s.template.ndim >= 2], "decay": config.weight_decay},
                {"params": [s.master for s in slots if s.template.ndim < 2], "decay": 0.0},
            ],
            {"lr": config.learning_rate, "betas": config.betas, "epsilon": config.epsilon},
        )

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the tables of the next step() from the gradients as they are now: host work of a millisecond or two,
        best done while the device is still busy with the backward pass."""
        self._updates = [
            self._update(self._slots[id(master)], group["decay"])
            for group in self.param_groups
            for master in group["params"]
            if self._slots[id(master)].gradient() is not None
        ]
        by_kind: dict[tuple[bool, torch.dtype, torch.dtype], list[_Update]] = {}
        for update in self._updates:
            by_kind.setdefault(update.kind, []).append(update)
        self._launches = [(kind, self._tables(updates)) for kind, updates in by_kind.items()]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._is_prepared():
            self.prepare()
        group = self.param_groups[0]
        for (is_even, grad_dtype, copy_dtype), tables in self._launches:
            _adamw_kernel[(len(tables[-1]),)](
                *tables,
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
        for update in self._updates:
            update.state["step"] += 1
        self._updates, self._launches = [], []

    def _is_prepared(self) -> bool:
        prepared = {id(u.slot.master): u.arrived for u in self._updates}
        return bool(prepared) and all(
            slot.gradient() is prepared.get(master) for master, slot in self._slots.items()
        )

    def _update(self, slot: Slot, decay: float) -> _Update:
        state, grad = self.state[slot.master], slot.gradient()
        assert grad is not None
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(slot.master)
            state["exp_avg_sq"] = torch.zeros_like(slot.master)
        state["step"] = state["step"].cpu()  # a checkpoint may have put it elsewhere
        return _Update(slot, grad, _aligned(grad), state, decay)

    def _tables(self, updates: Sequence[_Update]) -> tuple[Tensor, ...]:
        """(addresses, constants, chunks) on the device, as the kernel wants them."""
        device = updates[0].grad.device
        beta1, beta2 = self.param_groups[0]["betas"]
        addresses = np.array([u.addresses() for u in updates], dtype=np.int64)
        numbers = np.array([float(u.state["step"]) for u in updates]) + 1.0
        decays = np.array([u.decay for u in updates])
        constants = np.stack([decays, 1.0 - beta1**numbers, np.sqrt(1.0 - beta2**numbers)], axis=1)
        sizes = tuple(addresses[:, -1].tolist())
        if sizes not in self._chunks:
            self._chunks[sizes] = copy_in(_chunks_of(sizes), device)
        return (
            copy_in(addresses, device),
            copy_in(constants.astype(np.float32), device),
            self._chunks[sizes],
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
