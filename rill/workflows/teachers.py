"""Teachers of on-policy distillation, as a recipe names them.

form "advantage"         one teacher, a group of its own between the engines and the trainer (placement.teacher)
form "full_vocabulary"   any number, beside the trainer: their logits are rebuilt there, chunk by chunk
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rill.algorithms import Algorithm, AlgorithmConfig, Need
from rill.training.score import FrozenModel, ScoreModel


class TeacherConfig(FrozenModel.Config):
    """[[teachers]]: a frozen model of the student's vocabulary."""

    weight: float = 1.0
    """Of its divergence among those of several teachers."""


def check_teachers(teachers: Sequence[TeacherConfig], algorithm: AlgorithmConfig) -> None:
    """Raise ValueError where an algorithm and the teachers do not go together."""
    needs = Algorithm(algorithm).needs
    if Need.TEACHER_LOGPROBS in needs and len(teachers) != 1:
        raise ValueError(
            f"distillation on the advantage follows one teacher, the recipe has {len(teachers)} [[teachers]]: name one "
            "or set algorithm.distillation.form = 'full_vocabulary'"
        )
    if Need.FULL_VOCABULARY_TEACHER in needs and not teachers:
        raise ValueError("distillation over the vocabulary needs [[teachers]]: name at least one")
    if teachers and not needs & {Need.TEACHER_LOGPROBS, Need.FULL_VOCABULARY_TEACHER}:
        raise ValueError(
            "[[teachers]] have nothing to teach: set algorithm = 'distill', or algorithm.distillation.coefficient"
        )


def scoring_config(teacher: TeacherConfig, temperature: float) -> ScoreModel.Config:
    return ScoreModel.Config(**teacher.model_dump(exclude={"weight"}), temperature=temperature)


def open_teachers(
    teachers: Sequence[TeacherConfig], temperature: float, device: str | torch.device
) -> list[tuple[ScoreModel, float]]:
    """Models and weights, as PolicyTrainer.set_teachers wants them."""
    return [(ScoreModel(scoring_config(t, temperature), device=device), t.weight) for t in teachers]
