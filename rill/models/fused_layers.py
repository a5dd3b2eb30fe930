"""Decoder layers for training on the CPU with fused kernels: the modules' own parameters, a short way through them.

Callers: rill.training. `fuse_decoder` replaces the forward of a known architecture's layers and norms; whatever it
does not know stays as it is, and without a compiler nothing is replaced. Hooks on the modules (FSDP2, checkpointing)
and adapters in place of linear layers go on working: a layer is still called as a module, and a projection that is not
a plain nn.Linear is called too.

    h ─► norm ─► q, k, v ─► rotate + attend ─► out + h ─► norm ─► gate, up ─► act · mul ─► down + h ─►

Each stage is an autograd function with a backward pass written by hand; sums of gradients that meet (of q, k and v's
input, of a norm and the stream around it) are made inside the kernels. Some buffers of the forward pass are reused by
the backward pass, so a graph can be walked once.

Gradients equal those of the modules up to rounding (tests/models/test_fused_layers.py). M token of the row, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rill.models.cpu_training import GradientSums, TrainingKernels, load_training_kernels
from rill.models.packed_layout import PackedLayout

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma"})
_MAX_HEAD_DIM = 256


def fuse_decoder(model: Any, sums: GradientSums | None = None) -> bool:
    """Replace the forward of `model`'s layers and last norm; False where that is not possible.

    With `sums`, gradients of projections are added there in float32 and autograd sees none of them.
    """
    config = model.config
    values = config.to_dict()
    activation = values.get("hidden_activation") or values.get("hidden_act")
    rope = values.get("rope_parameters") or {}
    if (
        config.model_type not in ARCHITECTURES
        or activation not in ("silu", "gelu_pytorch_tanh")
        or rope.get("partial_rotary_factor", 1.0) != 1.0
    ):
        return False
    backbone = model.base_model
    head_dim: int = backbone.layers[0].self_attn.head_dim
    kernels = load_training_kernels()
    if kernels is None or head_dim % 16 or head_dim > _MAX_HEAD_DIM:
        return False
    gemma = config.model_type == "gemma"
    for layer in backbone.layers:
        fused = _Layer(layer, kernels, sums, gemma=gemma, gelu=activation != "silu", config=config)
        layer.forward = functools.wraps(layer.forward)(fused)
    norm = backbone.norm
    norm.forward = functools.wraps(norm.forward)(
        lambda hidden: _norm(kernels, hidden[0], norm, config.rms_norm_eps, gemma)[1][None]
    )
    return True


class _Layer:
    """Called in place of one decoder layer's forward."""

    def __init__(
        self,
        layer: Any,
        kernels: TrainingKernels,
        sums: GradientSums | None,
        *,
        gemma: bool,
        gelu: bool,
        config: Any,
    ) -> None:
        self.layer, self.kernels, self.sums = layer, kernels, sums
        self.gemma, self.gelu, self.eps = gemma, gelu, config.rms_norm_eps
        self.window = _window(layer.self_attn, config)
        self.has_qk_norm = config.model_type == "qwen3"

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        packed: PackedLayout,
        **kwargs: Any,
    ) -> Tensor:
        layer, kernels = self.layer, self.kernels
        hidden, x = _norm(kernels, hidden_states[0], layer.input_layernorm, self.eps, self.gemma)
        hidden = self._attention(hidden, x, position_embeddings, packed, kwargs)
        hidden, x = _norm(kernels, hidden, layer.post_attention_layernorm, self.eps, self.gemma)
        return self._mlp(hidden, x)[None]

    def _attention(
        self,
        hidden: Tensor,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        packed: PackedLayout,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """hidden + attention(x)."""
        module = self.layer.self_attn
        if packed.families is None:
            out, _ = module(
                hidden_states=x[None], position_embeddings=position_embeddings, packed=packed, **kwargs
            )
            joined: Tensor = hidden + out[0]
            return joined
        q, k, v = self._project(x, (module.q_proj, module.k_proj, module.v_proj))
        if self.has_qk_norm:
            q = self._head_norm(q, module.q_norm)
            k = self._head_norm(k, module.k_norm)
        cos, sin = (t[0].contiguous() for t in position_embeddings)
        attended = _apply(_Attention, self.kernels, packed, module.scaling, self.window, q, k, v, cos, sin)
        return self._project(attended, (module.o_proj,), hidden)[0]

    def _mlp(self, hidden: Tensor, x: Tensor) -> Tensor:
        """hidden + mlp(x)."""
        mlp = self.layer.mlp
        modules = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        if all(_is_plain(m) and m.bias is None for m in modules):
            weights = [m.weight for m in modules]
            out: Tensor = _apply(_MLP, self.kernels, self.sums, self.gelu, x, hidden, *weights)
            return out
        gate, up = self._project(x, modules[:2])
        return self._project(_apply(_Gated, self.kernels, self.gelu, gate, up), modules[2:], hidden)[0]

    def _project(
        self, x: Tensor, modules: Sequence[nn.Module], addend: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        if not all(_is_plain(m) for m in modules):
            outputs = tuple(m(x) for m in modules)
            return outputs if addend is None else tuple(addend + y for y in outputs)
        parameters = [p for m in modules for p in (m.weight, m.bias)]
        results: tuple[Tensor, ...] = _apply(_Project, self.kernels, self.sums, x, addend, *parameters)
        return results

    def _head_norm(self, x: Tensor, module: Any) -> Tensor:
        rows = x.reshape(-1, module.weight.shape[0])
        return _norm(self.kernels, rows, module, self.eps, False)[1].view(x.shape)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def _window(attention: Any, config: Any) -> int:
    """Tokens a query sees, itself included; 0: all."""
    if config.model_type == "mistral":
        return config.sliding_window or 0
    if config.model_type in ("qwen2", "qwen3"):
        return attention.sliding_window or 0
    return 0


def _norm(
    kernels: TrainingKernels, hidden: Tensor, module: Any, eps: float, gemma: bool
) -> tuple[Tensor, Tensor]:
    """(hidden, norm(hidden)). The stream passes through, so that both of its gradients meet in one kernel."""
    stream, out = _apply(_Norm, kernels, hidden.contiguous(), module.weight, eps, gemma)
    return stream, out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: TrainingKernels, hidden: Tensor, weight: Tensor, eps: float, gemma: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight)
        ctx.kernels, ctx.eps, ctx.gemma = kernels, eps, gemma
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden), kernels.norm(hidden, weight, eps, gemma=gemma)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        stream, out = grads
        hidden, weight = ctx.saved_tensors
        if out is None:
            return None, stream, None, None, None
        stream = None if stream is None else stream.contiguous()
        grad_hidden, grad_weight = ctx.kernels.norm_grad(
            hidden, weight, out.contiguous(), stream, ctx.eps, gemma=ctx.gemma
        )
        return None, grad_hidden, grad_weight if ctx.needs_input_grad[2] else None, None, None


