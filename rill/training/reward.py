"""RewardModel: a frozen model that gives one number for a whole sequence.

Caller: the reward worker of an RL run. The number is read at the sequence's last token, as RewardTrainer trains it and
as transformers' sequence classifiers give it; heads of both are understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rill.errors import ModelError
from rill.models.loading import ModelConfig, model_folder
from rill.training.module import VALUE_HEAD_FILE, ValueModule
from rill.training.score import FrozenModel, sequence_scores
from rill.types import TokenIds

CLASSIFIER_HEAD = "score.weight"
"""The head of transformers' sequence classifiers, in the model's own files."""


class RewardModel(FrozenModel):
    """Scores of whole sequences."""

    needs_head = False

    class Config(FrozenModel.Config):
        model: ModelConfig
        """A folder that RewardTrainer exported, or one of transformers' sequence classifiers with a single label."""

    config: Config

    def _make_module(self, lm: Any) -> ValueModule:
        if not self.config.model.path:
            raise ModelError(
                "a reward model with fresh weights prefers nothing: give reward_model.model.path"
            )
        folder = Path(model_folder(self.config.model.path))
        module = ValueModule(lm, folder / VALUE_HEAD_FILE)
        if not (folder / VALUE_HEAD_FILE).exists():
            _load_classifier_head(module, folder)
        return module

    def scores(self, sequences: Sequence[TokenIds]) -> list[float]:
        """One number to each sequence, in their order; NaN to one that is too long and to be skipped, which has no
        reward then, not 0."""
        return sequence_scores(self.module, self.batcher, sequences)


def _load_classifier_head(module: ValueModule, folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if CLASSIFIER_HEAD in file.keys():  # noqa: SIM118  not a mapping
                weight = file.get_tensor(CLASSIFIER_HEAD)
                if weight.shape != module.value_head.weight.shape:
                    raise ModelError(
                        f"{path}: {CLASSIFIER_HEAD} has the shape {tuple(weight.shape)}, a reward model has one label: "
                        f"{tuple(module.value_head.weight.shape)}"
                    )
                with torch.no_grad():
                    module.value_head.weight.copy_(weight)
                return
    raise ModelError(
        f"{folder} has no head to score with: neither {VALUE_HEAD_FILE} nor {CLASSIFIER_HEAD} in its weights"
    )
