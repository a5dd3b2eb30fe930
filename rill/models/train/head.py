"""The language-model head without its logits: log-probability and entropy of chosen tokens, chunk by chunk.

Owns the only code that multiplies hidden states with the vocabulary matrix during training. Callers pick the positions
they need (trained tokens), so prompts and observations cost nothing here. No tensor of shape tokens × vocabulary
outlives its chunk: the backward pass computes each chunk's logits again, unless the logits of the whole micro-batch fit
in `keep_bytes`. Gradients are exact for both outputs. The softmax work on CUDA is in rill.models.ops.triton_head.

M hidden state of the micro-batch, K chosen token, C token of one chunk, D model width, V vocabulary.

For logits l = cap(W h + b) · scale with cap(x) = c tanh(x / c) where an architecture has one, p = softmax(l), target y:

    logprob = l_y − logsumexp(l)                    ∂/∂l = onehot(y) − p
    entropy = logsumexp(l) − Σ p l                  ∂/∂l = −p (log p + entropy)
    cap(x)                                          ∂/∂x = 1 − (cap(x) / c)²
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rill.models.train.products import GradientSums, hand_over, is_coarse, linear, product

CHUNK_BYTES = 256 * 2**20
"""Upper limit of one chunk's float32 logits. Large enough for full speed, small next to the activations."""
KEEP_BYTES = 64 * 2**20
"""Logits of a whole micro-batch up to this size are kept for the backward pass instead of being computed twice."""

_ROW_MULTIPLE = 256
"""Chunks of more rows than this hold a multiple of it: matrix units like whole tiles."""


def chosen_logprobs(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    source_K: Tensor,
    target_K: Tensor,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    keep_bytes: int = KEEP_BYTES,
    sums: GradientSums | None = None,
) -> tuple[Tensor, Tensor]:
    """(logprob_K, entropy_K) in float32 of token target_K[k] predicted from hidden state source_K[k].

    `scale` multiplies the logits: 1 / temperature, times whatever factor the architecture has. `cap` comes first.
    """
    num_rows = max(1, chunk_bytes // (4 * weight_VD.shape[0]))
    if num_rows > _ROW_MULTIPLE:
        num_rows -= num_rows % _ROW_MULTIPLE
    hidden_KD = hidden_MD.index_select(0, source_K)
    logprob_K, entropy_K = _ChosenLogprobs.apply(
        hidden_KD, weight_VD, bias_V, target_K, scale, cap, num_rows, keep_bytes, sums
    )  # type: ignore[no-untyped-call]
    return logprob_K, entropy_K


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, cap: float | None) -> Tensor:
    logits_CV = linear(hidden_CD, weight_VD, bias_V)
    return logits_CV if cap is None else logits_CV.div_(cap).tanh_().mul_(cap)


def _chunk_stats(logits_CV: Tensor, target_C: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob_C, entropy_C, logsumexp_C)."""
    scaled_CV = logits_CV.float() * scale
    lse_C = torch.logsumexp(scaled_CV, dim=-1)
    chosen_C = scaled_CV.gather(-1, target_C[:, None])[:, 0]
    mean_C = (torch.exp(scaled_CV - lse_C[:, None]) * scaled_CV).sum(-1)
    return chosen_C - lse_C, lse_C - mean_C, lse_C


def _chunk_gradient(
    logits_CV: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
    scale: float,
) -> Tensor:
    """∂loss/∂logits in the logits' dtype. May write over the logits."""
    logp_CV = logits_CV.float().mul_(scale).sub_(lse_C[:, None])
    if grad_entropy_C is None:
        grad_CV = logp_CV.exp_().mul_(-grad_logprob_C[:, None])
    else:
        factor_CV = torch.addcmul(
            (-grad_logprob_C - grad_entropy_C * entropy_C)[:, None], logp_CV, -grad_entropy_C[:, None]
        )
        grad_CV = logp_CV.exp_().mul_(factor_CV)
    grad_CV.scatter_add_(-1, target_C[:, None], grad_logprob_C[:, None])
    return grad_CV.mul_(scale).to(logits_CV.dtype)


