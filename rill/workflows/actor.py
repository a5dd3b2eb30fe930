"""The actor: one rank of the trainer that owns the policy, and the publisher of its weights.

The loop calls `warm_up` until it is over, `publish` before the first step, then `train` once a step, which brings what
it made to the engines (publishing.py), and `save` now and then. All ranks take part in every call, because parameters
are sharded over them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rill.algorithms import Algorithm, AlgorithmConfig, Need
from rill.config import PartConfig
from rill.data.base import Split, open_dataset
from rill.data.chat import PromptEncoder
from rill.data.loader import LoaderConfig, open_loader
from rill.data.sft import SFTEncoder
from rill.models.loading import load_tokenizer
from rill.runtime.channel import Channel
from rill.runtime.context import current
from rill.training.policy import PolicyTrainer
from rill.training.score import ScoreModel
from rill.training.sft import SFTTrainer
from rill.types import NOT_SAMPLED, Floats, PolicyVersion, Sample, TokenIds, Trajectory
from rill.weights import (
    Canary,
    CanaryProof,
    SealedManifest,
    Tolerance,
    WeightManifest,
    open_publisher,
    take_part,
)
from rill.workflows.jobs import StepPlan, TrainedStep
from rill.workflows.publishing import PublishingWorker
from rill.workflows.sections import SyncConfig, WarmupConfig
from rill.workflows.stages import LearningWorker, put_all, rendezvous_of, take_share
from rill.workflows.teachers import TeacherConfig, open_teachers


class ActorWorker(PublishingWorker, LearningWorker):
    trainer: PolicyTrainer

    def __init__(
        self,
        *,
        config: PolicyTrainer.Config,
        algorithm: AlgorithmConfig,
        sync: SyncConfig,
        teachers: Sequence[TeacherConfig] = (),
    ) -> None:
        self.algorithm = Algorithm(algorithm)
        rendezvous = rendezvous_of(self)
        self.trainer = PolicyTrainer(config, self.algorithm, rendezvous=rendezvous, device=self.device)
        self.teachers: list[tuple[ScoreModel, float]] = []
        if Need.FULL_VOCABULARY_TEACHER in self.algorithm.needs:
            self.teachers = open_teachers(teachers, config.temperature, self.device)
            self.trainer.set_teachers(self.teachers)
        self.sync = sync
        self.publisher = open_publisher(sync.transport, host=current().host) if self.rank == 0 else None
        self._warmup: SupervisedSteps | None = None

    def onload(self) -> None:
        self.trainer.onload()
        for teacher, _ in self.teachers:
            teacher.onload()

    def offload(self) -> None:
        self.trainer.offload()
        for teacher, _ in self.teachers:
            teacher.offload()

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()

    # --- training -----------------------------------------------------------------------------------------

    def warm_up(self, data: PartConfig, config: WarmupConfig, num_steps: int, seed: int) -> dict[str, float]:
        """The next `num_steps` supervised steps; returns the figures of the last."""
        with self.device_lock():
            if self._warmup is None:
                self._warmup = SupervisedSteps(self.trainer, data, config, seed)
            return self._warmup.run(num_steps)

    def end_warm_up(self) -> None:
        if self._warmup is not None:
            self._warmup.trainer.finish()
            self._warmup = None

    def train(self, rollouts: Channel, plan: StepPlan) -> TrainedStep:
        """One training step on this rank's share of the plan; the engines are brought to what it made."""
        is_local = self.algorithm.is_group_scoped
        with self.device_lock(rollouts):
            with self.timer("take samples"):
                _, samples = take_share(rollouts, plan, self.trainer, whole_groups=not is_local)
            figures: dict[str, float] = {}
            if not is_local:
                samples, figures = self.algorithm.advantages(samples, self.trainer.world.sum_over_data)
            with self.timer("update"):
                figures |= self.trainer.update(samples, plan.version)
            self.algorithm.observe(figures, plan.num_samples)
            trained_s = time.perf_counter()
            with self.timer("publish"):
                manifest = self._gather(PolicyVersion(plan.version + 1))
        synced = self._bring_engines_to(manifest)
        return TrainedStep(figures, synced, time.perf_counter() - trained_s)

    def score(self, source: Channel, target: Channel, plan: StepPlan) -> None:
        """Add the trainer's own log-probabilities, for a KL penalty in the reward and several updates per batch."""
        with self.device_lock(source, target):
            keys, samples = take_share(source, plan, self.trainer, whole_groups=False)
            scored = self.trainer.logprobs(samples, trained_only=True)
            if self.trainer.world.leads:
                put_all(
                    target, keys, [replace(s, old_logprobs=x) for s, x in zip(samples, scored, strict=True)]
                )

    # --- weights ------------------------------------------------------------------------------------------

    def _gather(self, version: PolicyVersion) -> SealedManifest | None:
        if self.publisher is None:
            take_part(self.trainer.named_weights())
            if self.sync.canary:
                self._canary_scores()
            return None
        manifest = self.publisher.publish(self.trainer.named_weights(), version)
        return manifest.seal(self._proof(manifest) if self.sync.canary else None)

    def _proof(self, manifest: WeightManifest) -> CanaryProof:
        given = self.sync.canary_tolerance
        tolerance = Tolerance(mean=given, largest=10 * given) if given else None
        canary = Canary(self._canary_tokens(), dtype=manifest.tensors[0].dtype, tolerance=tolerance)
        return CanaryProof(canary=canary, expected=self._canary_scores())

    def _canary_tokens(self) -> list[TokenIds]:
        return Canary.random(self.trainer.engine.module.vocab_size).sequences

    def _canary_scores(self) -> list[Floats]:
        """The trainer's own log-probabilities at temperature 1; all ranks take part."""
        return self.trainer.logprobs(
            [_as_sample(tokens) for tokens in self._canary_tokens()], temperature=1.0
        )

    def export(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.export(folder)


def _as_sample(token_ids: TokenIds) -> Sample:
    """Tokens dressed as a sample, so that a trainer can score them."""
    length = len(token_ids)
    trajectory = Trajectory(
        id="canary",
        group_id="canary",
        prompt_id="canary",
        token_ids=token_ids,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, NOT_SAMPLED, np.int32),
        loss_mask=np.ones(length, np.bool_),
        turn_ids=np.zeros(length, np.int32),
    )
    return Sample(trajectory=trajectory, advantages=np.zeros(length, np.float32))


