"""The one-pass kernels against torch's operations, on tensors of every kind they tell apart: several chunks and part of
one, sizes that divide by sixteen and sizes that do not, gradients in two precisions, matrices and vectors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rill.training.adamw8bit import EightBitAdamW
from rill.training.slots import OptimizerConfig, Slot, parameter_groups

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SHAPES = ((384, 256), (300, 257), (3, 5), (48,), (7,), (300, 272), (300, 272))
"""65,536 elements are a chunk. The last two lie by turns with each other, gradients too."""


def make_slots(generator: torch.Generator) -> list[Slot]:
    slots = []
    for shape in SHAPES:
        master = torch.randn(shape, generator=generator).to(DEVICE)
        template = master.to(torch.bfloat16).requires_grad_()
        slots.append(Slot(name=str(shape), template=template, master=master, is_matrix=False, has_copy=True))
    for slot, rows in zip(slots[-2:], by_turns([slot.template.detach() for slot in slots[-2:]]), strict=True):
        slot.template.data = rows
    return slots


def by_turns(pair: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same values as every second row each of one tensor."""
    return torch.stack(tuple(pair), dim=1).unbind(1)


def put_gradients(slots: Sequence[Slot], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for slot in slots:
        gradient = torch.randn(slot.master.shape, generator=generator).to(DEVICE, dtype)
        if dtype is torch.bfloat16:  # as the only backward pass left it
            slot.template.grad, slot.master.grad = gradient, None
        else:  # as passes were added up
            slot.master.grad = gradient
    if dtype is torch.bfloat16:
        gradients = [slot.template.grad for slot in slots[-2:] if slot.template.grad is not None]
        for slot, rows in zip(slots[-2:], by_turns(gradients), strict=True):
            slot.template.grad = rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "adamw8bit"])
def test_three_steps_of_the_one_launch_are_those_of_torchs_operations(kind: str, dtype: torch.dtype) -> None:
    from rill.training.adamw_triton import CopyingAdamW

    config = OptimizerConfig.model_validate({"type": kind, "learning_rate": 1e-2, "weight_decay": 0.1})
    fused, plain = (make_slots(torch.Generator().manual_seed(0)) for _ in range(2))
    one_pass = CopyingAdamW(fused, config)
    eight_bit = EightBitAdamW(plain, config)
    groups = parameter_groups(plain, config.weight_decay)
    floats = torch.optim.AdamW(groups, lr=1e-2, betas=config.betas, eps=config.epsilon)
    one_pass.gradient_scale = eight_bit.gradient_scale = 0.5
    for seed in range(3):
        put_gradients(fused, dtype, seed)
        one_pass.step()
        put_gradients(plain, dtype, seed)
        if kind == "adamw":
            for slot in plain:
                gradient = slot.gradient()
                assert gradient is not None
                slot.master.grad = gradient.float() * 0.5
            floats.step()
        else:
            eight_bit.step()
    for slot, wanted in zip(fused, plain, strict=True):
        error = (slot.master - wanted.master).abs()
        # A rounding difference may put an 8-bit moment into the cell beside: rare, and no more than a step's part.
        assert (error < 1e-5).float().mean() > (0.995 if kind == "adamw8bit" else 0.9999), slot.name
        assert error.max() < (5e-3 if kind == "adamw8bit" else 1e-5), slot.name
        assert torch.equal(slot.template, slot.master.to(torch.bfloat16)), slot.name
        number = one_pass.state[slot.master]["step"]
        assert float(number) == 3.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_norm_is_that_of_all_gradients_and_of_none(dtype: torch.dtype) -> None:
    from rill.training.adamw_triton import CopyingAdamW

    slots = make_slots(torch.Generator().manual_seed(0))
    optimizer = CopyingAdamW(slots, OptimizerConfig(learning_rate=1e-2))
    optimizer.prepare()
    assert optimizer.gradient_norm() == 0
    put_gradients(slots, dtype, 1)
    slots[1].template.grad = slots[1].master.grad = None
    optimizer.prepare()
    gradients = [gradient for slot in slots if (gradient := slot.gradient()) is not None]
    wanted = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    assert abs(optimizer.gradient_norm() - wanted) < 1e-5 * wanted
    gradients[0][5, 7] = float("nan")
    assert optimizer.gradient_norm().isnan()
