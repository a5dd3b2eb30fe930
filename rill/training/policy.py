"""PolicyTrainer: one batch of samples in, one or more optimizer steps done.

Callers: the trainer worker of a workflow. The loss is the algorithm's; what the trainer guarantees is the recompute
contract:

- Current log-probabilities are always the trainer's own, in training precision, at the sampler's temperature.
- One optimizer step per batch: the old log-probabilities are the current ones, detached; no extra pass is made.
- Several steps per batch: one pass before the first step fixes the old log-probabilities, where the algorithm
  needs them (with AReaL's approximate proximal policy it does not, and no pass is made).
- The sampler's log-probabilities reach the algorithm as `rollout_logprobs_N` only.

`update` is `accumulate` + `apply` per optimizer step. A loop that pipelines calls those itself: accumulate any number
of times as samples arrive, then apply once; the gradient is the same.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rill.algorithms import finish_metrics
from rill.algorithms.base import LossSum, Need, Reduce, TokenBatch
from rill.errors import TrainingError
from rill.models.loading import DTYPES
from rill.training.batching import Batcher, MicroBatch, Tally, gather_context
from rill.training.checkpoint import Checkpointer
from rill.training.engine import EngineConfig, TrainEngine
from rill.training.export import export_model
from rill.training.module import PolicyModule, load_packed_lm
from rill.training.offload import OffloadLevel
from rill.training.packing import PackSequence
from rill.training.parallel import Rendezvous, World
from rill.types import Floats, PolicyVersion, Sample

log = logging.getLogger(__name__)


class PolicyLoss(Protocol):
    """What the trainer needs of an algorithm; rill.algorithms.Algorithm has it."""

    @property
    def needs(self) -> frozenset[Need]: ...

    def policy_loss(self, batch: TokenBatch) -> LossSum: ...

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce) -> dict[str, Tensor]: ...


class PolicyTrainer:
    """Trains a causal language model with an algorithm's policy loss."""

    class Config(EngineConfig):
        temperature: float = Field(default=1.0, gt=0.0)
        """The sampler's. Log-probabilities are of logits / temperature."""
        num_epochs: int = Field(default=1, ge=1)
        """Passes over each batch."""
        mini_batches: int = Field(default=1, ge=1)
        """Optimizer steps per pass."""
        seed: int = 0
        """Order of the mini-batches."""

    def __init__(
        self,
        config: Config,
        algorithm: PolicyLoss,
        *,
        rendezvous: Rendezvous | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.world = World.join(
            rendezvous,
            torch.device(device),
            tensor_parallel=config.tensor_parallel,
            context_parallel=config.context_parallel,
        )
        self.engine = build_policy_engine(config, self.world)
        self.batcher = Batcher(
            world=self.world,
            compute_dtype=self.engine.compute_dtype,
            micro_batch_tokens=config.micro_batch_tokens,
            vocab_size=self.engine.module.vocab_size,
            share_prefixes=config.tree_packing,
        )
        self._checkpointer = Checkpointer(self.engine)
        self._tally = Tally()
        self._failure = ""
        self._started_s = time.perf_counter()

    # --- updates ------------------------------------------------------------------------------------------

    def update(self, samples: Sequence[Sample], version: PolicyVersion | None = None) -> dict[str, float]:
        """This rank's share of one batch: num_epochs × mini_batches optimizer steps. Metrics are over all ranks.

        `version` is what the engines call the weights the batch starts from; unset, this trainer's own count.
        """
        self._begin()
        version = self.version if version is None else version
        samples = self._usable(samples)
        num_steps = self.config.num_epochs * self.config.mini_batches
        has_old = num_steps > 1 and Need.OLD_LOGPROBS in self.algorithm.needs
        if has_old:
            samples = self._with_old_logprobs(samples)
        steps: list[dict[str, float]] = []
        for epoch in range(self.config.num_epochs):
            for part in self._mini_batches(samples, epoch):
                self._accumulate([samples[i] for i in part], version, has_old=has_old)
                steps.append(self.apply())
        return _merge_steps(steps)

    def accumulate(self, samples: Sequence[Sample], version: PolicyVersion | None = None) -> None:
        """Add these samples' gradient. Weights do not change until apply()."""
        if not self._tally.sums:
            self._begin()
        self._accumulate(self._usable(samples), self.version if version is None else version, has_old=False)

    def apply(self) -> dict[str, float]:
        """One optimizer step with everything accumulated, divided by its global denominator."""
        tally, self._tally = self._tally, Tally()
        if not tally.sums:
            self.engine.zero_gradients()
            raise TrainingError("apply() without accumulate(): there is nothing to train on")
        sums, metrics = tally.reduce(self.world)
        if sums["denominator"] <= 0:
            self.engine.zero_gradients()
            raise TrainingError(
                f"the batch has no token to train on ({sums['samples']:.0f} samples, {sums['skipped']:.0f} skipped): "
                "check loss masks, filters and micro_batch_tokens"
            )
        loss = sums["numerator"] / sums["denominator"]
        if not np.isfinite(loss) and self._failure:
            log.error("this rank's loss: %s", self._failure)
        metrics = finish_metrics(metrics)
        metrics.update(self.engine.step(sums["denominator"], is_finite=bool(np.isfinite(loss))))
        seconds = time.perf_counter() - self._started_s
        metrics.update(
            loss=loss,
            version=float(self.version),
            samples=sums["samples"],
            skipped_samples=sums["skipped"],
            tokens=sums["tokens"],
            computed_tokens=sums["computed_tokens"],
            trained_tokens=sums["trained_tokens"],
            train_s=seconds,
            train_tokens_per_s=sums["tokens"] / max(seconds, 1e-9),
        )
        return metrics

    def logprobs(
        self, samples: Sequence[Sample], temperature: float | None = None, *, trained_only: bool = False
    ) -> list[Floats]:
        """log π of every token given those before it, in training precision; 0 at position 0.

        `trained_only` leaves tokens outside the loss mask at 0 and saves their share of the head.
        """
        module = self.engine.module
        temperature = self.config.temperature if temperature is None else temperature
        for sample in samples:
            self.batcher.check(sample.trajectory)
        sequences = [_sequence(s, None if trained_only else False) for s in samples]
        return self.batcher.per_token(sequences, lambda pack: module(pack, temperature)[0])

    # --- state --------------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        return self.engine.version

    @property
    def learning_rate(self) -> float:
        return self.engine.learning_rate

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors in compute precision, adapters merged. All ranks take part."""
        return self.engine.named_weights()

    def save(self, folder: str | Path, *, is_async: bool = False) -> Path:
        """Write `folder`/step-N, whole or not at all. With is_async the files are written behind training."""
        return self._checkpointer.save(Path(folder), is_async=is_async)

    def wait_saved(self, timeout_s: float = 600.0) -> None:
        """Return when the last asynchronous save has finished; raise what it raised."""
        self._checkpointer.wait(timeout_s)

    def load(self, folder: str | Path) -> PolicyVersion:
        """Continue from the last whole checkpoint under `folder`."""
        return self._checkpointer.load(Path(folder))

    def export(self, folder: str | Path) -> Path:
        """A Hugging Face folder (safetensors, config, tokenizer) that plain transformers loads."""
        return export_model(self.engine, self.config.model, Path(folder))

    def offload(self, level: OffloadLevel = OffloadLevel.PARAMETERS) -> None:
        self.engine.offload(level)

    def onload(self) -> None:
        self.engine.onload()

    def close(self) -> None:
        self._checkpointer.close()
        self.world.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget whatever an update that failed half-way left behind."""
        self._started_s = time.perf_counter()
        self._tally = Tally()
        self._failure = ""
        self.engine.zero_gradients()

    def _accumulate(self, samples: Sequence[Sample], version: PolicyVersion, *, has_old: bool) -> None:
        sequences = [_sequence(s, None) for s in samples]
        batches = list(self.batcher.micro_batches(sequences))
        rows = [self._columns(b, [samples[i] for i in b.indices], version, has_old) for b in batches]
        statistics = self._statistics(batches, rows)
        for batch, columns in zip(batches, rows, strict=True):
            logprobs_K, entropy_K = self._forward(batch)
            loss = self._loss(self._token_batch(batch, columns, logprobs_K, entropy_K, statistics))
            if batch.is_idle:
                self.engine.backward(logprobs_K.sum() * 0.0)
            else:
                self.engine.backward(loss.numerator)
                self._tally.add(
                    numerator=loss.numerator,
                    denominator=loss.denominator,
                    tokens=batch.pack.num_sequence_tokens,
                    computed_tokens=batch.pack.num_row_tokens,
                    trained_tokens=len(batch.pack.seq_K),
                )
            self._tally.add_metrics(loss.metrics, is_idle=batch.is_idle)
        zeros = dict.fromkeys(
            ("numerator", "denominator", "tokens", "computed_tokens", "trained_tokens"), 0.0
        )
        self._tally.add(samples=len(samples), skipped=0.0, **zeros)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logprobs_K, entropy_K = self.engine.module(batch.pack, self.config.temperature)
        return (
            gather_context(logprobs_K, batch.pack, self.world),
            gather_context(entropy_K, batch.pack, self.world),
        )

    def _loss(self, tokens: TokenBatch) -> LossSum:
        """The algorithm's loss; one it refuses becomes NaN, so that all ranks learn of it together in apply()."""
        try:
            return self.algorithm.policy_loss(tokens)
        except TrainingError as error:
            self._failure = str(error)
            nan = tokens.logprobs_N.sum() * float("nan")
            return LossSum(numerator=nan, denominator=tokens.mask_N.sum())

    def _statistics(
        self, batches: Sequence[MicroBatch], rows: Sequence[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Figures over the whole batch, for the algorithms that need them: one more forward pass."""
        if Need.STATISTICS not in self.algorithm.needs:
            return {}
        with torch.no_grad():
            tokens = [
                self._token_batch(batch, columns, *self._forward(batch), {})
                for batch, columns in zip(batches, rows, strict=True)
            ]
        return self.algorithm.statistics(tokens, self.world.sum_over_data)

    def _columns(
        self, batch: MicroBatch, samples: Sequence[Sample], version: PolicyVersion, has_old: bool
    ) -> dict[str, Tensor]:
        """Per-token inputs of the wanted tokens, copied to the device in one piece."""
        if batch.is_idle:
            names = ("mask", "advantages", "rollout", "lag", "old", "ref", "teacher")
            return {name: torch.zeros(1, device=self.world.device) for name in names}
        columns: dict[str, list[Any]] = {
            "advantages": [s.advantages for s in samples],
            "rollout": [s.trajectory.logprobs for s in samples],
            "lag": [version - s.trajectory.versions for s in samples],
        }
        for name in ("old", "ref", "teacher") if has_old else ("ref", "teacher"):
            values = [getattr(s, f"{name}_logprobs") for s in samples]
            if all(v is not None for v in values):
                columns[name] = values
        wanted = [_wanted(s) for s in samples]
        table = np.stack(
            [np.concatenate([v[w] for v, w in zip(vs, wanted, strict=True)]) for vs in columns.values()]
        ).astype(np.float32)
        on_device = torch.from_numpy(table).to(self.world.device, non_blocking=True)
        return dict(zip(columns, on_device, strict=True))

    def _token_batch(
        self,
        batch: MicroBatch,
        columns: dict[str, Tensor],
        logprobs_K: Tensor,
        entropy_K: Tensor,
        statistics: dict[str, Tensor],
    ) -> TokenBatch:
        current_K = logprobs_K.detach()
        return TokenBatch(
            logprobs_N=logprobs_K,
            mask_N=columns["mask"] if batch.is_idle else torch.ones_like(current_K),
            seq_N=batch.pack.seq_K,
            num_seqs=batch.pack.num_seqs,
            advantages_N=columns["advantages"],
            old_logprobs_N=columns.get("old", current_K),
            rollout_logprobs_N=columns["rollout"],
            ref_logprobs_N=columns.get("ref"),
            teacher_logprobs_N=columns.get("teacher"),
            entropy_N=entropy_K,
            lag_N=columns["lag"],
            statistics=statistics,
        )

    def _usable(self, samples: Sequence[Sample]) -> list[Sample]:
        """Checked samples with something to train on and within the budget; the rest is counted or an error."""
        kept: list[Sample] = []
        num_long = num_untrained = 0
        for sample in samples:
            self.batcher.check(sample.trajectory)
            if not _wanted(sample).any():
                num_untrained += 1
            elif self.config.on_too_long == "skip" and sample.num_tokens > self.config.micro_batch_tokens:
                num_long += 1
            else:
                kept.append(sample)
        if num_long or num_untrained:
            log.warning(
                "left out of training: %d samples over %d tokens, %d without a trained token",
                num_long,
                self.config.micro_batch_tokens,
                num_untrained,
            )
        self._tally.add(skipped=float(num_long + num_untrained))
        return kept

    def _with_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        old = self.logprobs(samples, trained_only=True)
        return [dataclasses.replace(s, old_logprobs=o) for s, o in zip(samples, old, strict=True)]

    def _mini_batches(self, samples: Sequence[Sample], epoch: int) -> list[list[int]]:
        """Indices per optimizer step: shuffled by (seed, version, epoch), cut into even counts."""
        count = self.config.mini_batches
        if count == 1:
            return [list(range(len(samples)))]
        order = np.random.default_rng((self.config.seed, self.version, epoch)).permutation(len(samples))
        return [sorted(part.tolist()) for part in np.array_split(order, count)]


def build_policy_engine(config: EngineConfig, world: World) -> TrainEngine:
    """Load the model and make it trainable."""
    lm = load_packed_lm(config.model, dtype=DTYPES[config.param_dtype], device=world.device)
    module = PolicyModule(
        lm,
        compile_chunks=config.compile and world.device.type == "cuda",
        chunk_bytes=config.head_chunk_bytes,
    )
    return TrainEngine(config, module, world)


def _wanted(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """The loss mask without position 0, which nothing predicts."""
    mask = sample.trajectory.loss_mask.copy()
    mask[:1] = False
    return mask


def _sequence(sample: Sample, wanted: bool | None) -> PackSequence:
    """`wanted` None: trained tokens. False: every token but the first."""
    trajectory = sample.trajectory
    if wanted is None:
        mask = _wanted(sample)
    else:
        mask = np.ones(trajectory.num_tokens, dtype=np.bool_)
        mask[:1] = False
    return PackSequence(token_ids=trajectory.token_ids, wanted=mask, share_key=trajectory.group_id)


def _merge_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one update; counts of work are added, states are the last."""
    if len(steps) == 1:
        return steps[0]
    added = {"samples", "tokens", "computed_tokens", "trained_tokens", "skipped_samples"}
    last = {"version", "learning_rate", "skipped_steps", "train_s"}
    merged: dict[str, float] = {}
    for name in steps[-1]:
        values = [s[name] for s in steps if name in s]
        merged[name] = (
            sum(values) if name in added else values[-1] if name in last else sum(values) / len(values)
        )
    merged["train_tokens_per_s"] = merged["tokens"] / max(merged["train_s"], 1e-9)
    return merged