class SupervisedSteps:
    """A warm-up on the actor's own engine. Each rank reads its own part of the data; the rate falls along a cosine."""

    def __init__(self, trainer: PolicyTrainer, data: PartConfig, config: WarmupConfig, seed: int) -> None:
        self.trainer = SFTTrainer.sharing(trainer, learning_rate=config.learning_rate)
        self._config = config
        encoder = PromptEncoder(load_tokenizer(trainer.config.model))
        limit = trainer.config.micro_batch_tokens if trainer.config.on_too_long == "error" else None
        self._encoder = SFTEncoder(encoder, max_tokens=limit)
        dataset = open_dataset(data, Split.TRAIN)
        rank, size = trainer.world.data_rank, trainer.world.data_size
        self._loader = open_loader(dataset, LoaderConfig(seed=seed), rank=rank, world=size)
        self._batch_size = max(1, config.batch_size // size)
        self._step = 0

    def run(self, num_steps: int) -> dict[str, float]:
        figures: dict[str, float] = {}
        for _ in range(num_steps):
            self.trainer.set_learning_rate(self._rate())
            figures = self.trainer.update(
                [self._encoder.encode(p) for p in self._loader.next(self._batch_size)]
            )
            self._step += 1
        return {"warmup/loss": figures["loss"], "warmup/tokens_per_s": figures["train_tokens_per_s"]}

    def _rate(self) -> float:
        config = self._config
        rising = min(1.0, (self._step + 1) / max(1, min(50, config.steps // 10)))
        falling = 0.5 * (1.0 + math.cos(math.pi * self._step / config.steps))
        return config.learning_rate * rising * falling
