"""AdamW in one pass over memory for bf16 training, one launch for all parameters: the only door of Triton in this room.

Reads the gradient in whatever precision the backward pass left it, updates the float32 master and its two moments, and
writes the module's low-precision copy: 28 bytes a parameter move, against 44 for copying, scaling, updating and
publishing one after another; 16 where the moments have 8 bits (rill.training.blockwise). The update is
torch.optim.AdamW's; state has the same names, so checkpoints are interchangeable.
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

from rill.models.train.packed_layout import copy_in
from rill.training.adamw8bit import MOMENTS, SCALE_SUFFIX, is_coded, new_state
from rill.training.blockwise import BLOCK as CODE_BLOCK
from rill.training.blockwise import SIGNED_TOP, UNSIGNED_TOP
from rill.training.parallel import local
from rill.training.slots import OptimizerConfig, Slot, SlotAdamW

_BLOCK = 2048
_CHUNK = 32 * _BLOCK
"""Elements of one program: large enough that few programs start, small enough that the last ones end together."""
_WORDS = 8
"""Of a row of addresses."""


@triton.jit  # type: ignore[untyped-decorator]
def _work(  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    addresses_ptr, chunks_ptr, CHUNK: tl.constexpr, WORDS: tl.constexpr, IS_EVEN: tl.constexpr
):
    """(which tensor, first element, row of addresses, number of elements of the tensor) of this program."""
    tensor = tl.load(chunks_ptr + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(chunks_ptr + 2 * tl.program_id(0) + 1).to(tl.int64) * CHUNK
    row = addresses_ptr + WORDS * tensor
    num_elements = tl.load(row + 5)
    if IS_EVEN:
        num_elements = tl.multiple_of(num_elements, 16)
    return tensor, first, row, num_elements


@triton.jit  # type: ignore[untyped-decorator]
def _pointers(row, MOMENT: tl.constexpr, GRAD: tl.constexpr, COPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """(master, mean, square, gradient, copy) of a row of addresses.

    The hints say what the host made sure of; without them every access would be of one element.
    """
    master_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(MOMENT)), 16)
    square_ptr = tl.multiple_of(tl.load(row + 2).to(tl.pointer_type(MOMENT)), 16)
    grad_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(GRAD)), 16)
    copy_ptr = tl.multiple_of(tl.load(row + 4).to(tl.pointer_type(COPY)), 16)
    return master_ptr, mean_ptr, square_ptr, grad_ptr, copy_ptr


@triton.jit  # type: ignore[untyped-decorator]
def _places(offsets, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where elements lie whose rows of WIDTH lie by turns with another weight's; 0: one after another."""
    if WIDTH:
        offsets += offsets // WIDTH * WIDTH
    return offsets


@triton.jit
def _constants(constants_ptr, tensor):  # type: ignore[no-untyped-def]
    """(decay, correction of the mean, root of the square's)."""
    constants_ptr += 3 * tensor
    return tl.load(constants_ptr), tl.load(constants_ptr + 1), tl.load(constants_ptr + 2)


@triton.jit
def _updated(  # type: ignore[no-untyped-def]
    grad, master, mean, square, rate, decay, beta1, beta2, epsilon, correction1, correction2_sqrt
):
    """(master, mean, square) after one step."""
    mean = mean + (1.0 - beta1) * (grad - mean)
    square = beta2 * square + (1.0 - beta2) * grad * grad
    master = master * (1.0 - rate * decay)
    master = master - (rate / correction1) * mean / (tl.sqrt(square) / correction2_sqrt + epsilon)
    return master, mean, square


