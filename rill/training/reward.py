"""RewardModel: a frozen model that gives one number for a whole sequence.

Caller: the reward worker of an RL run. The number is read at the sequence's last token, as RewardTrainer trains it and
as transformers' sequence classifiers give it; heads of both are understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from safetensors import safe_open

from rill.config import Config
from rill.errors import ModelError
from rill.models.loading import DTYPES, ModelConfig, model_folder
from rill.training.batching import Batcher
from rill.training.engine_config import Precision
from rill.training.module import VALUE_HEAD_FILE, ValueModule, load_packed_lm
from rill.training.offload import Shelf
from rill.training.packing import PackSequence
from rill.training.parallel import World
from rill.types import TokenIds

CLASSIFIER_HEAD = "score.weight"
"""The head of transformers' sequence classifiers, in the model's own files."""


class RewardModel:
    """Scores of whole sequences. Runs in one process; data parallelism is several of them."""

    class Config(Config):
        model: ModelConfig
        """A folder that RewardTrainer exported, or one of transformers' sequence classifiers with a single label."""
        dtype: Precision = "float32"
        """Precision of weights and arithmetic."""
        micro_batch_tokens: int = Field(default=16_384, ge=2)

    def __init__(self, config: Config, *, device: str | torch.device = "cpu") -> None:
        if not config.model.path:
            raise ModelError(
                "a reward model with fresh weights prefers nothing: give reward_model.model.path"
            )
        dtype, folder = DTYPES[config.dtype], Path(model_folder(config.model.path))
        self.world = World(None, torch.device(device))
        lm = load_packed_lm(config.model, dtype=dtype, device=self.world.device)
        self.module = ValueModule(lm, folder / VALUE_HEAD_FILE)
        if not (folder / VALUE_HEAD_FILE).exists():
            _load_classifier_head(self.module, folder)
        self.module.requires_grad_(False)
        self._shelf = Shelf()
        self.batcher = Batcher(
            world=self.world,
            compute_dtype=dtype,
            micro_batch_tokens=config.micro_batch_tokens,
            vocab_size=self.module.vocab_size,
        )

    @torch.no_grad()
    def scores(self, sequences: Sequence[TokenIds]) -> list[float]:
        """One number to each sequence, in their order."""
        packed = []
        for index, tokens in enumerate(sequences):
            self.batcher.check_tokens(f"sequence {index}", tokens)
            packed.append(PackSequence(token_ids=tokens, wanted=np.zeros(len(tokens), dtype=np.bool_)))
        scores = [0.0] * len(packed)
        for batch in self.batcher.micro_batches(packed):
            values = self.module(batch.pack, per_sequence=True).tolist()
            for index, value in zip(
                batch.indices, values, strict=False
            ):  # an idle pack has one and holds none
                scores[index] = value
        return scores

    def offload(self) -> None:
        if self.world.device.type != "cpu":
            self._shelf.put([*self.module.parameters(), *self.module.buffers()])
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._shelf.take_all()


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
