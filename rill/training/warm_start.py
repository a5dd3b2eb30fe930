"""Supervised steps on the engine of a trainer that goes on with something else: where RL begins.

Called by the actor of an RL workflow ([sft] in its recipe). Each rank reads its own part of the data; the rate falls
along a cosine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rill.config import PartConfig
from rill.data.base import Split, open_dataset
from rill.data.loader import LoaderConfig, open_loader
from rill.data.sft import check_written
from rill.training.sft import SFTTrainer, open_encoder
from rill.training.trainer import Trainer


class WarmStart:
    def __init__(
        self,
        trainer: Trainer,
        data: PartConfig,
        *,
        steps: int,
        batch_size: int,
        learning_rate: float,
        seed: int,
        num_done: int = 0,
        place: Mapping[str, Any] | None = None,
    ) -> None:
        """`num_done`: of the steps, by a trainer whose state this one has loaded, and where it stood in the data."""
        self.trainer = SFTTrainer.sharing(trainer, learning_rate=learning_rate)
        self._num_steps = steps
        self._learning_rate = learning_rate
        self._encoder = open_encoder(trainer.config)
        dataset = open_dataset(data, Split.TRAIN, check=check_written)
        rank, size = trainer.world.data_rank, trainer.world.data_size
        self.loader = open_loader(dataset, LoaderConfig(seed=seed), rank=rank, world=size)
        self._batch_size = max(1, batch_size // size)
        self._step = num_done
        if place is None:
            self.loader.next(num_done * self._batch_size)
        else:
            self.loader.load_state(place)

    @property
    def is_over(self) -> bool:
        return self._step == self._num_steps

    def run(self, num_steps: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for _ in range(num_steps):
            self.trainer.rate = self._rate()
            metrics = self.trainer.update(
                [self._encoder.encode(p) for p in self.loader.next(self._batch_size)]
            )
            self._step += 1
        return {"sft/loss": metrics["loss"], "sft/train_tokens_per_s": metrics["train_tokens_per_s"]}

    def _rate(self) -> float:
        steps = self._num_steps
        rising = min(1.0, (self._step + 1) / max(1, min(50, steps // 10)))
        falling = 0.5 * (1.0 + math.cos(math.pi * self._step / steps))
        return self._learning_rate * rising * falling
