"""The head's softmax work in Triton, one pass over the logits each: CUDA only.

Callers: rill.models.train.head, whose formulas these are. A row of logits is read once for its log-sum-exp, the chosen
token's log-probability and the entropy; the gradient takes the place of the logits.

C token of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _stats(  # type: ignore[no-untyped-def]  # Triton reads annotations as code
    logits_ptr, target_ptr, logprob_ptr, entropy_ptr, lse_ptr, scale, size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    top, total, weighted = float("-inf"), 0.0, 0.0  # max l, Σ exp(l − max), Σ l exp(l − max)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + at, mask=at < size, other=float("-inf")).to(tl.float32) * scale
        new_top = tl.maximum(top, tl.max(x, 0))
        p = tl.exp(x - new_top)
        fade = tl.exp(top - new_top)
        total = total * fade + tl.sum(p, 0)
        weighted = weighted * fade + tl.sum(tl.where(p > 0.0, p * x, 0.0), 0)
        top = new_top
    chosen = tl.load(logits_ptr + tl.load(target_ptr + row)).to(tl.float32) * scale
    lse = top + tl.log(total)
    tl.store(logprob_ptr + row, chosen - lse)
    tl.store(entropy_ptr + row, lse - weighted / total)
    tl.store(lse_ptr + row, lse)


@triton.jit  # type: ignore[untyped-decorator]
def _gradient(  # type: ignore[no-untyped-def]
    logits_ptr, target_ptr, lse_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, scale, size,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += row * size
    x = tl.load(logits_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    logp = x * scale - tl.load(lse_ptr + row)
    grad_logprob = tl.load(grad_logprob_ptr + row)
    factor = -grad_logprob
    if HAS_ENTROPY:
        factor -= tl.load(grad_entropy_ptr + row) * (logp + tl.load(entropy_ptr + row))
    grad = tl.exp(logp) * factor + tl.where(at == tl.load(target_ptr + row), grad_logprob, 0.0)
    tl.store(logits_ptr + at, (grad * scale).to(logits_ptr.dtype.element_ty), mask=at < size)


def chunk_stats(logits_CV: Tensor, target_C: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob_C, entropy_C, logsumexp_C) in float32."""
    num_rows, size = logits_CV.shape
    out_3C = torch.empty(3, num_rows, dtype=torch.float32, device=logits_CV.device)
    _stats[(num_rows,)](logits_CV, target_C, *out_3C, scale, size, BLOCK=_BLOCK, num_warps=8)
    return out_3C[0], out_3C[1], out_3C[2]


def chunk_gradient_(
    logits_CV: Tensor,
    target_C: Tensor,
    lse_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
    scale: float,
) -> Tensor:
    """∂loss/∂logits, written over the logits."""
    num_rows, size = logits_CV.shape
    _gradient[(num_rows, triton.cdiv(size, _BLOCK))](
        logits_CV, target_C, lse_C, entropy_C, grad_logprob_C.contiguous(),
        entropy_C if grad_entropy_C is None else grad_entropy_C.contiguous(), scale, size,
        HAS_ENTROPY=grad_entropy_C is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return logits_CV
