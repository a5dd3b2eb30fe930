"""One training step on a batch of samples that arrives in chunks: what PolicyTrainer and ValueTrainer share.

    begin()                    forget whatever a step that failed half-way left behind
    accumulate(samples)        any number of times: this rank's part of a chunk; sums of gradients and counts grow
    finish() -> metrics        divide once by the global counts, clip, optimise

The same chunks in the same order give the same bits, other chunks the same gradient up to rounding. Every rank makes
the same calls, with whatever samples it has, none among them. A step that cannot begin before its batch is whole
(several optimizer steps, figures over the batch) says why in `waits_for`: accumulate() then keeps the samples, and
finish() does the work; for the caller nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rill.errors import TrainingError
from rill.models.train.packed_layout import copy_in
from rill.training.engine_config import MiniBatchConfig
from rill.training.packing import predicted
from rill.training.trainer import Trainer
from rill.types import Bits, Sample


class StepTrainer(Trainer):
    """A subclass has the loss: _add()."""

    config: MiniBatchConfig
    _held: list[Sample]
    _is_begun = False

    @property
    def num_steps(self) -> int:
        """Optimizer steps per batch."""
        return self.config.num_epochs * self.config.num_mini_batches

    @property
    def waits_for(self) -> str:
        """Why accumulate() only keeps its samples until finish(); empty where it computes at once."""
        return f"{self.num_steps} optimizer steps are taken on each batch" if self.num_steps > 1 else ""

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """Add this rank's part of a chunk, which may be empty. Weights do not change before finish()."""
        if not self._is_begun:
            raise TrainingError("accumulate() without begin(): a step begins with begin()")
        with self._working():
            usable = self._usable(samples)
            if self.waits_for:
                self._held += usable
            else:
                self._add(usable)

    def finish(self) -> dict[str, float]:
        """The optimizer step, or steps, with everything accumulated. Metrics are over all ranks."""
        if not self._is_begun:
            raise TrainingError("finish() without begin(): there is nothing to train on")
        self._is_begun = False
        return self._finish()

    def _start(self) -> None:
        self._forget()
        self._held = []
        self._is_begun = True

    def _finish(self) -> dict[str, float]:
        if not self.waits_for:
            return self._apply()
        with self._working():
            samples = self._whole(self._held)
        self._held = []
        steps: list[dict[str, float]] = []
        for number, part in enumerate(mini_batches(self.config, len(samples), self.version)):
            with self._working():
                self._add([samples[i] for i in part], step=number)
            steps.append(self._apply())
        return merge_steps(steps)

    def _usable(self, samples: Sequence[Sample]) -> list[Sample]:
        """Checked samples with something to train on and within the budget; the rest is counted or an error."""
        for sample in samples:
            self.batcher.check(sample.trajectory)
        return self._fitting(samples, lambda s: s.num_tokens, lambda s: bool(wanted_of(s).any()))

    def _whole(self, samples: list[Sample]) -> list[Sample]:
        """The whole batch before its first optimizer step; by default as it is."""
        return samples

    def _add(self, samples: Sequence[Sample], step: int = 0) -> None:
        """Add the gradient of these samples; `step` counts the optimizer steps already taken on the batch."""
        raise AssertionError("a subclass has the loss")

    def _on_device(
        self, samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]]
    ) -> dict[str, Tensor]:
        """What of each column (an array to a sample) is of wanted tokens, copied in one piece; an idle pass wants one,
        and has zeros for it."""
        if not samples:
            return {name: torch.zeros(1, device=self.world.device) for name in columns}
        wanted = [wanted_of(sample) for sample in samples]
        table = np.stack(
            [
                np.concatenate([values[mask] for values, mask in zip(column, wanted, strict=True)])
                for column in columns.values()
            ]
        ).astype(np.float32)
        return dict(zip(columns, copy_in(table, self.world.device), strict=True))


def wanted_of(sample: Sample) -> Bits:
    """The tokens that are trained on."""
    return predicted(sample.trajectory.loss_mask)


def mini_batches(config: MiniBatchConfig, num_samples: int, version: int) -> Iterator[list[int]]:
    """The samples of each optimizer step of one batch, by index: every pass shuffles them by (seed, version, pass) and
    cuts them into even counts. `version` is the trainer's at the batch's start."""
    for epoch in range(config.num_epochs):
        order = np.random.default_rng((config.seed, version, epoch)).permutation(num_samples)
        for part in np.array_split(order, config.num_mini_batches):
            yield sorted(part.tolist())


def merge_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps of one update; counts of work are added, states the last, maxima the largest."""
    if len(steps) == 1:
        return steps[0]
    added = {"samples", "tokens", "computed_tokens", "trained_tokens", "skipped_samples"}
    last = {"version", "learning_rate", "skipped_steps", "train_s"}
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step):  # a skipped step may have fewer
        values = [s[name] for s in steps if name in s]
        merged[name] = (
            sum(values) if name in added else values[-1] if name in last else sum(values) / len(values)
        )
        if name.endswith("_max"):
            merged[name] = max(values)
    merged["train_tokens_per_s"] = merged["tokens"] / max(merged["train_s"], 1e-9)
    return merged
