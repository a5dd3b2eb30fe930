"""PolicyTrainer: one batch of samples in, one or more optimizer steps done.

Callers: the trainer worker of a workflow. The loss is the algorithm's; what the trainer guarantees is the recompute
contract:

- Current log-probabilities are always the trainer's own, in training precision, at the sampler's temperature.
- One optimizer step per batch: the old log-probabilities are the current ones, detached; no extra pass is made.
- Several steps per batch: one pass before the first step fixes the old log-probabilities, where the algorithm
  needs them (with AReaL's approximate proximal policy it does not, and no pass is made).
- The sampler's log-probabilities reach the algorithm as `rollout_logprobs_N` only.

A step is begin(), accumulate() for every chunk that arrives, and finish(), or `update` at once (rill.training.step).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms import Algorithm, finish_metrics
from rill.algorithms.advantages.optimal_token import squared_probabilities
from rill.algorithms.base import Need, TokenBatch, divisor
from rill.algorithms.distill import Teacher, full_vocabulary_kl
from rill.errors import ConfigError, TrainingError, UnsupportedError
from rill.models.decode.packed_scorer import PackedScorer
from rill.models.routing import Routing, expert_blocks
from rill.training.batching import MicroBatch, gather_context
from rill.training.engine_config import MiniBatchConfig
from rill.training.module import Distill, PolicyOutput, has_plain_logits
from rill.training.packing import Pack, PackSequence, plan_micro_batches
from rill.training.parallel import Rendezvous
from rill.training.score import ScoreModel
from rill.training.step import StepTrainer, wanted_of
from rill.types import Floats, PolicyVersion, Sample


class PolicyTrainer(StepTrainer):
    """Trains a causal language model with an algorithm's policy loss."""

    class Config(MiniBatchConfig):
        temperature: float = Field(default=1.0, gt=0.0)
        """The sampler's. Log-probabilities are of logits / temperature."""
        batch_invariant: bool = False
        """Recompute log-probabilities with the native engine's batch-invariant kernels, bit for bit as it samples."""
        critic_warmup: int = Field(default=0, ge=0)
        """Batches on which the policy stays as it is while a critic learns (value pretraining). 0: off."""
        routing_replay: bool = False
        """Send every token to the experts that the engine chose for it (R3). The engine must record them: for the
        native one set routed_experts = true. Needs a model with experts."""
        router_balance_loss: float = Field(default=0.0, ge=0.0)
        """Weight of the experts' balance loss beside the policy's; 0.001 is usual. 0: off."""
        router_bias_rate: float = Field(default=0.0, ge=0.0)
        """How far a router's correction bias (DeepSeek-V3, GLM-4) moves each step towards idle experts; 0.001 is
        usual. 0: it stays as it is."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        *,
        rendezvous: Rendezvous | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, rendezvous=rendezvous, device=device)
        self.config: PolicyTrainer.Config = config
        self.algorithm = algorithm
        self._step_version = self.version
        self._scorer: PackedScorer | None = None
        self.on_trained: Callable[[Sample, Floats, Floats], None] | None = None
        """Told of samples that are logged: their log-probabilities and entropies, per token."""
        self._teachers: tuple[tuple[ScoreModel, float], ...] = ()
        asked = config.routing_replay or config.router_balance_loss or config.router_bias_rate
        if asked or expert_blocks(self.engine.module.lm):
            self.engine.module.routing = Routing(
                self.engine.module.lm,
                is_compiled=config.compile,
                balances=config.router_balance_loss > 0,
                bias_rate=config.router_bias_rate,
            )
        if config.batch_invariant and (self.world.size > 1 or config.lora is not None):
            raise ConfigError(
                f"batch_invariant reads whole weights without adapters, got {self.world.size} ranks and lora "
                f"{'unset' if config.lora is None else 'set'}: use one process without lora, or set it to false"
            )
        if config.batch_invariant and config.fp8:
            raise ConfigError("batch_invariant and fp8 exclude each other: turn one of them off")

    def set_teachers(self, teachers: Sequence[tuple[ScoreModel, float]]) -> None:
        """Teachers and their weights for distillation over the whole vocabulary; on this trainer's device."""
        if Need.FULL_VOCABULARY_TEACHER not in self.algorithm.needs:
            raise ConfigError(
                "teachers are for algorithm.distillation with form 'full_vocabulary' and a coefficient above 0"
            )
        for lm in (self.engine.module.lm, *(teacher.module.lm for teacher, _ in teachers)):
            if not has_plain_logits(lm):
                raise UnsupportedError(
                    f"{lm.config.model_type}: its logits are scaled, capped or biased, which distillation over the "
                    "whole vocabulary leaves out: use the form on the advantage"
                )
        self._teachers = tuple(teachers)

    # --- updates ------------------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        if self._is_frozen:
            return ""
        if Need.STATISTICS in self.algorithm.needs:
            return "its loss reads figures over the whole batch"
        return super().waits_for

    def begin(self, version: PolicyVersion | None = None) -> None:
        """Begin a step. `version` is what the engines call the weights it starts from; unset, this trainer's count."""
        self._start()
        self._step_version = self.version if version is None else version

    def update(self, samples: Sequence[Sample], version: PolicyVersion | None = None) -> dict[str, float]:
        """This rank's share of a whole batch: num_epochs × num_mini_batches optimizer steps.

        Samples that bring `old_logprobs` (an inference group scored them with the same weights) are not scored again.
        """
        self.begin(version)
        self.accumulate(samples)
        return self.finish()

    def logprobs(
        self, samples: Sequence[Sample], temperature: float | None = None, *, trained_only: bool = False
    ) -> list[Floats]:
        """log π of every token given those before it, in training precision; 0 at position 0.

        `trained_only` leaves tokens outside the loss mask at 0 and saves their share of the head. With
        batch_invariant the numbers are bit for bit those of a native engine that runs with it too.
        """
        temperature = self.config.temperature if temperature is None else temperature
        for sample in samples:
            self.batcher.check(sample.trajectory)
        return self.logprobs_of(self._sequences(samples, every_token=not trained_only), temperature)

    def logprobs_of(self, sequences: Sequence[PackSequence], temperature: float = 1.0) -> list[Floats]:
        """The same of sequences' wanted tokens; 0 elsewhere."""
        if self.config.batch_invariant:
            return self._invariant_logprobs(sequences, temperature)
        return self._recomputed(sequences, temperature)

    def scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with what the algorithm wants of the policy before its loss: old_logprobs, and energies for
        optimal-token baselines."""
        for sample in samples:
            self.batcher.check(sample.trajectory)
        if Need.ENERGIES not in self.algorithm.needs:
            return self._with_old_logprobs(samples)
        if not has_plain_logits(self.engine.module.lm):
            raise UnsupportedError(
                f"{self.engine.module.lm.config.model_type}: its logits are scaled, capped or biased, which the "
                "energies of optimal-token baselines leave out: use another advantage"
            )
        squares = functools.partial(squared_probabilities, temperature=self.config.temperature)

        def compute(pack: Pack) -> tuple[Tensor, Tensor]:
            output = self.engine.module(pack, self.config.temperature, squares)
            return output.logprobs_K, 1 - 2 * output.logprobs_K.exp() + output.kl_K

        sequences = self._sequences(samples)
        old, energies = self.batcher.per_token_columns(sequences, compute, num_columns=2)
        return [
            dataclasses.replace(s, old_logprobs=o, energies=e)
            for s, o, e in zip(samples, old, energies, strict=True)
        ]

    # --- inside -------------------------------------------------------------------------------------------

    @property
    def _is_frozen(self) -> bool:
        return self.version < self.config.critic_warmup * self.num_steps

    def _finish(self) -> dict[str, float]:
        if not self._is_frozen:
            return super()._finish()
        sums, _, _ = self._tally.reduce(self.world)
        self.engine.pass_over(self.num_steps)
        return {"samples": sums["samples"], "version": float(self.version), "train_s": self._busy_s}

    def _apply(self, learning_rate: float | None = None) -> dict[str, float]:
        metrics = finish_metrics(super()._apply(learning_rate))
        routing = self.engine.module.routing
        return metrics if routing is None else metrics | routing.finish_step(self.world.sum_over_data)

    def _whole(self, samples: list[Sample]) -> list[Sample]:
        if self.num_steps == 1 or Need.OLD_LOGPROBS not in self.algorithm.needs:
            return samples
        return self._with_old_logprobs(samples) if self._lacks_old_logprobs(samples) else samples

    def _add(self, samples: Sequence[Sample], step: int = 0) -> None:
        if self._is_frozen:
            self._count(samples=len(samples))
            return
        has_old = self.num_steps > 1 and Need.OLD_LOGPROBS in self.algorithm.needs
        version = self._step_version
        sequences = self._sequences(samples)
        if Need.FULL_VOCABULARY_TEACHER in self.algorithm.needs and not self._teachers:
            raise TrainingError("this algorithm distils over the whole vocabulary: call set_teachers() first")
        batches: Iterable[MicroBatch] = self.batcher.micro_batches(sequences)

        def columns_of(batch: MicroBatch) -> dict[str, Tensor]:
            return self._columns([samples[i] for i in batch.indices], version, has_old)

        statistics: dict[str, Tensor] = {}
        if Need.STATISTICS in self.algorithm.needs:
            batches = list(batches)
            if batches:  # all ranks have as many
                statistics = self._statistics([(batch, columns_of(batch)) for batch in batches])
        # A pack is built while the device works on the one before it, and what the loss reads while it works on this.
        for batch in batches:
            with self._routed() as balance:
                output = self._forward(batch, self._distill(batch))
            columns = columns_of(batch)
            if step == 0 and self.on_trained is not None and self.world.leads:
                self._tell([samples[i] for i in batch.indices], output)
            tokens = self._token_batch(batch, columns, output, statistics)
            tokens = dataclasses.replace(tokens, knows_old=has_old or step == 0)
            loss = self._guarded(functools.partial(self.algorithm.policy_loss, tokens), tokens.logprobs_N)
            beside: Tensor | float = 0.0
            if balance:  # it weighs as much as this pass's share of the loss
                term = self.config.router_balance_loss * torch.stack(balance).mean()
                beside = term * divisor(loss.denominator)
            outputs = output.logprobs_K if output.kl_K is None else output.logprobs_K + output.kl_K
            self._learn(batch, loss, outputs, beside)
        self._count(samples=len(samples))

    def _routed(self) -> AbstractContextManager[list[Tensor]]:
        routing = self.engine.module.routing
        return contextlib.nullcontext([]) if routing is None else routing.training_pass()

    def _forward(self, batch: MicroBatch, distill: Distill | None = None) -> PolicyOutput:
        output: PolicyOutput = self.engine.module(batch.pack, self.config.temperature, distill)
        if batch.pack.context_slice is None:
            return output
        return PolicyOutput(
            gather_context(output.logprobs_K, batch.pack, self.world),
            gather_context(output.entropy_K, batch.pack, self.world),
            None if output.kl_K is None else gather_context(output.kl_K, batch.pack, self.world),
        )

    def _tell(self, samples: Sequence[Sample], output: PolicyOutput) -> None:
        ends = np.cumsum([wanted_of(sample).sum() for sample in samples], dtype=int).tolist()
        for sample, start, end in zip(samples, [0, *ends], ends, strict=False):
            if sample.is_logged and self.on_trained is not None:
                wanted, columns = wanted_of(sample), np.zeros((2, sample.num_tokens), np.float32)
                for column, values_K in zip(columns, (output.logprobs_K, output.entropy_K), strict=True):
                    column[wanted] = values_K[start:end].detach().float().cpu().numpy()
                self.on_trained(sample, columns[0], columns[1])

    def _distill(self, batch: MicroBatch) -> Distill | None:
        if not self._teachers:
            return None
        options = self.algorithm.config.distillation
        teachers = [
            Teacher(hidden_ME=model.hidden(batch.pack), load_head=model.load_head, weight=weight)
            for model, weight in self._teachers
        ]
        return functools.partial(
            full_vocabulary_kl,
            teachers=teachers,
            direction=options.direction,
            temperature=options.temperature,
            chunk_tokens=options.chunk_tokens,
        )

    def _statistics(self, passes: Sequence[tuple[MicroBatch, dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Figures over the whole batch, for the algorithms that need them: one more forward pass."""
        with torch.no_grad():
            tokens = [
                self._token_batch(batch, columns, self._forward(batch), {}) for batch, columns in passes
            ]
        try:
            return self.algorithm.statistics(tokens, self.world.sum_over_data)
        except TrainingError:  # its loss will be refused too; until then this rank keeps step with the others
            blank = [dataclasses.replace(b, mask_N=torch.zeros_like(b.mask_N)) for b in tokens]
            return self.algorithm.statistics(blank, self.world.sum_over_data)

    def _columns(self, samples: Sequence[Sample], version: PolicyVersion, has_old: bool) -> dict[str, Tensor]:
        """What the loss reads beside the model's outputs."""
        columns: dict[str, Sequence[Any]] = {
            "advantages": [s.advantages for s in samples],
            "rollout": [s.trajectory.logprobs for s in samples],
            "lag": [version - s.trajectory.versions for s in samples],
        }
        for name in ("old", "ref", "teacher") if has_old else ("ref", "teacher"):
            values = [getattr(s, f"{name}_logprobs") for s in samples]
            if all(v is not None for v in values):
                columns[name] = values
        return self._on_device(samples, columns)

    def _token_batch(
        self,
        batch: MicroBatch,
        columns: dict[str, Tensor],
        output: PolicyOutput,
        statistics: dict[str, Tensor],
    ) -> TokenBatch:
        current_K = output.logprobs_K.detach()
        return TokenBatch(
            logprobs_N=output.logprobs_K,
            mask_N=torch.full_like(current_K, float(not batch.is_idle)),
            seq_N=batch.pack.seq_K,
            num_seqs=batch.pack.num_seqs,
            advantages_N=columns["advantages"],
            old_logprobs_N=columns.get("old", current_K),
            rollout_logprobs_N=columns["rollout"],
            ref_logprobs_N=columns.get("ref"),
            teacher_logprobs_N=columns.get("teacher"),
            teacher_kl_N=output.kl_K,
            entropy_N=output.entropy_K,
            lag_N=columns["lag"],
            statistics=statistics,
        )

    def _sequences(self, samples: Sequence[Sample], *, every_token: bool = False) -> list[PackSequence]:
        replays = self.config.routing_replay
        return [
            PackSequence.of(
                s.trajectory,
                s.trajectory.group_id,
                every_token=every_token,
                routed_experts=s.trajectory.routed_experts if replays else None,
            )
            for s in samples
        ]

    def _recomputed(self, sequences: Sequence[PackSequence], temperature: float) -> list[Floats]:
        return self.batcher.per_token(
            sequences, lambda pack: self.engine.module(pack, temperature).logprobs_K
        )

    def _invariant_logprobs(self, sequences: Sequence[PackSequence], temperature: float) -> list[Floats]:
        if any(sequence.pictures for sequence in sequences):
            raise UnsupportedError(
                "batch_invariant scores tokens alone, and samples have pictures: turn it off"
            )
        if self._scorer is None:
            self._scorer = PackedScorer(self.engine.module.lm, max_len=self.config.micro_batch_tokens)
        results: list[Floats] = [np.zeros(s.num_tokens, dtype=np.float32) for s in sequences]
        fitting = [i for i, sequence in enumerate(sequences) if self.batcher.fits(sequence)]
        lengths = [sequences[i].num_tokens for i in fitting]
        for part in plan_micro_batches(lengths, self.config.micro_batch_tokens):
            chosen = [fitting[i] for i in part]
            scored = self._scorer([torch.from_numpy(sequences[i].token_ids) for i in chosen], temperature)
            for index, values in zip(chosen, scored, strict=True):
                results[index] = (values.numpy() * sequences[index].wanted).astype(np.float32)
        return results

    def _lacks_old_logprobs(self, samples: Sequence[Sample]) -> bool:
        """On any rank: the pass that computes them has collectives, so all ranks make it or none."""
        missing = sum(sample.old_logprobs is None for sample in samples)
        count = torch.tensor(float(missing), device=self.world.device)
        return bool(self.world.sum_over_data(count) > 0)

    def _with_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        # By the training path even with batch_invariant: at the first step π/π_old must be 1, not 1 ± rounding.
        old = self._recomputed(self._sequences(samples), self.config.temperature)
        return [dataclasses.replace(s, old_logprobs=o) for s, o in zip(samples, old, strict=True)]
