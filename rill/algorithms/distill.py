"""On-policy distillation: the student learns from a teacher's view of the student's own samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from rill.config.base import Config


class DistillationConfig(Config):
    coefficient: float = Field(0.0, ge=0)
    """λ. 0: off, and no teacher is needed."""
    form: Literal["advantage", "full_vocabulary"] = "advantage"
    """advantage: λ times the log-ratio of the sampled token leaves the advantage. full_vocabulary: λ times
    KL(student ∥ teacher) over the whole vocabulary joins the loss."""


def distilled_advantages(
    advantages_N: Tensor, student_logprobs_N: Tensor, teacher_logprobs_N: Tensor, coefficient: float
) -> Tensor:
    """A'_t = A_t − λ (log π_student(a_t) − log π_teacher(a_t)). Carries no gradient."""
    return advantages_N - coefficient * (student_logprobs_N - teacher_logprobs_N).detach()
