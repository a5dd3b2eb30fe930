"""The head on the CPU: the products and formulas of rill.models.head with the training step's C++ kernels.

Caller: rill.models.head. Chunks are small enough that a chunk's logits are still in cache when the next kernel reads
them; the gradient takes the place of the logits.

K chosen token, C token of one chunk, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rill.models.cpu_training import GradientSums, TrainingKernels

_CHUNK_BYTES = 8 * 2**20
_LEAST_ROWS = 256
"""Below this a product spends its time on arranging the weight."""


def chosen_logprobs_cpu(
    kernels: TrainingKernels,
    hidden_KD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_K: Tensor,
    *,
    scale: float,
    most_rows: int,
    keep_bytes: int,
    sums: GradientSums | None,
) -> tuple[Tensor, Tensor]:
    """(logprob_K, entropy_K); `most_rows` bounds a chunk."""
    row_bytes = weight_VD.shape[0] * hidden_KD.element_size()
    num_rows = min(most_rows, max(_LEAST_ROWS, _CHUNK_BYTES // row_bytes))
    logprob_K, entropy_K = _ChosenLogprobs.apply(
        hidden_KD, weight_VD, bias_V, target_K, kernels, sums, scale, num_rows, keep_bytes
    )  # type: ignore[no-untyped-call]
    return logprob_K, entropy_K


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_K: Tensor,
        kernels: TrainingKernels,
        sums: GradientSums | None,
        scale: float,
        num_rows: int,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        num_chosen = hidden_KD.shape[0]
        out_3K = torch.empty(3, num_chosen)
        is_kept = any(ctx.needs_input_grad[:3])
        is_kept &= num_chosen * weight_VD.shape[0] * hidden_KD.element_size() <= keep_bytes
        ctx.kept = []
        for start in range(0, num_chosen, num_rows):
            rows = slice(start, start + num_rows)
            logits_CV = kernels.linear(hidden_KD[rows], weight_VD, bias_V)
            kernels.head_stats(logits_CV, target_K[rows], scale, out_3K[:, rows])
            if is_kept:
                ctx.kept.append(logits_CV)
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, target_K, out_3K)
        ctx.kernels, ctx.sums, ctx.scale, ctx.num_rows = kernels, sums, scale, num_rows
        ctx.set_materialize_grads(False)
        return out_3K[0].clone(), out_3K[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden_KD, weight_VD, bias_V, target_K, out_3K = ctx.saved_tensors
        kernels: TrainingKernels = ctx.kernels
        grad_logprob_K = torch.zeros_like(out_3K[0]) if grads[0] is None else grads[0].contiguous()
        grad_entropy_K = None if grads[1] is None else grads[1].contiguous()
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_KD = torch.empty_like(hidden_KD) if needs_hidden else None
        sums = _ChunkSums(ctx.sums) if needs_weight else None
        grad_bias_V: Tensor | None = None
        kept, ctx.kept = ctx.kept, []  # written over below: a second backward pass computes them again
        for index, start in enumerate(range(0, hidden_KD.shape[0], ctx.num_rows)):
            rows = slice(start, start + ctx.num_rows)
            grad_CV = kept[index] if kept else kernels.linear(hidden_KD[rows], weight_VD, bias_V)
            kernels.head_grad_(
                grad_CV,
                target_K[rows],
                ctx.scale,
                out_3K[:, rows],
                grad_logprob_K[rows],
                None if grad_entropy_K is None else grad_entropy_K[rows],
            )
            if grad_hidden_KD is not None:
                grad_hidden_KD[rows] = kernels.input_grad([grad_CV], [weight_VD])
            if sums is not None:
                kernels.weight_grad(grad_CV, hidden_KD[rows], weight_VD, sums)
            if needs_bias:
                part_V = kernels.bias_grad(grad_CV).float()
                grad_bias_V = part_V if grad_bias_V is None else grad_bias_V + part_V
        grad_weight_VD = None if sums is None else sums.result(weight_VD)
        if grad_bias_V is not None and bias_V is not None:
            grad_bias_V = grad_bias_V.to(bias_V.dtype)
        return grad_hidden_KD, grad_weight_VD, grad_bias_V, *(None,) * 6


class _ChunkSums:
    """The weight's gradient over all chunks: in the caller's sums where it has them, else for autograd."""

    def __init__(self, outer: GradientSums | None) -> None:
        self._outer = outer
        self._own: Tensor | None = None
        self._is_outside = False

    def sum_of(self, weight: Tensor) -> tuple[Tensor, bool]:
        place = None if self._outer is None else self._outer.sum_of(weight)
        if place is not None:
            self._is_outside = True
            return place
        is_begun = self._own is not None
        if self._own is None:
            self._own = torch.empty(weight.shape, dtype=torch.float32)
        return self._own, is_begun

    def result(self, weight: Tensor) -> Tensor | None:
        if self._is_outside:
            return None
        return torch.zeros_like(weight) if self._own is None else self._own.to(weight.dtype)
