"""ValueTrainer: the critic. V of the state before each trained token, on the same engine.

Callers: the critic worker of a PPO workflow. `values` fills Sample.values; after advantages have been estimated from
them, begin(), accumulate() and finish() (or `update` at once) fit Sample.returns with the algorithm's value loss,
clipped around Sample.values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch

from rill.algorithms import Algorithm
from rill.algorithms.base import TokenBatch
from rill.errors import TrainingError
from rill.training.batching import MicroBatch, gather_context
from rill.training.engine_config import EngineConfig, MiniBatchConfig
from rill.training.module import PackedModule, load_value_module
from rill.training.packing import PackSequence
from rill.training.parallel import Rendezvous
from rill.training.step import StepTrainer
from rill.types import Floats, Sample


class ValueTrainer(StepTrainer):
    """Trains a decoder with a value head."""

    Config: TypeAlias = MiniBatchConfig

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        *,
        rendezvous: Rendezvous | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, rendezvous=rendezvous, device=device)
        self.algorithm = algorithm

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """V before each trained token, aligned with token_ids; 0 elsewhere."""
        for sample in samples:
            self.batcher.check(sample.trajectory)
        return self.batcher.per_token([_sequence(s) for s in samples], self.engine.module)

    def begin(self) -> None:
        """Begin a step; see rill.training.step."""
        self._start()

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """This rank's share of a whole batch: num_epochs × num_mini_batches optimizer steps."""
        self.begin()
        self.accumulate(samples)
        return self.finish()

    def _usable(self, samples: Sequence[Sample]) -> list[Sample]:
        for sample in samples:
            if sample.returns is None or sample.values is None:
                raise TrainingError(
                    f"{sample.id}: the critic needs values and returns; compute advantages first"
                )
        return super()._usable(samples)

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        return load_value_module(config.model, device)

    def _add(self, samples: Sequence[Sample], step: int = 0) -> None:
        for batch in self.batcher.micro_batches([_sequence(s) for s in samples]):
            values_K = gather_context(self.engine.module(batch.pack), batch.pack, self.world)
            tokens = self._token_batch(batch, [samples[i] for i in batch.indices], values_K)
            loss = self._guarded(functools.partial(self.algorithm.value_loss, tokens), values_K)
            self._learn(batch, loss, values_K)
        self._count(samples=len(samples))

    def _token_batch(
        self, batch: MicroBatch, samples: Sequence[Sample], values_K: torch.Tensor
    ) -> TokenBatch:
        zeros_K = torch.zeros_like(values_K)
        columns = self._on_device(
            samples, {"values": [s.values for s in samples], "returns": [s.returns for s in samples]}
        )
        return TokenBatch(
            logprobs_N=zeros_K,
            mask_N=torch.full_like(values_K, float(not batch.is_idle)),
            seq_N=batch.pack.seq_K,
            num_seqs=batch.pack.num_seqs,
            advantages_N=zeros_K,
            old_logprobs_N=zeros_K,
            rollout_logprobs_N=zeros_K,
            values_N=values_K,
            old_values_N=columns["values"],
            returns_N=columns["returns"],
        )


def _sequence(sample: Sample) -> PackSequence:
    return PackSequence.of(sample.trajectory, sample.trajectory.group_id)
