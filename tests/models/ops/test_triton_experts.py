"""The experts' kernels against transformers' own. On the GPU; with TRITON_INTERPRET=1 anywhere."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16


def experts(num_experts: int, hidden: int, inner: int, activation: str = "silu") -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=num_experts, hidden_size=hidden, moe_intermediate_size=inner, hidden_act=activation
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    made: Any = Qwen3MoeExperts(config)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=hidden**-0.5)
    return made.to(DEVICE, DTYPE).requires_grad_(False)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found.float()).all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_choices", "hidden", "inner", "spread"),
    [
        (1, 8, 2, 64, 48, 1.0),
        (5, 8, 2, 96, 32, 0.0),  # all of them to the same experts: an expert with more rows than a block
        (40, 5, 3, 64, 40, 1.0),
        *([] if IS_INTERPRETED else [(1, 128, 8, 2048, 768, 1.0), (256, 128, 8, 2048, 768, 1.0)]),
    ],
)
def test_rows_of_a_step_are_those_of_the_modules(
    num_tokens: int, num_experts: int, num_choices: int, hidden: int, inner: int, spread: float
) -> None:
    from rill.models.ops.triton_experts import few_rows

    module = experts(num_experts, hidden, inner)
    x = torch.randn(num_tokens, hidden, device=DEVICE, dtype=DTYPE)
    scores = spread * torch.randn(num_tokens, num_experts) - torch.arange(num_experts) * 0.01
    shares, chosen = scores.softmax(-1).topk(num_choices)
    chosen, shares = chosen.to(DEVICE), shares.to(DEVICE, DTYPE)
    found = few_rows(x, module.gate_up_proj, module.down_proj, chosen, shares)
    assert error(found, module(x, chosen, shares)) < (1e-5 if IS_INTERPRETED else 1e-2)


def test_gelu_is_the_one_of_the_modules() -> None:
    from rill.models.ops.triton_experts import NAME, use_for

    module = experts(4, 64, 32, "gelu_pytorch_tanh")
    x = torch.randn(3, 64, device=DEVICE, dtype=DTYPE)
    chosen = torch.tensor([[0, 1], [3, 2], [1, 2]], device=DEVICE)
    shares = torch.full((3, 2), 0.5, device=DEVICE, dtype=DTYPE)
    wanted = module(x, chosen, shares)
    use_for(module)
    assert module.config._experts_implementation == NAME
    assert error(module(x, chosen, shares), wanted) < (1e-5 if IS_INTERPRETED else 1e-2)


@pytest.mark.skipif(IS_INTERPRETED, reason="a graph needs a GPU")
def test_a_captured_step_follows_other_choices() -> None:
    from rill.models.ops.triton_experts import few_rows

    module = experts(16, 128, 64)
    x, shares = torch.randn(8, 128, device=DEVICE, dtype=DTYPE), torch.rand(8, 4, device=DEVICE, dtype=DTYPE)
    chosen = torch.rand(8, 16).topk(4).indices.to(DEVICE)
    few_rows(x, module.gate_up_proj, module.down_proj, chosen, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = few_rows(x, module.gate_up_proj, module.down_proj, chosen, shares)
    for _ in range(3):
        chosen.copy_(torch.rand(8, 16).topk(4).indices)
        graph.replay()
        assert error(found, module(x, chosen, shares)) < 1e-2
