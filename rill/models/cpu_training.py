"""Calls into cpu_training.cpp, cpu_attention.cpp and cpu_matmul.cpp: the training step's kernels on the CPU.

Callers: rill.models.fused_layers, rill.models.head_cpu and rill.training.optim. `load_training_kernels` answers None
where there is no compiler; callers then use torch. Every result is the same for any number of threads.

Matrix products in bfloat16 go through AMX where the processor has it and the sizes are multiples of 32; all others are
torch's. Weight gradients of bfloat16 products are float32 sums, which may go on over several calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rill.models.cpu_build import load_library
from rill.models.packed_layout import PackedLayout

_MATMUL_MULTIPLE = 32
_ROWS_PER_SUM = 64
"""NORM_ROWS of cpu_training.cpp."""

_PRODUCTS: dict[str, list[Any]] = {
    "matmul_bf16": [c_void_p, c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p] + [c_int64] * 3 + [c_int],
    "gated_bf16": [c_void_p] * 6 + [c_int64] * 3 + [c_int, c_int],
    "gated_grad_bf16": [c_void_p] * 5 + [c_int64] * 3 + [c_int, c_int],
    "weight_grad_bf16": [c_void_p, c_int64] * 3 + [c_int64] * 3 + [c_int, c_int],
}
_SIGNATURES: dict[str, dict[str, list[Any]]] = {
    "cpu_training": {
        "norm": [c_void_p] * 3 + [c_int64] * 2 + [c_float, c_int, c_int],
        "norm_grad": [c_void_p] * 7 + [c_int64] * 2 + [c_float, c_int, c_int],
        "column_sums": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int],
        "gated": [c_void_p] * 3 + [c_int64, c_int, c_int],
        "gated_grad": [c_void_p] * 3 + [c_int64, c_int, c_int],
        "head_stats": [c_void_p] * 2 + [c_int64] * 2 + [c_float] + [c_void_p] * 3 + [c_int],
        "head_grad": [c_void_p] * 2 + [c_int64] * 2 + [c_float] + [c_void_p] * 4 + [c_int],
        "adamw": [c_void_p] * 5 + [c_int64] + [c_float] * 7 + [c_int],
    },
    "cpu_attention": {
        "attend": [c_void_p, c_int64] * 3 + [c_void_p] * 3 + [c_int64] * 5 + [c_float, c_int64] + [c_void_p] * 2
        + [c_int],
        "attend_grad": [c_void_p, c_int64] * 3 + [c_void_p] * 4 + [c_int64] * 5 + [c_float, c_int64] + [c_void_p] * 3
        + [c_void_p, c_int64] * 3 + [c_int],
    },
}  # fmt: skip


class GradientSums(Protocol):
    """Where float32 weight gradients are added up beside the weights, when autograd's own place is too coarse."""

    def sum_of(self, weight: Tensor) -> tuple[Tensor, bool] | None:
        """(float32 tensor, whether it already holds something), or None: return the gradient to autograd."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWRates:
    """One step's constants; see adamw in cpu_training.cpp."""

    gradient_scale: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    epsilon: float
    step: int


@functools.cache
def load_training_kernels() -> TrainingKernels | None:
    """The kernels, built if need be; None where they cannot be."""
    libraries = {name: load_library(name) for name in ("cpu_training", "cpu_attention", "cpu_matmul")}
    training, attention, matmul = libraries.values()
    if training is None or attention is None or matmul is None:
        return None
    return TrainingKernels(training, attention, matmul)


