"""Products of 8 bits in training: what is rounded, that gradients are near the exact ones, and that it learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from rill.errors import ConfigError
from rill.models.train.fp8_products import Linear8, product8, replace_products_fp8, rounded8
from rill.training.policy import PolicyTrainer
from tests.training.tiny import SHAPE, algorithm, config, make_samples, trainer


def test_a_row_keeps_its_largest_number_and_loses_three_per_cent_of_others() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-6], [1], [1e3], [0], [7]]
    )
    codes, scales = rounded8(x)
    held = codes.float() * scales
    large = x.abs().argmax(1)
    rows = torch.arange(5)
    torch.testing.assert_close(held[rows, large], x[rows, large], rtol=1e-6, atol=0)
    is_normal = x.abs() > scales * 2**-6
    assert ((held - x).abs()[is_normal] <= 0.0626 * x.abs()[is_normal]).all()
    assert (held[3] == 0).all()


def test_a_product_is_near_the_exact_one_both_ways() -> None:
    torch.manual_seed(0)
    exact = nn.Linear(64, 96, bias=True)
    layers = nn.ModuleList([nn.Linear(64, 96, bias=True)])
    layers[0].load_state_dict(exact.state_dict())
    replace_products_fp8(layers)
    x = torch.randn(2, 50, 64)
    outs = []
    for one in (exact, layers[0]):
        entered = x.clone().requires_grad_()
        out = one(entered)
        grads = torch.autograd.grad(out.square().sum(), [entered, one.weight, one.bias])
        outs.append((out.detach(), *grads))
    for wanted, found in zip(*outs, strict=True):
        assert 0 < (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_learns_as_without(dtype: str) -> None:
    samples = make_samples(8)
    said = {}
    for fp8 in (False, True):
        one = trainer(fp8=fp8, compute_dtype=dtype, optimizer={"learning_rate": 1e-2})
        before = float(np.mean(np.concatenate(one.logprobs(samples))))
        for _ in range(8):
            one.update(samples)
        said[fp8] = before, float(np.mean(np.concatenate(one.logprobs(samples))))
    assert abs(said[True][0] - said[False][0]) < 0.05
    moved = [after - before for before, after in said.values()]
    assert abs(moved[0]) > 0.1
    assert abs(moved[1] - moved[0]) < 0.25 * abs(moved[0])


def test_what_it_cannot_multiply_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 16.*without fp8"):
        trainer(model={"shape": {**SHAPE, "intermediate_size": 40}}, fp8=True)
    with pytest.raises(ValidationError, match="no lora"):
        trainer(fp8=True, lora={"rank": 2})
    with pytest.raises(ConfigError, match="exclude each other"):
        trainer(fp8=True, batch_invariant=True)


def test_every_layer_is_rounded_also_where_other_products_came_first() -> None:
    layers = trainer(fp8=True, compute_dtype="bfloat16").engine.module.layers
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 2 * 7
    assert all(type(module) is Linear8 for module in linears)


def test_it_is_compiled_once_for_all_row_lengths() -> None:
    from torch._dynamo.utils import counters

    layer = nn.Linear(16, 32)
    replace_products_fp8(nn.ModuleList([layer]))
    torch._dynamo.reset()
    counters.clear()
    layer.compile(dynamic=True, backend="eager")
    for num_tokens in (5, 9, 30):
        layer(torch.randn(num_tokens, 16).requires_grad_()).sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
def test_on_hopper_the_hardware_multiplies_the_same_codes() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 256), torch.randn(96, 256)
    wanted = product8(a, b)
    found = product8(a.cuda().bfloat16(), b.cuda().bfloat16()).float().cpu()
    assert (found - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.gpu
def test_compiled_layers_on_hopper_learn_as_without() -> None:
    samples = make_samples(8)
    after = []
    for fp8 in (False, True):
        settings = config(fp8=fp8, compute_dtype="bfloat16", compile=True, optimizer={"learning_rate": 1e-2})
        one = PolicyTrainer(settings, algorithm(), device="cuda")
        for _ in range(8):
            one.update(samples)
        after.append(float(np.mean(np.concatenate(one.logprobs(samples)))))
    assert abs(after[1] - after[0]) < 0.25
