"""The short way through a decoder-only transformer: same parameters, fused, with one kernel per stage.

Hugging Face's modules stay the source of truth: `build_decoder` reads their structure, lets q/k/v and gate/up
projections share one storage each (the modules' parameters become views of it, so an update through either is seen
by both) and returns None for whatever it does not know. tests/inference/test_native_decoder.py holds its output
against the modules' own.

    embed ─► norm ─► qkv ─► [q, k norm] rope, write cache ─► attend ─► out ─┐
                ▲                                                           ▼
                └── (+, norm) ◄── down ◄── act · mul ◄── gate_up ◄── (+, norm)

Axes: N token of the flat batch, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear as torch_linear

from rill.models.attention_paged import KVCache, PagedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone."""

LinearFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class DecoderOps(Protocol):
    """The stages between matrix products, on one kind of device."""

    def add_norm(
        self,
        hidden: torch.Tensor,
        addend: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        gemma: bool,
    ) -> torch.Tensor:
        """hidden += addend, in place; returns RMSNorm(hidden)."""
        ...

    def act_mul(self, gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor: ...

    def rope_store(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_heads: int,
    ) -> None: ...

    def attend_flat(
        self,
        query: torch.Tensor,
        query_stride: int,
        num_heads: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class Projection:
    """One or more Linear modules with the same input, as one product."""

    modules: list[nn.Linear]
    weight: torch.Tensor | None
    """Their weights in one storage; None where they may not be moved, and are multiplied one by one."""
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, linear: LinearFn) -> torch.Tensor:
        if self.weight is not None:
            return linear(x, self.weight, self.bias)
        return torch.cat([linear(x, m.weight, m.bias) for m in self.modules], dim=-1)


@dataclass(slots=True)
class Layer:
    index: int
    qkv: Projection
    out: Projection
    gate_up: Projection
    down: Projection
    norms: Any
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    window: int


class Decoder:
    """Callable like the model's backbone, on flat batches."""

    def __init__(
        self, model: PreTrainedModel, ops: DecoderOps, linear: LinearFn, *, fuse: bool, max_len: int
    ) -> None:
        config = model.config
        values = config.to_dict()
        self.ops, self.linear = ops, linear
        self.is_gemma = config.model_type in ("gemma", "gemma2")
        self.has_post_norms = config.model_type == "gemma2"
        self.is_gelu = "gelu" in _activation(values)
        self.num_heads: int = config.num_attention_heads
        self.eps: float = config.rms_norm_eps
        self.softcap: float = values.get("attn_logit_softcapping") or 0.0
        backbone: Any = model.base_model
        self.embed = backbone.embed_tokens
        self.final_norm: nn.Parameter = backbone.norm.weight
        self.layers = [_layer(i, module, config, fuse=fuse) for i, module in enumerate(backbone.layers)]
        self.scale: float = backbone.layers[0].self_attn.scaling
        device = self.final_norm.device
        positions = torch.arange(max_len, device=device)[None]
        cos, sin = backbone.rotary_emb(self.final_norm.data, positions)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()

    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: PagedBatch, cache: KVCache
    ) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm."""
        ops, linear, eps, gemma = self.ops, self.linear, self.eps, self.is_gemma
        hidden = self.embed(ids_N)
        x = ops.add_norm(hidden, None, self.layers[0].norms.input_layernorm.weight, eps, gemma=gemma)
        for layer in self.layers:
            keys, values = cache.keys[layer.index], cache.values[layer.index]
            qkv = layer.qkv(x, linear)
            ops.rope_store(
                qkv, self.cos, self.sin, positions_N, batch.slots_N, layer.q_norm, layer.k_norm, eps, keys, values,
                self.num_heads,
            )  # fmt: skip
            attended = ops.attend_flat(
                qkv, qkv.shape[1], self.num_heads, keys, values, batch,
                scale=self.scale, window=layer.window, softcap=self.softcap,
            )  # fmt: skip
            x = layer.out(attended.view(len(ids_N), -1), linear)
            norms = layer.norms
            if self.has_post_norms:
                x = ops.add_norm(x, None, norms.post_attention_layernorm.weight, eps, gemma=gemma)
                x = ops.add_norm(hidden, x, norms.pre_feedforward_layernorm.weight, eps, gemma=gemma)
            else:
                x = ops.add_norm(hidden, x, norms.post_attention_layernorm.weight, eps, gemma=gemma)
            x = layer.down(ops.act_mul(layer.gate_up(x, linear), gelu=self.is_gelu), linear)
            if self.has_post_norms:
                x = ops.add_norm(x, None, norms.post_feedforward_layernorm.weight, eps, gemma=gemma)
            x = ops.add_norm(hidden, x, self._norm_after(layer), eps, gemma=gemma)
        return x

    def _norm_after(self, layer: Layer) -> torch.Tensor:
        if layer.index + 1 == len(self.layers):
            return self.final_norm
        weight: torch.Tensor = self.layers[layer.index + 1].norms.input_layernorm.weight
        return weight


def build_decoder(
    model: PreTrainedModel, ops: DecoderOps, *, fuse: bool, max_len: int, linear: LinearFn = torch_linear
) -> Decoder | None:
    """None when the model has anything that this path does not compute."""
    config = model.config
    values = config.to_dict()
    if config.model_type not in LLAMA_LIKE or values.get("mlp_bias"):
        return None
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if _activation(values) not in ("silu", "gelu_pytorch_tanh"):
        return None
    return Decoder(model, ops, linear, fuse=fuse, max_len=max_len)


def _activation(values: dict[str, Any]) -> str:
    return str(values.get("hidden_activation") or values["hidden_act"])


def _layer(index: int, module: Any, config: Any, *, fuse: bool) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    has_qk_norm = config.model_type == "qwen3"
    if config.model_type == "mistral":
        window = config.sliding_window or 0
    elif config.model_type in ("llama", "gemma"):
        window = 0
    else:
        window = attention.sliding_window or 0
    return Layer(
        index=index,
        qkv=_fused([attention.q_proj, attention.k_proj, attention.v_proj], fuse=fuse),
        out=_fused([attention.o_proj], fuse=fuse),
        gate_up=_fused([mlp.gate_proj, mlp.up_proj], fuse=fuse),
        down=_fused([mlp.down_proj], fuse=fuse),
        norms=module,
        q_norm=attention.q_norm.weight if has_qk_norm else None,
        k_norm=attention.k_norm.weight if has_qk_norm else None,
        window=window,
    )


def _fused(modules: list[nn.Linear], *, fuse: bool) -> Projection:
    if len(modules) == 1:
        return Projection(modules, modules[0].weight, modules[0].bias)
    if not fuse:
        return Projection(modules, None, None)
    weight = _share([m.weight for m in modules])
    bias = _share([m.bias for m in modules]) if modules[0].bias is not None else None
    return Projection(modules, weight, bias)


def _share(parameters: list[torch.Tensor]) -> torch.Tensor:
    """One tensor over all of them, stacked by rows; each parameter becomes a view of its part."""
    joined = torch.cat([p.data for p in parameters])
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = joined[start:end]
        start = end
    return joined
