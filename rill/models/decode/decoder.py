"""The short way through a decoder-only transformer: same parameters, fused, with one kernel per stage.

Hugging Face's modules stay the source of truth: `build_decoder` reads their structure, lets q/k/v and gate/up
projections share one storage each (the modules' parameters become views of it, so an update through either is seen
by both) and returns None for whatever it does not know. tests/inference/test_native_models.py holds its output
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

from rill.models.decode.attention_paged import FlatKernels, KVCache, PagedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rill.models.decode.low_rank import AdapterRows

LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"})
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone."""

LinearFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class DecoderOps(FlatKernels, Protocol):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What sets the known architectures apart from one another."""

    model_type: str
    num_heads: int
    head_dim: int
    eps: float
    scale: float
    softcap: float
    """Of attention scores; 0: off."""
    is_gelu: bool
    sliding_window: int
    """Of every layer, for a model type that has one for all; 0: off."""

    @property
    def is_gemma(self) -> bool:
        """Norms multiply by 1 + weight, without rounding in between."""
        return self.model_type in ("gemma", "gemma2")

    @property
    def has_post_norms(self) -> bool:
        """What is added to the residual is normed first."""
        return self.model_type == "gemma2"

    @property
    def has_qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    def window(self, attention: Any) -> int:
        """Of one layer's attention module; 0: off."""
        if self.model_type in ("llama", "mistral", "gemma"):
            return self.sliding_window
        return attention.sliding_window or 0


def known_architecture(model: PreTrainedModel) -> Architecture | None:
    """None when the model has anything that the paths over its bare parameters do not compute."""
    config: Any = model.config
    values = config.to_dict()
    if config.model_type not in LLAMA_LIKE or values.get("mlp_bias"):
        return None
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") not in ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    activation = values.get("hidden_activation") or values["hidden_act"]
    if activation not in ("silu", "gelu_pytorch_tanh"):
        return None
    attention: Any = model.base_model.layers[0].self_attn
    return Architecture(
        model_type=config.model_type,
        num_heads=config.num_attention_heads,
        head_dim=attention.q_proj.weight.shape[0] // config.num_attention_heads,
        eps=config.rms_norm_eps,
        scale=attention.scaling,
        softcap=values.get("attn_logit_softcapping") or 0.0,
        is_gelu=activation == "gelu_pytorch_tanh",
        sliding_window=(config.sliding_window or 0) if config.model_type == "mistral" else 0,
    )


def rotary_tables(model: PreTrainedModel, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [max_len, D] in the model's precision, as its rotary module gives them."""
    backbone: Any = model.base_model
    weight = backbone.norm.weight.data
    cos, sin = backbone.rotary_emb(weight, torch.arange(max_len, device=weight.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


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


class FastPath(Protocol):
    """Callable like the model's backbone, on flat batches."""

    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: PagedBatch, cache: KVCache
    ) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm."""
        ...


class Decoder:
    """The fast path as one kernel per stage, with products of the caller's choice in between."""

    def __init__(
        self,
        model: PreTrainedModel,
        arch: Architecture,
        ops: DecoderOps,
        linear: LinearFn,
        *,
        fuse: bool,
        max_len: int,
    ) -> None:
        self.ops, self.linear, self.arch = ops, linear, arch
        backbone: Any = model.base_model
        self.embed = backbone.embed_tokens
        self.final_norm: nn.Parameter = backbone.norm.weight
        self.layers = [_layer(i, module, arch, fuse=fuse) for i, module in enumerate(backbone.layers)]
        self.cos, self.sin = rotary_tables(model, max_len)

    def __call__(
        self, ids_N: torch.Tensor, positions_N: torch.Tensor, batch: PagedBatch, cache: KVCache
    ) -> torch.Tensor:
        """Last hidden states [N, E], after the final norm."""
        return self.forward(ids_N, positions_N, batch, cache)

    def forward(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        batch: PagedBatch,
        cache: KVCache,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """The same, with each row's adapter beside the projections."""
        ops, arch = self.ops, self.arch

        def project(projection: Projection, x: torch.Tensor) -> torch.Tensor:
            y = projection(x, self.linear)
            return y if adapters is None else adapters.add_to(y, projection, x)

        eps, gemma = arch.eps, arch.is_gemma
        hidden = self.embed(ids_N)
        x = ops.add_norm(hidden, None, self.layers[0].norms.input_layernorm.weight, eps, gemma=gemma)
        for layer in self.layers:
            keys, values = cache.keys[layer.index], cache.values[layer.index]
            qkv = project(layer.qkv, x)
            ops.rope_store(
                qkv, self.cos, self.sin, positions_N, batch.slots_N, layer.q_norm, layer.k_norm, eps, keys, values,
                arch.num_heads,
            )  # fmt: skip
            attended = ops.attend_flat(
                qkv, qkv.shape[1], arch.num_heads, keys, values, batch,
                scale=arch.scale, window=layer.window, softcap=arch.softcap,
            )  # fmt: skip
            x = project(layer.out, attended.view(len(ids_N), -1))
            norms = layer.norms
            if arch.has_post_norms:
                x = ops.add_norm(x, None, norms.post_attention_layernorm.weight, eps, gemma=gemma)
                x = ops.add_norm(hidden, x, norms.pre_feedforward_layernorm.weight, eps, gemma=gemma)
            else:
                x = ops.add_norm(hidden, x, norms.post_attention_layernorm.weight, eps, gemma=gemma)
            x = project(layer.down, ops.act_mul(project(layer.gate_up, x), gelu=arch.is_gelu))
            if arch.has_post_norms:
                x = ops.add_norm(x, None, norms.post_feedforward_layernorm.weight, eps, gemma=gemma)
            x = ops.add_norm(hidden, x, self.norm_after(layer), eps, gemma=gemma)
        return x

    def norm_after(self, layer: Layer) -> torch.Tensor:
        if layer.index + 1 == len(self.layers):
            return self.final_norm
        weight: torch.Tensor = self.layers[layer.index + 1].norms.input_layernorm.weight
        return weight


def build_decoder(
    model: PreTrainedModel, ops: DecoderOps, *, fuse: bool, max_len: int, linear: LinearFn = torch_linear
) -> Decoder | None:
    """None when the model has anything that this path does not compute."""
    arch = known_architecture(model)
    return None if arch is None else Decoder(model, arch, ops, linear, fuse=fuse, max_len=max_len)


def _layer(index: int, module: Any, arch: Architecture, *, fuse: bool) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    return Layer(
        index=index,
        qkv=_fused([attention.q_proj, attention.k_proj, attention.v_proj], fuse=fuse),
        out=_fused([attention.o_proj], fuse=fuse),
        gate_up=_fused([mlp.gate_proj, mlp.up_proj], fuse=fuse),
        down=_fused([mlp.down_proj], fuse=fuse),
        norms=module,
        q_norm=attention.q_norm.weight if arch.has_qk_norm else None,
        k_norm=attention.k_norm.weight if arch.has_qk_norm else None,
        window=arch.window(attention),
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
