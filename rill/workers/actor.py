"""The actor: one rank of the trainer that owns the policy, and the publisher of its weights.

Calls, in order: `warm_up` until the supervised steps are done, `publish` before the first step, then once a step
`train` and `publish`, which brings the weights to the engines (rill.weights.publishing), and `save` now and then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rill.algorithms import Algorithm, AlgorithmConfig, Need
from rill.config import PartConfig
from rill.runtime.channel import Channel
from rill.telemetry.rollout_log import TrainedLog
from rill.training.packing import PackSequence
from rill.training.policy import PolicyTrainer
from rill.training.score import ScoreModel
from rill.training.warm_start import WarmStart
from rill.types import PolicyVersion, Sample
from rill.weights import Canary, CanaryProof, Tolerance
from rill.workers.config import SyncConfig, WarmStartConfig
from rill.workers.edges import Edge
from rill.workers.learners import Advantages, PolicyLearner, load_place, save_place
from rill.workers.scorers import TeacherConfig, rendezvous_of


class ActorWorker(PolicyLearner):
    trainer: PolicyTrainer
    algorithm: Algorithm

    def __init__(
        self,
        *,
        config: PolicyTrainer.Config,
        algorithm: AlgorithmConfig,
        sync: SyncConfig,
        teachers: Sequence[TeacherConfig] = (),
        has_critic: bool = False,
        run_dir: str | None = None,
    ) -> None:
        """`has_critic`: another group computes the advantages that the episodes could not. `run_dir`: where people see
        what becomes of the samples that are logged; None: nowhere."""
        self.algorithm = Algorithm(algorithm)
        self.trainer = PolicyTrainer(
            config, self.algorithm, rendezvous=rendezvous_of(self), device=self.device
        )
        self.teachers: list[tuple[ScoreModel, float]] = []
        if Need.FULL_VOCABULARY_TEACHER in self.algorithm.needs:
            for teacher in teachers:
                scoring = teacher.scoring(config.temperature).following(config)
                self.teachers.append((ScoreModel(scoring, device=self.device), teacher.weight))
            self.trainer.set_teachers(self.teachers)
        self.judges = not (has_critic or self.algorithm.is_group_scoped)
        self._open_publisher(sync)
        self._warm_start: WarmStart | None = None
        self._warm_place: dict[str, Any] | None = None
        self._log = None if run_dir is None else TrainedLog(Path(run_dir), f"actor-{self.rank}")
        if self._log is not None:
            self.trainer.on_trained = self._log.write

    def onload(self) -> None:
        super().onload()
        for teacher, _ in self.teachers:
            teacher.onload()

    def offload(self) -> None:
        super().offload()
        for teacher, _ in self.teachers:
            teacher.offload()

    def close(self) -> None:
        super().close()
        if self._log is not None:
            self._log.close()

    # --- training -----------------------------------------------------------------------------------------

    def warm_up(
        self, num_done: int, num_steps: int, data: PartConfig, config: WarmStartConfig, seed: int
    ) -> dict[str, float]:
        """`num_steps` supervised steps after so many; the metrics of the last."""
        with self.device_lock():
            if self._warm_start is None:
                settings = config.model_dump(exclude={"data"})
                self._warm_start = WarmStart(
                    self.trainer, data, **settings, seed=seed, num_done=num_done, place=self._warm_place
                )
            metrics = self._warm_start.run(num_steps)
            if self._warm_start.is_over:
                self._warm_start.trainer.finish()
                self._warm_start = None
            return metrics

    def save(self, folder: str) -> None:
        super().save(folder)
        if self._warm_start is not None:
            save_place(folder, self._warm_start.loader, self.trainer.world)

    def load(self, folder: str) -> None:
        super().load(folder)
        self._warm_start, self._warm_place = None, load_place(folder, self.trainer.world)

    def _train(self, source: Edge, version: PolicyVersion) -> Mapping[str, float]:
        """One step from `version`: gradients are added chunk by chunk, and the optimizer steps when the batch is
        through. `publish` follows."""
        advantages = Advantages(self.algorithm, self.trainer) if self.judges else None
        num_samples = num_misplaced = 0
        world, cost = self.trainer.world, self.trainer.cost_model
        with ExitStack() as turn:
            for part in source.parts(self, world, whole_groups=self.judges, cost=cost, turn=turn):
                if part.is_first:
                    self.trainer.begin(version)
                num_samples += len(part.chunk.lengths_S)
                ready: list[Sample] | None = part.samples()
                num_misplaced += sum(
                    not key.startswith(f"{sample.trajectory.group_id}/")
                    for key, sample in zip(part.keys, ready or (), strict=True)
                )
                if advantages is not None:
                    ready = advantages.add(ready or [], is_last=part.chunk.is_last)
                if ready is not None:
                    with self.timer("accumulate"):
                        self.trainer.accumulate(ready)
            with self.timer("finish"):
                metrics = {**(advantages.metrics if advantages else {}), **self.trainer.finish()}
            metrics["groups/misplaced"] = float(num_misplaced)
            self.algorithm.observe(metrics, num_samples)
        return metrics

    def score(self, source: Edge, target: Channel) -> Mapping[str, float]:
        """Add what advantages need of the policy itself: its log-probabilities, for a KL penalty in the reward."""
        for part in source.parts(self, self.trainer.world, cost=self.trainer.cost_model):
            with self.device_lock():
                scored = self.trainer.scored(part.samples())
            part.put(target, scored)
        return {}

    # --- weights ------------------------------------------------------------------------------------------

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.trainer.named_weights()

    def _proof(self, dtype: str) -> CanaryProof:
        """The trainer's own log-probabilities, at temperature 1."""
        given = self.sync.canary_tolerance
        tolerance = Tolerance(mean=given, largest=10 * given) if given else None
        tokens = Canary.random(self.trainer.engine.module.vocab_size).sequences
        every_token = [PackSequence(token_ids=each, wanted=np.arange(len(each)) > 0) for each in tokens]
        expected = self.trainer.logprobs_of(every_token)
        return CanaryProof(canary=Canary(tokens, dtype=dtype, tolerance=tolerance), expected=expected)

    def export(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.export(folder)
