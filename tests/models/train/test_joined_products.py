"""Queries, keys and values by one product: which attentions are replaced, and that they compute the same."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Config
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from rill.models.train.joined_products import join_products
from rill.models.train.products import replace_products

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
}
KINDS: list[tuple[type[PreTrainedConfig], Any]] = [
    (LlamaConfig, LlamaAttention),
    (Qwen2Config, Qwen2Attention),  # with biases
    (Qwen3Config, Qwen3Attention),  # with norms of its heads
]


def make(config: type[PreTrainedConfig], kind: Any) -> Any:
    torch.manual_seed(0)
    settings = config(**SHAPE)
    settings._attn_implementation = "sdpa"
    return kind(settings, 0).eval()


def results(attention: nn.Module, num_tokens: int) -> list[Tensor]:
    """What it gives, and the gradients of what goes into it and of every weight and bias."""
    draw = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(1, num_tokens, 48, generator=draw).requires_grad_()
    grad = torch.randn(1, num_tokens, 48, generator=draw)
    angles = torch.randn(1, num_tokens, 16, generator=draw)
    out, _ = attention(hidden_states=x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
    return [out, *torch.autograd.grad(out, [x, *attention.parameters()], grad)]


@pytest.mark.parametrize(("config", "kind"), KINDS, ids=["llama", "qwen2", "qwen3"])
def test_one_product_gives_what_three_give_forward_and_backward(
    config: type[PreTrainedConfig], kind: Any
) -> None:
    plain = make(config, kind)
    joined = copy.deepcopy(plain)
    assert join_products(nn.ModuleList([joined])) == 1
    products = _products(joined)
    assert products == _products(plain) - 2
    for found, wanted in zip(results(joined, 21), results(plain, 21), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _products(attention: nn.Module) -> int:
    """How many linear layers' products are made forward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    angles = torch.zeros(1, 5, 16)
    with torch.no_grad(), Record():
        attention(
            hidden_states=torch.zeros(1, 5, 48), position_embeddings=(angles, angles), attention_mask=None
        )
    return sum(name in ("mm", "addmm") for name in names)


def test_only_plain_projections_of_attentions_that_begin_as_llamas_are_joined() -> None:
    half_biased = make(Qwen2Config, Qwen2Attention)
    half_biased.v_proj = nn.Linear(48, 32, bias=False)
    replaced = make(Qwen2Config, Qwen2Attention)
    replace_products(replaced)
    gemma = make(Gemma2Config, Gemma2Attention)
    others = [half_biased, replaced, gemma, nn.Linear(4, 4)]
    layers = nn.ModuleList([make(Qwen2Config, Qwen2Attention), *others, make(LlamaConfig, LlamaAttention)])
    kinds = [type(module) for module in others]
    assert join_products(layers) == 2
    assert [type(module) for module in others] == kinds
    assert join_products(layers) == 0  # once is enough


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler has no compiler")
def test_a_compiler_takes_it_in_one_graph_for_all_lengths() -> None:
    plain = make(Qwen2Config, Qwen2Attention)
    joined = copy.deepcopy(plain)
    join_products(nn.ModuleList([joined]))
    joined.compile(dynamic=True, fullgraph=True)
    for num_tokens in (13, 29):
        for found, wanted in zip(results(joined, num_tokens), results(plain, num_tokens), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
