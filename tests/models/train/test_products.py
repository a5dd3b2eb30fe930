"""16-bit products on the CPU: summed in float32, whatever the processor and however a batch is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rill.models.loading import ModelConfig
from rill.models.train.products import linear, product, replace_products
from rill.training.policy import PolicyTrainer
from tests.training.tiny import SHAPE, algorithm, config, make_samples

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "llama": {"attention_bias": False},
    "mistral": {"sliding_window": 7},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
}


def gradients(name: str = "qwen2", **values: Any) -> dict[str, Tensor]:
    shape = {**SHAPE, "model_type": name, **ARCHITECTURES[name]}
    trainer = PolicyTrainer(
        config(model=ModelConfig(shape=shape), **values), algorithm(entropy_coefficient=0.01)
    )
    trainer.begin()
    trainer.accumulate(make_samples())
    return trainer.engine.gradients()


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference of a parameter's gradient."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp(min=1e-12)) for n in a if b[n].norm() > 1e-7)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bfloat16_is_as_near_to_float32_as_its_bits_allow(name: str) -> None:
    assert distance(gradients(name, compute_dtype="bfloat16"), gradients(name)) < 0.1


def test_bfloat16_micro_batches_are_added_up_in_float32() -> None:
    whole = gradients(compute_dtype="bfloat16")
    split = gradients(compute_dtype="bfloat16", micro_batch_tokens=32)
    assert all(g.dtype == torch.float32 for g in split.values())
    for name in ("lm.model.layers.0.mlp.down_proj.weight", "lm.model.layers.1.self_attn.q_proj.weight"):
        assert float((whole[name] - split[name]).norm() / whole[name].norm()) < 1e-3


@pytest.mark.parametrize(
    "values",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"lora": {"rank": 4}},
        {"tree_packing": True},
    ],
)
def test_no_arrangement_changes_a_bfloat16_gradient(values: dict[str, Any]) -> None:
    plain = gradients(compute_dtype="bfloat16", **({"lora": values["lora"]} if "lora" in values else {}))
    tolerance = 0.1 if "tree_packing" in values else 1e-3  # sums of other lengths round elsewhere
    assert distance(gradients(compute_dtype="bfloat16", **values), plain) < tolerance


def test_the_number_of_threads_changes_next_to_nothing() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(gradients(compute_dtype="bfloat16"))
    finally:
        torch.set_num_threads(before)
    assert distance(*results) < 0.02


class Sums:
    """A place that holds ones already."""

    def __init__(self, *shape: int) -> None:
        self.total = torch.ones(shape)

    def sum_of(self, weight: Tensor) -> tuple[Tensor, bool]:
        return self.total, True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 31, 64, 77, 700])
def test_products_of_any_number_of_rows_are_rounded_once(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, weight, bias, grad = draw(rows, 64), draw(96, 64), draw(96), draw(rows, 96)
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    sums = Sums(96, 64)
    out = linear(x, weight, bias, sums)
    out.backward(grad)
    exact = x.detach().double() @ weight.detach().double().t() + bias.detach().double()
    ulp = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * ulp, atol=1e-4)
    assert x.grad is not None and bias.grad is not None and weight.grad is None
    torch.testing.assert_close(
        x.grad.double(), grad.double() @ weight.detach().double(), rtol=1.01 * ulp, atol=1e-4
    )
    torch.testing.assert_close(bias.grad.double(), grad.double().sum(0), rtol=1.01 * ulp, atol=1e-4)
    torch.testing.assert_close(sums.total, 1 + grad.float().t() @ x.detach().float(), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(
        product(grad, weight.detach()).double(), x.grad.double(), rtol=1.01 * ulp, atol=1e-4
    )


def test_float32_layers_keep_torchs_product_and_its_gradient() -> None:
    layer = torch.nn.Linear(8, 4)
    x = torch.randn(3, 8)
    expected = layer(x)
    replace_products(layer, Sums(4, 8))
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