@triton.jit  # type: ignore[untyped-decorator]
def _adamw_kernel(  # type: ignore[no-untyped-def]
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
    GRAD_WIDTH: tl.constexpr,
    COPY_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    tensor, first, row, num_elements = _work(addresses_ptr, chunks_ptr, CHUNK, WORDS, IS_EVEN)
    master_ptr, mean_ptr, square_ptr, grad_ptr, copy_ptr = _pointers(row, tl.float32, GRAD, COPY)
    decay, correction1, correction2_sqrt = _constants(constants_ptr, tensor)
    for start in range(0, CHUNK, BLOCK):
        offsets = first + start + tl.arange(0, BLOCK)
        inside = offsets < num_elements
        grad = tl.load(grad_ptr + _places(offsets, GRAD_WIDTH), mask=inside, other=0.0).to(tl.float32)
        grad *= grad_scale
        master = tl.load(master_ptr + offsets, mask=inside, other=0.0)
        mean = tl.load(mean_ptr + offsets, mask=inside, other=0.0)
        square = tl.load(square_ptr + offsets, mask=inside, other=0.0)
        master, mean, square = _updated(
            grad, master, mean, square, rate, decay, beta1, beta2, epsilon, correction1, correction2_sqrt
        )
        tl.store(master_ptr + offsets, master, mask=inside)
        tl.store(mean_ptr + offsets, mean, mask=inside)
        tl.store(square_ptr + offsets, square, mask=inside)
        tl.store(copy_ptr + _places(offsets, COPY_WIDTH), master.to(COPY), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _squares_kernel(  # type: ignore[no-untyped-def]
    addresses_ptr,
    chunks_ptr,
    sums_ptr,
    IS_EVEN: tl.constexpr,
    GRAD: tl.constexpr,
    GRAD_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Each program's sum of squared gradients."""
    _, first, row, num_elements = _work(addresses_ptr, chunks_ptr, CHUNK, WORDS, IS_EVEN)
    grad_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(GRAD)), 16)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offsets = first + start + tl.arange(0, BLOCK)
        places = _places(offsets, GRAD_WIDTH)
        grad = tl.load(grad_ptr + places, mask=offsets < num_elements, other=0.0).to(tl.float32)
        total += grad * grad
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _decoded(codes, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shares of the scale: rill.training.blockwise.value_table by arithmetic, for gathers would take thrice as long."""
    number = codes.to(tl.float32)
    bit = (number.to(tl.int32, bitcast=True) >> 23) - 127
    top = tl.exp2((bit - TOP).to(tl.float32) * 3.3219280948873623)
    share = top * (0.1 + 0.9 * (number - _power_of_two(bit) + 0.5) * _power_of_two(-bit))
    share = tl.where(codes == 2 * 2**TOP - 1, 1.0, share)
    return tl.where(codes > 0, share, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _encoded(values, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(codes, scales) of [blocks, values of a block] magnitudes: rill.training.blockwise.encode without the sign.

    A logarithm that falls on the wrong side of a decade's end gives the cell next to it, which is as near.
    """
    scales = tl.max(values, axis=1)
    share = values * (1.0 / tl.where(scales > 0, scales, 1.0))[:, None]
    bit = tl.ceil(tl.log2(tl.maximum(share, 1e-30)) * 0.30102999566398120) + TOP
    bit = tl.minimum(tl.maximum(bit, 0.0), TOP * 1.0)
    cells = _power_of_two(bit.to(tl.int32))
    decades = tl.exp2((TOP - bit) * 3.3219280948873623)
    cell = tl.floor((share * decades - 0.1) * (cells * (1.0 / 0.9)))
    cell = tl.minimum(tl.maximum(cell, 0.0), cells - 1.0)
    return tl.where(share > 0, cells + cell, 0.0).to(tl.int32), scales


@triton.jit  # type: ignore[untyped-decorator]
def _adamw8_kernel(  # type: ignore[no-untyped-def]
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
    GRAD_WIDTH: tl.constexpr,
    COPY_WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
    SIGNED_TOP: tl.constexpr,
    UNSIGNED_TOP: tl.constexpr,
    WORDS: tl.constexpr,
):
    tensor, first, row, num_elements = _work(addresses_ptr, chunks_ptr, CHUNK, WORDS, IS_EVEN)
    master_ptr, mean_ptr, square_ptr, grad_ptr, copy_ptr = _pointers(row, tl.uint8, GRAD, COPY)
    mean_scale_ptr = tl.load(row + 6).to(tl.pointer_type(tl.float32))
    square_scale_ptr = tl.load(row + 7).to(tl.pointer_type(tl.float32))
    decay, correction1, correction2_sqrt = _constants(constants_ptr, tensor)
    for start in range(0, CHUNK, ROWS * CODES):
        blocks = (first + start) // CODES + tl.arange(0, ROWS)
        offsets = first + start + tl.arange(0, ROWS)[:, None] * CODES + tl.arange(0, CODES)[None, :]
        inside = offsets < num_elements
        is_there = blocks * CODES < num_elements
        grad = tl.load(grad_ptr + _places(offsets, GRAD_WIDTH), mask=inside, other=0.0).to(tl.float32)
        grad *= grad_scale
        master = tl.load(master_ptr + offsets, mask=inside, other=0.0)
        mean_code = tl.load(mean_ptr + offsets, mask=inside, other=0).to(tl.int32)
        square_code = tl.load(square_ptr + offsets, mask=inside, other=0).to(tl.int32)
        mean_scale = tl.load(mean_scale_ptr + blocks, mask=is_there, other=0.0)
        square_scale = tl.load(square_scale_ptr + blocks, mask=is_there, other=0.0)
        mean = _decoded(mean_code & 127, SIGNED_TOP) * mean_scale[:, None]
        mean = tl.where(mean_code > 127, -mean, mean)
        square = _decoded(square_code, UNSIGNED_TOP) * square_scale[:, None]
        master, mean, square = _updated(
            grad, master, mean, square, rate, decay, beta1, beta2, epsilon, correction1, correction2_sqrt
        )
        tl.store(master_ptr + offsets, master, mask=inside)
        tl.store(copy_ptr + _places(offsets, COPY_WIDTH), master.to(COPY), mask=inside)
        mean_code, mean_scale = _encoded(tl.abs(mean), SIGNED_TOP)
        mean_code = tl.where(mean < 0, mean_code + 128, mean_code)
        square_code, square_scale = _encoded(square, UNSIGNED_TOP)
        tl.store(mean_ptr + offsets, mean_code.to(tl.uint8), mask=inside)
        tl.store(square_ptr + offsets, square_code.to(tl.uint8), mask=inside)
        tl.store(mean_scale_ptr + blocks, mean_scale, mask=is_there)
        tl.store(square_scale_ptr + blocks, square_scale, mask=is_there)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one launch has in common. Odd sizes go apart, for their ends need care."""

    is_even: bool
    is_coded: bool
    grad: torch.dtype
    grad_width: int
    """Of rows that lie by turns with another weight's (rill.models.train.fused_mlp); 0: it is in one piece."""
    copy: torch.dtype
    copy_width: int


@dataclass(frozen=True, slots=True)
class _Update:
    """One slot's part in the next launch."""

    slot: Slot
    grad: Tensor
    """The slot's gradient, where the kernel can read it."""
    state: dict[str, Any]
    decay: float

    @property
    def kind(self) -> _Kind:
        is_even, copy = self.slot.master.numel() % 16 == 0, self.slot.template.detach()
        of_grad, of_copy = (self.grad.dtype, _width(self.grad)), (copy.dtype, _width(local(copy)))
        return _Kind(is_even, is_coded(self.state), *of_grad, *of_copy)

    def addresses(self) -> tuple[int, ...]:
        """_WORDS of them: master, mean, square, gradient, copy, the number of elements, scales of mean and square."""
        state, copy = self.state, local(self.slot.template.detach())
        tensors = (self.slot.master, state["exp_avg"], state["exp_avg_sq"], self.grad, copy)
        scales = [state[key + SCALE_SUFFIX].data_ptr() if is_coded(state) else 0 for key in MOMENTS]
        return (*(t.data_ptr() for t in tensors), copy.numel(), *scales)


class CopyingAdamW(SlotAdamW):
    """AdamW on slots with copies."""

    def __init__(self, slots: Sequence[Slot], config: OptimizerConfig) -> None:
        super().__init__(slots, config)
        self._has_codes = config.type == "adamw8bit"
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        self._updates: list[_Update] = []
        self._launches: list[tuple[_Kind, tuple[Tensor, ...]]] = []

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the tables of the next step() from the gradients, which stay as they are until then: host work of a
        millisecond or two, best done while the device is still busy with the backward pass."""
        self._updates = [
            self._update(self._slots[id(master)], group["weight_decay"])
            for group in self.param_groups
            for master in group["params"]
            if self._slots[id(master)].gradient() is not None
        ]
        by_kind: dict[_Kind, list[_Update]] = {}
        for update in self._updates:
            by_kind.setdefault(update.kind, []).append(update)
        self._launches = [(kind, self._tables(updates)) for kind, updates in by_kind.items()]

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """L2 norm of the gradients that prepare() found: one launch, where torch's own would make one for every twenty
        million of them."""
        device = next(iter(self._slots.values())).master.device
        sums = [torch.zeros(1, device=device)]
        for kind, (addresses, _, chunks) in self._launches:
            sums.append(torch.empty(len(chunks), device=device))
            _squares_kernel[(len(chunks),)](
                addresses, chunks, sums[-1], IS_EVEN=kind.is_even, GRAD=_TYPES[kind.grad],
                GRAD_WIDTH=kind.grad_width, CHUNK=_CHUNK, BLOCK=2 * _BLOCK, WORDS=_WORDS, num_warps=8,
            )  # fmt: skip
        return torch.cat(sums).sum().sqrt()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self._launches:
            self.prepare()
        group = self.param_groups[0]
        rates = (self.gradient_scale, group["lr"], *group["betas"], group["eps"])
        for kind, tables in self._launches:
            types = {"GRAD": _TYPES[kind.grad], "COPY": _TYPES[kind.copy], "IS_EVEN": kind.is_even}
            types |= {"GRAD_WIDTH": kind.grad_width, "COPY_WIDTH": kind.copy_width}
            sizes = {"CHUNK": _CHUNK, "WORDS": _WORDS, "num_warps": 8}
            grid = (len(tables[-1]),)
            if kind.is_coded:
                shape = {"ROWS": _BLOCK // CODE_BLOCK, "CODES": CODE_BLOCK}
                tops = {"SIGNED_TOP": SIGNED_TOP, "UNSIGNED_TOP": UNSIGNED_TOP}
                _adamw8_kernel[grid](*tables, *rates, **types, **sizes, **shape, **tops)
            else:
                _adamw_kernel[grid](*tables, *rates, **types, **sizes, BLOCK=_BLOCK)
        torch._foreach_add_([update.state["step"] for update in self._updates], 1)
        self._updates, self._launches = [], []

    def _update(self, slot: Slot, decay: float) -> _Update:
        state, grad = self.state[slot.master], slot.gradient()
        assert grad is not None
        if "step" not in state:
            state.update(new_state(slot) if self._has_codes else _float_state(slot))
        state["step"] = state["step"].cpu()  # a checkpoint may have put it elsewhere
        return _Update(slot, _aligned(grad), state, decay)

    def _tables(self, updates: Sequence[_Update]) -> tuple[Tensor, ...]:
        """(addresses, constants, chunks) on the device, as the kernels want them."""
        device = updates[0].grad.device
        beta1, beta2 = self.param_groups[0]["betas"]
        addresses = np.array([u.addresses() for u in updates], dtype=np.int64)
        numbers = np.array([float(u.state["step"]) for u in updates]) + 1.0
        decays = np.array([u.decay for u in updates])
        constants = np.stack([decays, 1.0 - beta1**numbers, np.sqrt(1.0 - beta2**numbers)], axis=1)
        sizes = tuple(u.slot.master.numel() for u in updates)
        if sizes not in self._chunks:
            self._chunks[sizes] = copy_in(_chunks_of(sizes), device)
        return (
            copy_in(addresses, device),
            copy_in(constants.astype(np.float32), device),
            self._chunks[sizes],
        )


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _float_state(slot: Slot) -> dict[str, Tensor]:
    zeros = {key: torch.zeros_like(slot.master) for key in MOMENTS}
    return {"step": torch.zeros((), dtype=torch.float32), **zeros}


def _width(tensor: Tensor) -> int:
    """Of the rows of one that has every second row of a larger one; 0 of any other."""
    by_turns = tensor.ndim == 2 and tensor.stride() == (2 * tensor.shape[1], 1)
    return tensor.shape[1] if by_turns else 0


def _aligned(grad: Tensor) -> Tensor:
    """The kernel reads 16 bytes at a time; autograd may hand out a slice that starts anywhere."""
    grad = grad if _width(grad) else grad.contiguous()
    return grad if grad.data_ptr() % 16 == 0 else grad.clone(memory_format=torch.contiguous_format)


def _chunks_of(sizes: Sequence[int]) -> np.ndarray[Any, Any]:
    """int32 [programs, 2]: which tensor, and which chunk of it."""
    counts = -(-np.asarray(sizes) // _CHUNK)
    tensors = np.repeat(np.arange(len(sizes)), counts)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([tensors, numbers], axis=1).astype(np.int32)
