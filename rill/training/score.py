"""Frozen models that only read: FrozenModel, and ScoreModel, a reference or teacher policy.

Callers: reference and teacher workers; PolicyTrainer for distillation over the whole vocabulary; rill.training.reward.
Numbers are computed exactly as the trainers compute their own (same packing, head and precision).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.config import Config
from rill.errors import WeightSyncError
from rill.models.loading import DTYPES, ModelConfig
from rill.models.train.attention_packed import compile_layer
from rill.models.train.products import sum_in_float32
from rill.training.batching import Batcher
from rill.training.engine_config import Precision
from rill.training.module import PackedModule, PolicyModule, load_packed_lm
from rill.training.offload import Shelf
from rill.training.packing import Pack, PackSequence
from rill.training.parallel import World
from rill.types import Floats, Sample, TokenIds


class FrozenModel:
    """A packed module in one process; data parallelism is several of them."""

    class Config(Config):
        model: ModelConfig
        dtype: Precision = "float32"
        """Precision of weights and arithmetic."""
        micro_batch_tokens: int = Field(default=16_384, ge=2)
        compile: bool = False

    def __init__(self, config: Config, device: torch.device, make: Callable[[Any], PackedModule]) -> None:
        dtype = DTYPES[config.dtype]
        self.world = World(None, device)
        lm = load_packed_lm(config.model, dtype=dtype, device=device)
        self.module = make(lm)
        self.module.requires_grad_(False)
        if device.type == "cpu" and not config.compile:
            sum_in_float32(lm)
        if config.compile:
            for layer in self.module.layers:
                compile_layer(layer)
        self._shelf = Shelf()
        self.batcher = Batcher(
            world=self.world,
            use_flash=self.module.can_use_flash(device, dtype),
            micro_batch_tokens=config.micro_batch_tokens,
            vocab_size=self.module.vocab_size,
        )

    def offload(self) -> None:
        if self.world.device.type != "cpu":
            self._shelf.put([*self.module.parameters(), *self.module.buffers()])
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._shelf.take_all()


def sequence_scores(module: PackedModule, batcher: Batcher, sequences: Sequence[TokenIds]) -> list[float]:
    """What a ValueModule gives each whole sequence; a collective where its trainer has several ranks."""
    packed = []
    for index, tokens in enumerate(sequences):
        batcher.check_tokens(f"sequence {index}", tokens)
        packed.append(PackSequence(token_ids=tokens, wanted=np.zeros(len(tokens), dtype=np.bool_)))
    scores = [0.0] * len(packed)
    with torch.no_grad():
        for batch in batcher.micro_batches(packed):
            values = module(batch.pack, per_sequence=True).tolist()
            for index, value in zip(batch.indices, values, strict=False):
                scores[index] = value
    return scores


class ScoreModel(FrozenModel):
    """Log-probabilities of given tokens."""

    class Config(FrozenModel.Config):
        temperature: float = Field(default=1.0, gt=0.0)
        """The sampler's."""

    def __init__(self, config: Config, *, device: str | torch.device = "cpu") -> None:
        super().__init__(config, torch.device(device), PolicyModule)
        self.config = config

    def logprobs(
        self, samples: Sequence[Sample], temperature: float | None = None, *, trained_only: bool = False
    ) -> list[Floats]:
        """As PolicyTrainer.logprobs."""
        temperature = self.config.temperature if temperature is None else temperature
        sequences: list[PackSequence] = []
        for sample in samples:
            trajectory = sample.trajectory
            self.batcher.check(trajectory)
            wanted = (
                trajectory.loss_mask.copy()
                if trained_only
                else np.ones(trajectory.num_tokens, dtype=np.bool_)
            )
            wanted[:1] = False
            sequences.append(PackSequence(token_ids=trajectory.token_ids, wanted=wanted))
        return self.logprobs_of(sequences, temperature)

    def logprobs_of(self, sequences: Sequence[PackSequence], temperature: float = 1.0) -> list[Floats]:
        """log π of the wanted tokens, aligned with token_ids; 0 elsewhere."""
        return self.batcher.per_token(sequences, lambda pack: self.module(pack, temperature).logprobs_K)

    @torch.no_grad()
    def hidden(self, pack: Pack) -> Tensor:
        """[K, E] last hidden states that predict the pack's wanted tokens: what a teacher caches."""
        return self.module.hidden(pack).index_select(0, pack.source_K)

    def load_head(self) -> Tensor:
        """[V, E]: with hidden(), the logits that a student learns from."""
        weight: Tensor = self.module.lm.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy weights in by Hugging Face name: a reference that follows the policy every n steps."""
        own = dict(self.module.lm.named_parameters())
        given: set[str] = set()
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape:
                raise WeightSyncError(f"{name} {tuple(tensor.shape)} does not belong to this model")
            own[name].copy_(tensor)
            given.add(name)
        if missing := own.keys() - given:
            raise WeightSyncError(f"{len(missing)} weights were not given, {min(missing)} among them")
