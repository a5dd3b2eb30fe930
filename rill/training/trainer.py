"""What all trainers share: construction, one optimizer step with its metrics, and the state of the run.

PolicyTrainer, SFTTrainer, ValueTrainer and RewardTrainer add their loss. Every rank calls every method.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rill.algorithms.base import LossSum, Metric
from rill.errors import TrainingError
from rill.models.loading import check_vocabulary, load_tokenizer
from rill.training.balance import CostModel
from rill.training.batching import Batcher, MicroBatch, Tally
from rill.training.checkpoint import Checkpointer
from rill.training.engine import TrainEngine
from rill.training.engine_config import EngineConfig
from rill.training.exchange import deal_out
from rill.training.export import export_model
from rill.training.module import PackedModule, PolicyModule, load_packed_lm
from rill.training.parallel import Rendezvous, World
from rill.types import PolicyVersion

log = logging.getLogger(__name__)

Item = TypeVar("Item")

_COUNTS = ("numerator", "denominator", "tokens", "computed_tokens", "trained_tokens", "samples", "skipped")


class Trainer:
    """Owns an engine, its batcher and its checkpoints."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rendezvous: Rendezvous | None = None,
        device: str | torch.device = "cpu",
        engine: TrainEngine | None = None,
    ) -> None:
        """With `engine`, train that one with another loss; else load the model and make it trainable."""
        self.config = config
        if engine is None:
            world = World.join(
                rendezvous,
                torch.device(device),
                tensor_parallel=config.tensor_parallel,
                context_parallel=config.context_parallel,
                expert_parallel=config.expert_parallel,
            )
            module = self._make_module(config, world.device)
            module.see(config.model, is_frozen=config.freeze_vision or config.lora is not None)
            engine = TrainEngine(config, module, world)
        self.engine = engine
        self.world = engine.world
        self.batcher = Batcher(
            world=self.world,
            use_flash=engine.module.can_use_flash(self.world.device, engine.compute_dtype),
            micro_batch_tokens=config.micro_batch_tokens,
            vocab_size=engine.module.vocab_size,
            share_prefixes=config.tree_packing,
            skips_too_long=config.on_too_long == "skip",
        )
        self._checkpointer = Checkpointer(engine)
        self._tally = Tally()
        self._failure = ""
        self._busy_s = 0.0

    # --- state --------------------------------------------------------------------------------------------

    @property
    def version(self) -> PolicyVersion:
        """Optimizer steps done."""
        return self.engine.version

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return self.engine.learning_rate

    @functools.cached_property
    def cost_model(self) -> CostModel:
        """What a sequence costs by its length: by this ranks are balanced."""
        shape = self.engine.module.lm.config.get_text_config()
        num_parameters = sum(p.numel() for p in self.engine.module.parameters())
        return CostModel.of_transformer(num_parameters, shape.num_hidden_layers, shape.hidden_size)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and whole tensors in compute precision, adapters merged. All ranks take part."""
        return self.engine.named_weights()

    def save(self, folder: str | Path) -> None:
        """Whole or not at all. Returns when the state is copied to host memory; the files are written behind training,
        and wait_saved() tells when they are there."""
        self._checkpointer.save(Path(folder))

    @property
    def rests_on_host(self) -> bool:
        """It was moved off its device, and can be saved from where it lies."""
        return self.engine.rests_on_host

    def wait_saved(self, timeout_s: float = 600.0) -> None:
        """Return when the last save is whole; raise what went wrong with it."""
        self._checkpointer.wait(timeout_s)

    def load(self, folder: str | Path) -> PolicyVersion:
        """Continue from what was saved into `folder`; what is not whole is refused."""
        return self._checkpointer.load(Path(folder))

    def export(self, folder: str | Path) -> Path:
        """A Hugging Face folder (safetensors, config, tokenizer) that plain transformers loads.

        Adapters are merged, and lie by themselves in its `adapter/`.
        """
        return export_model(self.engine, self.config.model, Path(folder))

    def keeps(self, num_tokens: int) -> bool:
        """Whether a sequence, or a pair, of this length is trained on; where too long a one is an error, all are."""
        return self.config.on_too_long == "error" or num_tokens <= self.config.micro_batch_tokens

    def offload(self) -> None:
        self.engine.offload()

    def onload(self) -> None:
        self.engine.onload()

    def close(self) -> None:
        self._checkpointer.close()
        self.world.close()

    # --- for the trainers ---------------------------------------------------------------------------------

    def _make_module(self, config: EngineConfig, device: torch.device) -> PackedModule:
        lm = load_packed_lm(config.model, dtype=torch.float32, device=device)
        if config.model.tokenizer is not None:
            check_vocabulary(load_tokenizer(config.model), lm.config)
        return PolicyModule(lm, chunk_bytes=config.head_chunk_bytes, keep_bytes=config.head_keep_bytes)

    def _forget(self) -> None:
        """Begin a step: forget whatever one that failed half-way left behind."""
        self._busy_s = 0.0
        self._tally = Tally()
        self._failure = ""
        self.engine.zero_gradients()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Time spent in here counts as training; what lies between the chunks of a step does not."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._busy_s += time.perf_counter() - started_s

    def _count(self, **values: Tensor | float) -> None:
        """Add to this step's sums; every rank has every name, whatever work it had."""
        self._tally.add(**{**dict.fromkeys(_COUNTS, 0.0), **values})

    def _learn(self, batch: MicroBatch, loss: LossSum, outputs: Tensor, beside: Tensor | float = 0.0) -> None:
        """Add a pass's gradient and counts; `beside` is trained on and not reported. An idle pass adds nothing, through
        `outputs`, which reach every parameter: its rank keeps step with the others."""
        if batch.is_idle:
            self.engine.backward(outputs.sum() * 0.0)
        else:
            self.engine.backward(loss.numerator + beside)
            self._count(
                numerator=loss.numerator,
                denominator=loss.denominator,
                tokens=batch.pack.num_sequence_tokens,
                computed_tokens=batch.pack.num_row_tokens,
                trained_tokens=len(batch.pack.seq_K),
            )
        self._tally.add_metrics(loss.metrics, is_idle=batch.is_idle)

    def _fitting(
        self, items: Sequence[Item], length: Callable[[Item], int], is_trained: Callable[[Item], bool]
    ) -> list[Item]:
        """The items to train on. What is too long is left to packing's error, or skipped, as configured."""
        trained = [item for item in items if is_trained(item)]
        kept = [item for item in trained if self.keeps(length(item))]
        if len(kept) < len(items):
            log.warning(
                "left out of training: %d of %d without a trained token, %d over %d tokens",
                len(items) - len(trained),
                len(items),
                len(trained) - len(kept),
                self.config.micro_batch_tokens,
            )
        self._count(skipped=float(len(items) - len(kept)))
        return kept

    def _dealt_out(self, items: Sequence[Item], lengths: Callable[[Item], Sequence[int]]) -> list[Item]:
        """This data rank's share, by cost, of what all have read: equal counts of unequal lengths would leave most
        ranks waiting."""
        costs = [float(self.cost_model(lengths(item)).sum()) for item in items]
        share, imbalance = deal_out(items, costs, self.world)
        spread = Metric.largest(torch.tensor([imbalance], device=self.world.device))
        self._tally.add_metrics({"rank_imbalance": spread}, is_idle=False)
        return share

    def _guarded(self, compute: Callable[[], LossSum], outputs: Tensor) -> LossSum:
        """The loss of a pass; one that is refused becomes NaN, so that all ranks learn of it together in _apply().

        `outputs` are the model's, through which every parameter is reached.
        """
        try:
            return compute()
        except TrainingError as error:
            self._failure = str(error)
            return LossSum(numerator=outputs.sum() * float("nan"), denominator=outputs.new_ones(()))

    def _apply(self, learning_rate: float | None = None) -> dict[str, float]:
        """One optimizer step with everything counted so far; metrics over all ranks."""
        started_s = time.perf_counter()
        tally, self._tally = self._tally, Tally()
        if not tally.sums:
            raise TrainingError("finish() without accumulate(): there is nothing to train on")
        own_norm = self.engine.gradient_norm()
        if self.world.data_size > 1 and not math.isfinite(own_norm.item()):
            # A rank whose loss was refused has no figures to add; the gradient, which all share, says so to all.
            tally.metrics.clear()
        sums, metrics, norm = tally.reduce(self.world, own_norm)
        if sums["trained_tokens"] == 0:
            self.engine.zero_gradients()
            raise TrainingError(
                f"the batch has no token to train on ({sums['samples']:.0f} samples, {sums['skipped']:.0f} skipped): "
                "check loss masks, filters, micro_batch_tokens, and that num_mini_batches is not more than the samples"
            )
        # A loss that is a plain sum has no denominator (see rill.algorithms.base.divisor).
        denominator = sums["denominator"] or 1.0
        loss = sums["numerator"] / denominator
        step = self.engine.step(
            denominator,
            is_finite=bool(np.isfinite(loss)),
            learning_rate=learning_rate,
            norm=norm,
            reason=self._failure,
        )
        self._busy_s += time.perf_counter() - started_s
        return {
            **metrics,
            **step,
            "loss": loss,
            "version": float(self.version),
            "samples": sums["samples"],
            "skipped_samples": sums["skipped"],
            "tokens": sums["tokens"],
            "computed_tokens": sums["computed_tokens"],
            "trained_tokens": sums["trained_tokens"],
            "train_s": self._busy_s,
            "train_tokens_per_s": sums["tokens"] / max(self._busy_s, 1e-9),
        }