class _Project(torch.autograd.Function):
    """x Wᵀ + b for several (W, b); the first result gets `addend` on top."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: TrainingKernels,
        sums: GradientSums | None,
        x: Tensor,
        addend: Tensor | None,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        ctx.kernels, ctx.sums = kernels, sums
        return tuple(
            kernels.linear(x, w, b, addend if n == 0 else None)
            for n, (w, b) in enumerate(zip(weights, biases, strict=True))
            if w is not None
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        kernels: TrainingKernels = ctx.kernels
        given = [g.contiguous() for g in grads]
        grad_x = kernels.input_grad(given, weights) if ctx.needs_input_grad[2] else None
        results: list[Tensor | None] = []
        for index, (grad, weight) in enumerate(zip(given, weights, strict=True)):
            needs_weight, needs_bias = ctx.needs_input_grad[4 + 2 * index : 6 + 2 * index]
            results.append(kernels.weight_grad(grad, x, weight, ctx.sums) if needs_weight else None)
            results.append(kernels.bias_grad(grad) if needs_bias else None)
        return None, None, grad_x, given[0] if ctx.needs_input_grad[3] else None, *results


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: TrainingKernels,
        layout: PackedLayout,
        scale: float,
        window: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        out, lse = kernels.attend(q, k, v, cos, sin, layout, scale, window)
        ctx.save_for_backward(q, k, v, cos, sin, out, lse)
        ctx.kernels, ctx.layout, ctx.scale, ctx.window = kernels, layout, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, cos, sin, out, lse = ctx.saved_tensors
        gradients = ctx.kernels.attend_grad(
            (q, k, v, cos, sin), ctx.layout, ctx.scale, ctx.window, out, lse, grads[0].contiguous()
        )
        return None, None, None, None, *gradients, None, None


class _Gated(torch.autograd.Function):
    """act(gate) · up."""

    @staticmethod
    def forward(ctx: Any, kernels: TrainingKernels, gelu: bool, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels, ctx.gelu = kernels, gelu
        return kernels.gated(gate.contiguous(), up.contiguous(), gelu=gelu)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate, up = (t.clone(memory_format=torch.contiguous_format) for t in ctx.saved_tensors)
        ctx.kernels.gated_grad_(
            gate, up, grads[0].clone(memory_format=torch.contiguous_format), gelu=ctx.gelu
        )
        return None, None, gate, up


class _MLP(torch.autograd.Function):
    """addend + (act(x Gᵀ) · (x Uᵀ)) Dᵀ. The backward pass writes over what the forward pass kept."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: TrainingKernels,
        sums: GradientSums | None,
        gelu: bool,
        x: Tensor,
        addend: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
    ) -> Tensor:
        is_kept = any(ctx.needs_input_grad)
        inner, ctx.kept = kernels.gated_linear(x, gate_weight, up_weight, gelu=gelu, is_kept=is_kept)
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight)
        ctx.kernels, ctx.sums, ctx.gelu = kernels, sums, gelu
        return kernels.linear(inner, down_weight, None, addend)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, gate_weight, up_weight, down_weight = ctx.saved_tensors
        kernels: TrainingKernels = ctx.kernels
        assert ctx.kept is not None, "this graph has been walked already"
        (gate, up), ctx.kept = ctx.kept, None
        grad = grads[0].contiguous()
        inner = kernels.gated_linear_grad_(grad, down_weight, gate, up, gelu=ctx.gelu)
        needs_gate, needs_up, needs_down = ctx.needs_input_grad[5:]
        grad_down = kernels.weight_grad(grad, inner, down_weight, ctx.sums) if needs_down else None
        grad_x = kernels.input_grad([gate, up], [gate_weight, up_weight])
        grad_gate = kernels.weight_grad(gate, x, gate_weight, ctx.sums) if needs_gate else None
        grad_up = kernels.weight_grad(up, x, up_weight, ctx.sums) if needs_up else None
        return None, None, None, grad_x, grad, grad_gate, grad_up, grad_down