class TrainingKernels:
    """Typed calls. Tensors are float32 or bfloat16 with contiguous rows; `x_ND` and the like are two-dimensional."""

    def __init__(self, training: ctypes.CDLL, attention: ctypes.CDLL, matmul: ctypes.CDLL) -> None:
        self._calls: dict[tuple[str, torch.dtype], Any] = {}
        for library, names in zip((training, attention), _SIGNATURES.values(), strict=True):
            for suffix, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
                for name, arguments in names.items():
                    call = library[f"{name}_{suffix}"]
                    call.argtypes, call.restype = arguments, None
                    self._calls[name, dtype] = call
        self._products: dict[str, Any] = {name: matmul[name] for name in _PRODUCTS}
        for name, arguments in _PRODUCTS.items():
            self._products[name].argtypes, self._products[name].restype = arguments, None
        self._has_tiles = bool(matmul["can_multiply"]())

    # --- matrix products ----------------------------------------------------------------------------------

    def linear(
        self, x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, addend_NO: Tensor | None = None
    ) -> Tensor:
        """x Wᵀ + b, rounded; then + addend."""
        width, inner = weight_OK.shape
        if not self._multiplies(x_NK.dtype, width, inner):
            out = functional.linear(x_NK, weight_OK, bias_O)
            return out if addend_NO is None else out + addend_NO
        out = x_NK.new_empty(x_NK.shape[0], width)
        self._call_matmul([(x_NK, weight_OK, inner)], True, bias_O, addend_NO, out)
        return out

    def input_grad(self, grads_NO: Sequence[Tensor], weights_OK: Sequence[Tensor]) -> Tensor:
        """Σ g W: the gradient of the input of layers that share it."""
        pairs = list(zip(grads_NO, weights_OK, strict=True))
        inner = weights_OK[0].shape[1]
        if not all(self._multiplies(g.dtype, inner, w.shape[0]) for g, w in pairs):
            out = pairs[0][0] @ pairs[0][1]
            for grad, weight in pairs[1:]:
                out.addmm_(grad, weight)
            return out
        out = grads_NO[0].new_empty(grads_NO[0].shape[0], inner)
        self._call_matmul([(g, w, w.shape[0]) for g, w in pairs], False, None, None, out)
        return out

    def weight_grad(
        self, grad_NO: Tensor, x_NK: Tensor, weight_OK: Tensor, sums: GradientSums | None
    ) -> Tensor | None:
        """gᵀ x: added to `sums` (then None), or returned in the weight's precision."""
        place = None if sums is None else sums.sum_of(weight_OK)
        if not self._multiplies(grad_NO.dtype, *weight_OK.shape):
            gradient = grad_NO.t() @ x_NK
            if place is None:
                return gradient
            place[0].add_(gradient) if place[1] else place[0].copy_(gradient)
            return None
        out, is_begun = place or (torch.empty(weight_OK.shape, dtype=torch.float32), False)
        self._products["weight_grad_bf16"](
            grad_NO.data_ptr(), grad_NO.stride(0), x_NK.data_ptr(), x_NK.stride(0), out.data_ptr(), out.stride(0),
            grad_NO.shape[0], *weight_OK.shape, is_begun, torch.get_num_threads(),
        )  # fmt: skip
        return out.to(weight_OK.dtype) if place is None else None

    def bias_grad(self, grad_NO: Tensor) -> Tensor:
        rows, width = grad_NO.shape
        out = torch.empty(width)
        partial = torch.empty(-(-rows // _ROWS_PER_SUM), width)
        self._calls["column_sums", grad_NO.dtype](
            grad_NO.data_ptr(), grad_NO.stride(0), partial.data_ptr(), out.data_ptr(), rows, width,
            torch.get_num_threads(),
        )  # fmt: skip
        return out.to(grad_NO.dtype)

    def _multiplies(self, dtype: torch.dtype, *sizes: int) -> bool:
        return self._has_tiles and dtype == torch.bfloat16 and all(s % _MATMUL_MULTIPLE == 0 for s in sizes)

    def _call_matmul(
        self,
        parts: list[tuple[Tensor, Tensor, int]],
        by_columns: bool,
        bias: Tensor | None,
        addend: Tensor | None,
        out: Tensor,
    ) -> None:
        numbers = [n for a, b, k in parts for n in (a.data_ptr(), a.stride(0), b.data_ptr(), b.stride(0), k)]
        self._products["matmul_bf16"](
            (c_int64 * len(numbers))(*numbers), len(parts), by_columns, _pointer(bias), _pointer(addend),
            0 if addend is None else addend.stride(0), out.data_ptr(), out.stride(0), *out.shape,
            torch.get_num_threads(),
        )  # fmt: skip

    # --- norms and activations ----------------------------------------------------------------------------

    def norm(self, x_ND: Tensor, weight_D: Tensor, eps: float, *, gemma: bool) -> Tensor:
        out = torch.empty_like(x_ND)
        self._calls["norm", x_ND.dtype](
            x_ND.data_ptr(), weight_D.data_ptr(), out.data_ptr(), *x_ND.shape, eps, gemma, torch.get_num_threads()
        )  # fmt: skip
        return out

    def norm_grad(
        self,
        x_ND: Tensor,
        weight_D: Tensor,
        grad_ND: Tensor,
        residual_ND: Tensor | None,
        eps: float,
        *,
        gemma: bool,
    ) -> tuple[Tensor, Tensor]:
        """(residual + gradient of x, gradient of the weight)."""
        rows, size = x_ND.shape
        grad_x, grad_weight = torch.empty_like(x_ND), torch.empty(size)
        partial = torch.empty(-(-rows // _ROWS_PER_SUM), size)
        self._calls["norm_grad", x_ND.dtype](
            x_ND.data_ptr(), weight_D.data_ptr(), grad_ND.data_ptr(), _pointer(residual_ND), grad_x.data_ptr(),
            partial.data_ptr(), grad_weight.data_ptr(), rows, size, eps, gemma, torch.get_num_threads(),
        )  # fmt: skip
        return grad_x, grad_weight.to(weight_D.dtype)

    def gated(self, gate_NF: Tensor, up_NF: Tensor, *, gelu: bool) -> Tensor:
        """act(gate) · up."""
        out = torch.empty_like(gate_NF)
        self._calls["gated", gate_NF.dtype](
            gate_NF.data_ptr(),
            up_NF.data_ptr(),
            out.data_ptr(),
            gate_NF.numel(),
            gelu,
            torch.get_num_threads(),
        )
        return out

    def gated_grad_(self, gate_NF: Tensor, up_NF: Tensor, grad_NF: Tensor, *, gelu: bool) -> None:
        """In place: gate and up become their gradients, grad becomes act(gate) · up."""
        self._calls["gated_grad", gate_NF.dtype](
            gate_NF.data_ptr(),
            up_NF.data_ptr(),
            grad_NF.data_ptr(),
            gate_NF.numel(),
            gelu,
            torch.get_num_threads(),
        )

    def gated_linear(
        self, x_NK: Tensor, gate_FK: Tensor, up_FK: Tensor, *, gelu: bool, is_kept: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """act(x Gᵀ) · (x Uᵀ), and both factors where they are kept for gated_linear_grad_."""
        if not self._multiplies(x_NK.dtype, *gate_FK.shape):
            gate, up = functional.linear(x_NK, gate_FK), functional.linear(x_NK, up_FK)
            return self.gated(gate, up, gelu=gelu), (gate, up) if is_kept else None
        out = x_NK.new_empty(x_NK.shape[0], gate_FK.shape[0])
        kept = (torch.empty_like(out), torch.empty_like(out)) if is_kept else None
        gate_up = (None, None) if kept is None else (kept[0].data_ptr(), kept[1].data_ptr())
        self._products["gated_bf16"](
            x_NK.data_ptr(), gate_FK.data_ptr(), up_FK.data_ptr(), *gate_up, out.data_ptr(), *out.shape, x_NK.shape[1],
            gelu, torch.get_num_threads(),
        )  # fmt: skip
        return out, kept

    def gated_linear_grad_(
        self, grad_NK: Tensor, down_KF: Tensor, gate_NF: Tensor, up_NF: Tensor, *, gelu: bool
    ) -> Tensor:
        """act(gate) · up again, for a gradient `grad` of its product with D; gate and up become their gradients."""
        if not self._multiplies(grad_NK.dtype, *down_KF.shape):
            out = grad_NK @ down_KF
            self.gated_grad_(gate_NF, up_NF, out, gelu=gelu)
            return out
        out = torch.empty_like(gate_NF)
        self._products["gated_grad_bf16"](
            grad_NK.data_ptr(), down_KF.data_ptr(), gate_NF.data_ptr(), up_NF.data_ptr(), out.data_ptr(), *out.shape,
            grad_NK.shape[1], gelu, torch.get_num_threads(),
        )  # fmt: skip
        return out

    # --- attention ----------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        layout: PackedLayout,
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """q [M, H·E], k and v [M, G·E] not yet rotated, cos and sin [M, E] → (out [M, H·E], log-sum-exp [H, M])."""
        assert layout.families is not None
        dim, rows = cos.shape[1], q.shape[0]
        heads, kv_heads = q.shape[1] // dim, k.shape[1] // dim
        out, lse = torch.empty_like(q), torch.empty(heads, rows)
        table = layout.families.table
        self._calls["attend", q.dtype](
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cos.data_ptr(),
            sin.data_ptr(), table.data_ptr(), table.shape[0], rows, heads, kv_heads, dim, scale, window,
            out.data_ptr(), lse.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out, lse

    def attend_grad(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
        layout: PackedLayout,
        scale: float,
        window: int,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `inputs` are attend()'s first five."""
        assert layout.families is not None
        q, k, v, cos, sin = inputs
        dim, rows = cos.shape[1], q.shape[0]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ends = layout.families.ends
        self._calls["attend_grad", q.dtype](
            q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), cos.data_ptr(),
            sin.data_ptr(), layout.families.table.data_ptr(), ends.data_ptr(), len(ends) - 1, rows,
            q.shape[1] // dim, k.shape[1] // dim, dim, scale, window, out.data_ptr(), grad_out.data_ptr(),
            lse.data_ptr(), dq.data_ptr(), dq.stride(0), dk.data_ptr(), dk.stride(0), dv.data_ptr(), dv.stride(0),
            torch.get_num_threads(),
        )  # fmt: skip
        return dq, dk, dv

    # --- head and optimizer -------------------------------------------------------------------------------

    def head_stats(self, logits_CV: Tensor, target_C: Tensor, scale: float, out_3C: Tensor) -> None:
        """Log-probability of the target, entropy and log-sum-exp of each row, written into out_3C's rows."""
        rows, vocab = logits_CV.shape
        self._calls["head_stats", logits_CV.dtype](
            logits_CV.data_ptr(), target_C.data_ptr(), rows, vocab, scale, *(row.data_ptr() for row in out_3C),
            torch.get_num_threads(),
        )  # fmt: skip

    def head_grad_(
        self,
        logits_CV: Tensor,
        target_C: Tensor,
        scale: float,
        out_3C: Tensor,
        grad_logprob_C: Tensor,
        grad_entropy_C: Tensor | None,
    ) -> None:
        """In place: logits become the loss's gradient by them. out_3C is head_stats' result."""
        rows, vocab = logits_CV.shape
        self._calls["head_grad", logits_CV.dtype](
            logits_CV.data_ptr(), target_C.data_ptr(), rows, vocab, scale, out_3C[1].data_ptr(), out_3C[2].data_ptr(),
            grad_logprob_C.data_ptr(), _pointer(grad_entropy_C), torch.get_num_threads(),
        )  # fmt: skip

    def adamw_(
        self,
        master: Tensor,
        grad: Tensor,
        mean: Tensor,
        square: Tensor,
        copy: Tensor | None,
        rates: AdamWRates,
    ) -> None:
        """torch.optim.AdamW's step on one float32 tensor and its moments; `copy` gets the result in bfloat16."""
        beta1, beta2 = rates.betas
        self._calls["adamw", grad.dtype](
            master.data_ptr(), grad.data_ptr(), mean.data_ptr(), square.data_ptr(), _pointer(copy), master.numel(),
            rates.gradient_scale, 1.0 - rates.learning_rate * rates.weight_decay,
            rates.learning_rate / (1.0 - beta1**rates.step), beta1, beta2, rates.epsilon,
            (1.0 - beta2**rates.step) ** 0.5, torch.get_num_threads(),
        )  # fmt: skip


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
