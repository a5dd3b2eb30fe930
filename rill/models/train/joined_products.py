"""A decoder layer's queries, keys and values by one product: CUDA.

Callers: rill.training replaces the forward of every attention that begins as Llama's does (`join_products`). Three
products read the hidden states three times, and those of keys and values are too narrow to fill a GPU, above all where
they sum over all tokens for their weights; the three gradients of the hidden states are written, read and added.

Weights and biases stay the modules' own. They are put one below the other at each call, few bytes beside the tokens',
and their gradients are parts of one tensor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_NAMES = ("q_proj", "k_proj", "v_proj")


def join_products(layers: nn.Module) -> int:
    """How many attentions there were to replace. Not those with replaced or adapted projections, or biases of some."""
    count = 0
    for module in list(layers.modules()):
        if _code(type(module)) in _known():
            parts: list[Any] = [getattr(module, name) for name in _NAMES]
            num_biases = sum(part.bias is not None for part in parts)
            if all(type(part) is nn.Linear for part in parts) and num_biases in (0, len(parts)):
                module.__class__ = _joined(type(module))  # type: ignore[arg-type]
                count += 1
    return count


class _Projected:
    """An attention whose three products are made already: its own forward takes this for `self`."""

    def __init__(self, attention: Any, hidden: Tensor) -> None:
        parts = [getattr(attention, name) for name in _NAMES]
        weight = torch.cat([part.weight for part in parts])
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        joined = functional.linear(hidden, weight, bias)
        query, key, value = torch.split(joined, [len(part.weight) for part in parts], dim=-1)
        # Queries and keys are turned next, into tensors of their own. Values would keep all of them alive.
        value = value.contiguous()
        self._attention = attention
        self.q_proj = lambda _: query
        self.k_proj = lambda _: key
        self.v_proj = lambda _: value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


@functools.cache
def _joined(kind: Any) -> Any:
    """One class for all layers: functions of each module's own would be compiled one by one."""

    def forward(self: Any, hidden_states: Tensor, *others: Any, **arguments: Any) -> Any:
        return kind.forward(_Projected(self, hidden_states), hidden_states, *others, **arguments)

    return type(f"Joined{kind.__name__}", (kind,), {"forward": forward})


def _code(kind: Any) -> Any:
    code = getattr(kind.forward, "__code__", None)
    return None if code is None else (code.co_code, code.co_names)


@functools.cache
def _known() -> frozenset[Any]:
    """Of forwards that call the three projections with the hidden states and nothing else."""
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    return frozenset(_code(kind) for kind in (LlamaAttention, Qwen2Attention, Qwen3Attention))
