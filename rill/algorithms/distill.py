"""On-policy distillation: the student learns from a teacher's view of the student's own samples.

Two forms. On the advantage it needs one log-probability per token from any teacher, even behind an HTTP API. On
the full vocabulary it needs the teacher's last hidden states (kept instead of logits: a tenth of the bytes or
less) and its head, and has a far lower variance.

N token, M token of one teacher, C token of a chunk, V vocabulary, D student's and E teacher's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rill.config.base import Config
from rill.errors import ModelError, TrainingError

Direction = Literal["reverse", "forward"]


class DistillationConfig(Config):
    coefficient: float = Field(0.0, ge=0)
    """λ. 0: off, and no teacher is needed."""
    form: Literal["advantage", "full_vocabulary"] = "advantage"
    """advantage: λ times the log-ratio of the sampled token leaves the advantage. full_vocabulary: λ times the
    KL over the whole vocabulary joins the loss."""
    direction: Direction = "reverse"
    """Full vocabulary only. reverse: KL(student ∥ teacher), seeks modes. forward: KL(teacher ∥ student)."""
    temperature: float = Field(1.0, gt=0)
    """Full vocabulary only: both sides' logits are divided by it."""
    chunk_tokens: int = Field(1024, gt=0)
    """Tokens whose logits exist at once; memory is 2 · chunk · vocabulary floats."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """One teacher's view of its tokens. Ordering samples by teacher means one head is in memory at a time."""

    hidden_ME: Tensor
    """Last hidden states, after the final norm, of the positions that predict the tokens."""
    index_M: Tensor | None = None
    """Which tokens of the micro-batch these are; None: all, in order."""
    load_head: Callable[[], Tensor]
    """Gives the head [V, E] on the device of hidden_ME; called once per micro-batch."""
    weight: float = 1.0


def distilled_advantages(
    advantages_N: Tensor, student_logprobs_N: Tensor, teacher_logprobs_N: Tensor, coefficient: float
) -> Tensor:
    """A'_t = A_t − λ (log π_student(a_t) − log π_teacher(a_t)). Carries no gradient."""
    return advantages_N - coefficient * (student_logprobs_N - teacher_logprobs_N).detach()


def full_vocabulary_kl(
    student_hidden_ND: Tensor,
    student_head_VD: Tensor,
    teachers: Sequence[Teacher],
    *,
    direction: Direction = "reverse",
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
) -> Tensor:
    """kl_N[t] = Σ_i w_i KL(π_student ∥ π_teacher_i) at t, over the teachers that have t; 0 where none has.

    Logits live for one chunk only: the backward pass rebuilds them from the hidden states. Gradients reach the
    student's hidden states and head, never a teacher.
    """
    parts: list[tuple[Tensor, Tensor]] = []
    num_tokens = student_hidden_ND.shape[0]
    for teacher in teachers:
        head_VE = teacher.load_head().detach()
        if head_VE.shape[0] != student_head_VD.shape[0]:
            raise ModelError(
                f"student and teacher must share a vocabulary, theirs have {student_head_VD.shape[0]} and "
                f"{head_VE.shape[0]} entries: take a teacher of the same family"
            )
        index_M = teacher.index_M
        if index_M is None:
            index_M = torch.arange(num_tokens, device=student_hidden_ND.device)
        if teacher.hidden_ME.shape[0] != index_M.numel():
            raise TrainingError(f"{teacher.hidden_ME.shape[0]} teacher states for {index_M.numel()} tokens")
        for start in range(0, index_M.numel(), chunk_tokens):
            index_C = index_M[start : start + chunk_tokens]
            teacher_CE = teacher.hidden_ME[start : start + chunk_tokens].detach()
            kl_C = checkpoint(
                chunk_kl,
                student_hidden_ND[index_C],
                student_head_VD,
                teacher_CE,
                head_VE,
                direction,
                temperature,
                use_reentrant=False,
            )
            parts.append((index_C, teacher.weight * kl_C))
    kl_N = torch.zeros(num_tokens, dtype=torch.float32, device=student_hidden_ND.device)
    for index_C, kl_C in parts:
        kl_N = kl_N.to(kl_C.dtype).index_add(0, index_C, kl_C)
    return kl_N


def chunk_kl(
    student_CD: Tensor,
    student_head_VD: Tensor,
    teacher_CE: Tensor,
    teacher_head_VE: Tensor,
    direction: Direction,
    temperature: float,
) -> Tensor:
    """KL(p ∥ q) = Σ_v p_v (log p_v − log q_v) for each token; p is the student when reverse, else the teacher."""
    student_CV = _log_softmax(student_CD @ student_head_VD.T, temperature)
    teacher_CV = _log_softmax(teacher_CE @ teacher_head_VE.T, temperature)
    p_CV, q_CV = (student_CV, teacher_CV) if direction == "reverse" else (teacher_CV, student_CV)
    return (p_CV.exp() * (p_CV - q_CV)).sum(-1)


def _log_softmax(logits_CV: Tensor, temperature: float) -> Tensor:
    """In float32 at least: a vocabulary's worth of bfloat16 does not sum to 1."""
    wide = logits_CV if logits_CV.dtype is torch.float64 else logits_CV.float()
    return torch.log_softmax(wide / temperature, dim=-1)
