"""Frozen models that only read: FrozenModel, and ScoreModel, a reference or teacher policy.

Callers: reference and teacher workers; PolicyTrainer for distillation over the whole vocabulary; rill.training.reward.
Numbers are computed exactly as the trainers compute their own (same packing, head and precision). A model is whole on
every rank, and ranks know nothing of each other; or it is cut over its ranks as a trainer's is (`shard`, FSDP2, and
`tensor_parallel`), and every call that scores is a collective, each rank with its own share, which may be empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.config import Config
from rill.errors import ConfigError
from rill.models.loading import DTYPES, ModelConfig
from rill.training.arrange import arrange
from rill.training.batching import Batcher
from rill.training.engine_config import EngineConfig, Precision
from rill.training.module import PackedModule, PolicyModule, load_packed_lm
from rill.training.offload import Shelf
from rill.training.packing import Pack, PackSequence
from rill.training.parallel import (
    Rendezvous,
    World,
    copy_weights,
    full,
    local,
)
from rill.types import Floats, Sample, TokenIds


class FrozenModel(ABC):
    """A packed module that is never trained."""

    needs_head = True
    """The decoder's own, which log-probabilities are made with."""

    class Config(Config):
        model: ModelConfig
        dtype: Precision | None = None
        """Precision of weights and arithmetic. Unset: the trainer's compute_dtype."""
        micro_batch_tokens: int | None = Field(default=None, ge=2)
        """Most tokens in one pass of one rank. Unset: the trainer's."""
        compile: bool | None = None
        """torch.compile each layer. Unset: as the trainer does."""
        on_too_long: Literal["error", "skip"] | None = None
        """A sequence over micro_batch_tokens: an error, or left without scores. Unset: as the trainer does."""
        quantization_aware: Literal["int4"] | None = None
        """Unset: as the trainer does, where it is the trainer's model; another's weights are as they are."""
        fp8: bool | None = None
        """Likewise."""
        shard: bool = False
        """Cut the weights over the group's ranks (FSDP2). false: each rank, or tensor-parallel row, has them all."""
        tensor_parallel: int = Field(default=1, ge=1)
        """Ranks that compute one model together."""

        def following(self, trainer: EngineConfig) -> Self:
            """This config with the trainer's settings where it has none."""
            theirs: dict[str, Any] = {
                "dtype": trainer.compute_dtype,
                "micro_batch_tokens": trainer.micro_batch_tokens,
                "compile": trainer.compile,
                "on_too_long": trainer.on_too_long,
            }
            if (
                self.model == trainer.model
            ):  # the policy, as it is or was: a teacher or a judge is not rounded
                theirs |= {"quantization_aware": trainer.quantization_aware, "fp8": trainer.fp8}
            unset = {name: value for name, value in theirs.items() if getattr(self, name) is None}
            return self.model_copy(update=unset)

    def __init__(
        self,
        config: Config,
        *,
        device: str | torch.device = "cpu",
        rendezvous: Rendezvous | None = None,
        world: World | None = None,
    ) -> None:
        """`rendezvous` joins the group's ranks, where the model is cut over them; `world` is one they have joined."""
        self.config = config
        device = torch.device(device)
        is_cut = config.shard or config.tensor_parallel > 1
        if not is_cut:
            world = World(None, device)
        elif world is None:
            world = World.join(rendezvous, device, tensor_parallel=config.tensor_parallel)
        if world.tensor_size != config.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel = {config.tensor_parallel} of a frozen model on ranks that compute "
                f"{world.tensor_size} together: set it to {world.tensor_size}"
            )
        self.world = world
        dtype = DTYPES[config.dtype or "float32"]
        lm = load_packed_lm(config.model, dtype=dtype, device=device, needs_head=self.needs_head)
        self.module = self._make_module(lm)
        self.module.requires_grad_(False)
        self.module.see(config.model, is_frozen=True)
        arrange(
            self.module,
            self.world,
            dtype=dtype,
            compiled=bool(config.compile),
            quantization_aware=bool(config.quantization_aware),
            fp8=bool(config.fp8),
            shards=config.shard and self.world.shards,
        )
        if config.shard and self.world.shards and isinstance(self.module, PolicyModule):
            from torch.distributed.fsdp import register_fsdp_forward_method

            register_fsdp_forward_method(self.module, "predicting")
        self._shelf = Shelf()
        self.batcher = Batcher(
            world=self.world,
            use_flash=self.module.can_use_flash(device, dtype),
            micro_batch_tokens=config.micro_batch_tokens or 16_384,
            vocab_size=self.module.vocab_size,
            skips_too_long=config.on_too_long == "skip",
        )

    @abstractmethod
    def _make_module(self, lm: Any) -> PackedModule:
        """What is read off the decoder."""

    def offload(self) -> None:
        if self.world.device.type != "cpu":
            self.module.forget_pictures()
            parameters = [local(p.detach()) for p in self.module.parameters()]
            self._shelf.put([*parameters, *self.module.buffers()])
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._shelf.take_all()


def sequence_scores(module: PackedModule, batcher: Batcher, sequences: Sequence[TokenIds]) -> list[float]:
    """What a ValueModule gives each whole sequence, NaN to one that is too long and to be skipped; a collective where
    its ranks hold parts of it."""
    for index, tokens in enumerate(sequences):
        batcher.check_tokens(f"sequence {index}", tokens)
    packed = [PackSequence(token_ids=tokens, wanted=np.zeros(len(tokens), np.bool_)) for tokens in sequences]
    fitting = [i for i, sequence in enumerate(packed) if batcher.fits(sequence)]
    scores = [float("nan")] * len(packed)
    with torch.no_grad():
        for batch in batcher.micro_batches([packed[i] for i in fitting]):
            values = module(batch.pack, per_sequence=True).tolist()
            for index, value in zip(batch.indices, values, strict=False):
                scores[fitting[index]] = value
    return scores


class ScoreModel(FrozenModel):
    """Log-probabilities of given tokens."""

    class Config(FrozenModel.Config):
        temperature: float = Field(default=1.0, gt=0.0)
        """The sampler's."""

    config: Config

    def _make_module(self, lm: Any) -> PolicyModule:
        return PolicyModule(lm)

    def logprobs(
        self, samples: Sequence[Sample], temperature: float | None = None, *, trained_only: bool = False
    ) -> list[Floats]:
        """As PolicyTrainer.logprobs."""
        temperature = self.config.temperature if temperature is None else temperature
        for sample in samples:
            self.batcher.check(sample.trajectory)
        sequences = [PackSequence.of(s.trajectory, every_token=not trained_only) for s in samples]
        return self.logprobs_of(sequences, temperature)

    def logprobs_of(self, sequences: Sequence[PackSequence], temperature: float = 1.0) -> list[Floats]:
        """log π of the wanted tokens, aligned with token_ids; 0 elsewhere."""
        return self.batcher.per_token(sequences, lambda pack: self.module(pack, temperature).logprobs_K)

    @torch.no_grad()
    def hidden(self, pack: Pack) -> Tensor:
        """[K, E] last hidden states that predict the pack's wanted tokens: what a teacher caches."""
        assert isinstance(self.module, PolicyModule)
        return self.module.predicting(pack)

    def load_head(self) -> Tensor:
        """[V, E]: with hidden(), the logits that a student learns from."""
        return full(self.module.lm.get_output_embeddings().weight)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy whole weights in by Hugging Face name: a reference that follows the policy every n steps."""
        try:
            copy_weights(
                {**dict(self.module.lm.named_parameters()), **dict(self.module.stored_buffers())}, tensors
            )
        finally:
            self.module.forget_pictures()
