"""Compiled layers on the CPU: one of all is compiled, whatever its products, as near the exact gradient as before."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from tests.training.tiny import SHAPE, make_samples, trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler has no compiler"),
]


@pytest.mark.parametrize("values", [{}, {"fp8": True}, {"quantization_aware": "int4"}], ids=str)
def test_layers_share_what_is_compiled_and_are_as_near_the_exact_gradient(values: dict[str, Any]) -> None:
    from torch._dynamo.utils import counters

    def gradients(**options: Any) -> dict[str, torch.Tensor]:
        one = trainer(model={"shape": {**SHAPE, "num_hidden_layers": 10}}, **options)
        one.begin()
        one.accumulate(make_samples(6))
        return one.engine.gradients()

    exact = gradients(compute_dtype="float32")

    def error(found: dict[str, torch.Tensor]) -> float:
        wrong = torch.stack([(found[name] - grad).norm() for name, grad in exact.items()]).norm()
        return float(wrong / torch.stack([grad.norm() for grad in exact.values()]).norm())

    plain = gradients(compute_dtype="bfloat16", **values)
    counters.clear()
    compiled = gradients(compute_dtype="bfloat16", compile=True, **values)
    assert 0 < counters["stats"]["unique_graphs"] < 10
    # Rounding to 8 or 4 bits falls to the other side where a compiler rounds to bf16 less often: not the same numbers.
    assert error(compiled) < 1.25 * error(plain) + 0.01


def test_the_norm_behind_the_layers_is_compiled_too() -> None:
    from torch._dynamo.utils import counters

    norm = trainer(compute_dtype="bfloat16", compile=True).engine.module.lm.model.norm
    torch.manual_seed(0)
    weight, x, grad = torch.rand(32), torch.randn(1, 50, 32), torch.randn(1, 50, 32)
    x64 = x.double().requires_grad_()
    wanted = weight.double() * x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    norm.weight.data.copy_(weight)
    x16 = x.bfloat16().requires_grad_()
    torch._dynamo.reset()  # what other tests have compiled
    counters.clear()
    found = norm(x16)
    assert counters["stats"]["unique_graphs"] == 1
    (wanted_grad,) = torch.autograd.grad(wanted, x64, grad.double())
    (found_grad,) = torch.autograd.grad(found, x16, grad.bfloat16())
    for a, b in ((found, wanted), (found_grad, wanted_grad)):
        assert (a.double() - b).norm() < 0.01 * b.norm()
