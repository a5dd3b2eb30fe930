"""Supervised training on the same engine: cross-entropy on the tokens that the loss mask names.

Callers: the `sft` workflow, and an RL run's warm-up, which trains the policy's own engine. The gradient is that of
−Σ log π / Σ trained tokens over the whole batch, whatever its split over ranks and micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rill.algorithms.base import LossSum, Metric
from rill.data.chat import PromptEncoder
from rill.data.sft import SFTEncoder
from rill.errors import InvalidSampleError
from rill.models.loading import load_tokenizer
from rill.models.pictures import load_pictures
from rill.training.batching import gather_context
from rill.training.engine_config import EngineConfig
from rill.training.packing import Masked, PackSequence
from rill.training.trainer import Trainer


class Example(Masked, Protocol):
    """A sequence to imitate; rill.data.sft.SFTExample is one."""

    @property
    def id(self) -> str: ...


class SFTTrainer(Trainer):
    """Trains a causal language model to imitate examples."""

    class Config(EngineConfig):
        """Nothing beyond the engine's."""

    rate: float | None = None
    """Learning rate of the steps from now on, in place of the engine's schedule."""

    @classmethod
    def sharing(cls, trainer: Trainer, *, learning_rate: float) -> SFTTrainer:
        """Supervised steps on another trainer's engine, at their own rate. Call finish() before going back to it."""
        self = cls(trainer.config, engine=trainer.engine)
        self.rate = learning_rate
        return self

    def update(self, examples: Sequence[Example]) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch. Metrics are over all ranks."""
        self._forget()
        with self._working():
            self._accumulate(examples)
        metrics = self._apply(self.rate)
        metrics["sft/perplexity"] = _perplexity(metrics["loss"])
        return metrics

    def _accumulate(self, examples: Sequence[Example]) -> None:
        """Add these examples' gradient. A rank brings what it has read and trains on what is dealt out to it."""
        own = self._fitting(self._checked(examples), lambda s: s.num_tokens, lambda s: bool(s.wanted.any()))
        kept = self._dealt_out(own, lambda s: [s.num_tokens])
        for batch in self.batcher.micro_batches(kept):
            output = self.engine.module(batch.pack)
            logprobs_K = gather_context(output.logprobs_K, batch.pack, self.world)
            entropy_K = gather_context(output.entropy_K, batch.pack, self.world)
            ones_K = torch.ones_like(entropy_K)
            metrics = {"sft/entropy": Metric.mean(entropy_K, ones_K)}
            loss = LossSum(numerator=-logprobs_K.sum(), denominator=ones_K.sum(), metrics=metrics)
            self._learn(batch, loss, logprobs_K)
        self._count(samples=len(kept))

    def evaluate(self, examples: Sequence[Example]) -> dict[str, float]:
        """Loss and perplexity of held-out examples over all ranks; nothing is trained."""
        sequences = [s for s in self._checked(examples) if self.keeps(s.num_tokens)]
        values = self.batcher.per_token(sequences, lambda pack: self.engine.module(pack).logprobs_K)
        total = torch.tensor(
            [-sum(float(v.sum()) for v in values), float(sum(s.wanted.sum() for s in sequences))],
            dtype=torch.float64 if self.world.device.type == "cpu" else torch.float32,
            device=self.world.device,
        )
        loss_sum, count = self.world.sum_over_data(total).tolist()
        loss = loss_sum / count if count else 0.0
        return {"eval/loss": loss, "eval/perplexity": _perplexity(loss), "eval/tokens": count}

    def finish(self) -> None:
        """Give a shared engine back: its optimizer starts afresh, with its own rate and step count."""
        self.engine.restart_optimizer()

    def _checked(self, examples: Sequence[Example]) -> list[PackSequence]:
        sequences: list[PackSequence] = []
        for example in examples:
            if example.loss_mask.dtype != np.bool_ or len(example.loss_mask) != len(example.token_ids):
                raise InvalidSampleError(f"{example.id}: loss_mask must be one bool for each token")
            self.batcher.check_tokens(example.id, example.token_ids)
            sequences.append(PackSequence.of(example))
        return sequences


def open_encoder(config: EngineConfig) -> SFTEncoder:
    """Rows to examples, for a trainer's model. What the trainer skips and counts must reach it."""
    prompts = PromptEncoder(load_tokenizer(config.model))
    prompts.pictures = load_pictures(config.model)
    limit = config.micro_batch_tokens if config.on_too_long == "error" else None
    return SFTEncoder(prompts, max_tokens=limit)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 80.0))