def _kernels(device: torch.device) -> tuple[Callable[..., Any], Callable[..., Tensor]]:
    """(stats, gradient) of a chunk: one pass over memory each where Triton can run, else torch's operations."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from rill.models.ops.triton_head import chunk_gradient_, chunk_stats

        return chunk_stats, chunk_gradient_
    return _chunk_stats, _chunk_gradient


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_KD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_K: Tensor,
        scale: float,
        cap: float | None,
        num_rows: int,
        keep_bytes: int,
        sums: GradientSums | None,
    ) -> tuple[Tensor, Tensor]:
        stats, _ = _kernels(hidden_KD.device)
        num_chosen = hidden_KD.shape[0]
        out_3K = torch.empty(3, num_chosen, dtype=torch.float32, device=hidden_KD.device)
        keep = any(ctx.needs_input_grad[:3])
        keep &= num_chosen * weight_VD.shape[0] * hidden_KD.element_size() <= keep_bytes
        if keep:
            num_rows = max(1, num_chosen)  # one product for all, forward and backward
        ctx.kept_CV = None
        for start in range(0, num_chosen, num_rows):
            rows = slice(start, start + num_rows)
            logits_CV = _logits(hidden_KD[rows], weight_VD, bias_V, cap)
            out_3K[0, rows], out_3K[1, rows], out_3K[2, rows] = stats(logits_CV, target_K[rows], scale)
            if keep:
                ctx.kept_CV = logits_CV
        ctx.save_for_backward(hidden_KD, weight_VD, bias_V, target_K, out_3K)
        ctx.scale, ctx.cap, ctx.num_rows, ctx.sums = scale, cap, num_rows, sums
        ctx.set_materialize_grads(False)
        return out_3K[0].clone(), out_3K[1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_logprob_K, grad_entropy_K = grads
        hidden_KD, weight_VD, bias_V, target_K, out_3K = ctx.saved_tensors
        # Written over below: a second backward pass computes it again.
        kept_CV, ctx.kept_CV = ctx.kept_CV, None
        if grad_logprob_K is None:
            grad_logprob_K = torch.zeros_like(out_3K[0])
        _, gradient = _kernels(hidden_KD.device)
        grad_hidden_KD = torch.empty_like(hidden_KD) if ctx.needs_input_grad[0] else None
        needs_weight = ctx.needs_input_grad[1]
        grad_weight_VD: Tensor | None = None
        grad_bias_V: Tensor | None = None
        for start in range(0, hidden_KD.shape[0], ctx.num_rows):
            rows = slice(start, start + ctx.num_rows)
            logits_CV = _logits(hidden_KD[rows], weight_VD, bias_V, ctx.cap) if kept_CV is None else kept_CV
            slope_CV = None if ctx.cap is None else 1 - (logits_CV / ctx.cap).square_()
            grad_CV = gradient(
                logits_CV,
                target_K[rows],
                out_3K[2, rows],
                out_3K[1, rows],
                grad_logprob_K[rows],
                None if grad_entropy_K is None else grad_entropy_K[rows],
                ctx.scale,
            )
            del logits_CV
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            if grad_hidden_KD is not None:
                grad_hidden_KD[rows] = product(grad_CV, weight_VD)
            if needs_weight:
                grad_weight_VD = _accumulate(grad_weight_VD, grad_CV.t(), hidden_KD[rows])
            if bias_V is not None and ctx.needs_input_grad[2]:
                part_V = grad_CV.float().sum(0)
                grad_bias_V = part_V if grad_bias_V is None else grad_bias_V + part_V
        if grad_weight_VD is None and needs_weight:
            grad_weight_VD = torch.zeros_like(weight_VD)
        if grad_weight_VD is not None:
            grad_weight_VD = hand_over(grad_weight_VD, weight_VD, ctx.sums)
        return (
            grad_hidden_KD,
            grad_weight_VD,
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            *(None,) * 6,
        )


def _accumulate(total_VD: Tensor | None, grad_VC: Tensor, hidden_CD: Tensor) -> Tensor:
    """total + grad @ hidden. The sum over chunks is kept in float32: adding bf16 chunks would lose bits."""
    if is_coarse(grad_VC):
        grad_VC, hidden_CD = grad_VC.float(), hidden_CD.float()
    if total_VD is None:
        return grad_VC @ hidden_CD
    if grad_VC.dtype == torch.float32:
        return total_VD.addmm_(grad_VC, hidden_CD)
    return total_VD.float().add_(grad_VC @ hidden_CD)
