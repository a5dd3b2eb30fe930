"""Workers that add something to every sample on its way from the engines to the trainer.

    rollouts ──▶ inference.score ──▶ reference.score ──▶ critic.judge ──▶ actor.train
                                                              └─────────▶ critic.train

Each rank takes its share of the step's plan by key from one channel and puts the samples, with the same keys, into the
next. Groups of any size can follow one another: the keys redistribute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.errors import CheckpointError, StaleWeightsError
from rill.runtime.channel import Channel
from rill.runtime.worker import Worker
from rill.telemetry.run import write_atomically
from rill.training.parallel import Rendezvous
from rill.training.score import ScoreModel
from rill.training.trainer import Trainer
from rill.training.value import ValueTrainer
from rill.types import Floats, PolicyVersion, Sample
from rill.weights import SealedManifest, open_receiver
from rill.workflows.jobs import StepPlan
from rill.workflows.sections import SyncConfig

ALGORITHM_FILE = "algorithm.json"


class InferenceWorker(Worker):
    """The policy as the trainer has it, for reading only: log π_old is computed here and not by the trainer, on devices
    of its own or before the trainer's turn. Each rank holds the whole model and pulls what the trainer published."""

    def __init__(self, *, config: ScoreModel.Config, sync: SyncConfig) -> None:
        self.model = ScoreModel(config, device=self.device)
        self.receiver = open_receiver(sync.transport)
        self.version: PolicyVersion | None = None

    def onload(self) -> None:
        self.model.onload()

    def offload(self) -> None:
        self.model.offload()

    def close(self) -> None:
        self.receiver.close()

    def score(self, source: Channel, target: Channel, plan: StepPlan, manifest: SealedManifest) -> None:
        """Add log π_old under the weights that the step starts from."""
        with self.device_lock(source, target):
            self._follow(plan.version, manifest)
            keys = plan.share(self.rank, self.world_size, whole_groups=False)
            samples: list[Sample] = source.take(keys=keys)
            scored = self.model.logprobs(samples, trained_only=True)
            put_all(target, keys, [replace(s, old_logprobs=x) for s, x in zip(samples, scored, strict=True)])

    def _follow(self, version: PolicyVersion, manifest: SealedManifest) -> None:
        if manifest.version != version:
            raise StaleWeightsError(
                f"the step starts from version {version}, published is {manifest.version}"
            )
        if self.version != version:
            self.version = None  # until every tensor is in: a pull that breaks off leaves a mixture
            self.model.load_weights(self.receiver.pull(manifest.open()))
            self.version = version


class ReferenceWorker(Worker):
    """The frozen policy that training must not stray far from. Each rank holds the whole model."""

    def __init__(self, *, config: ScoreModel.Config) -> None:
        self.model = ScoreModel(config, device=self.device)

    def onload(self) -> None:
        self.model.onload()

    def offload(self) -> None:
        self.model.offload()

    def score(self, source: Channel, target: Channel, plan: StepPlan) -> None:
        """Add this model's log-probabilities of every answer."""
        with self.device_lock(source, target):
            keys = plan.share(self.rank, self.world_size, whole_groups=False)
            samples: list[Sample] = source.take(keys=keys)
            scored = self.model.logprobs(samples, trained_only=True)
            put_all(target, keys, [self._with(s, x) for s, x in zip(samples, scored, strict=True)])

    def _with(self, sample: Sample, logprobs: Floats) -> Sample:
        return replace(sample, ref_logprobs=logprobs)


class TeacherWorker(ReferenceWorker):
    """The frozen policy that is learnt from (on-policy distillation on the advantage)."""

    def _with(self, sample: Sample, logprobs: Floats) -> Sample:
        return replace(sample, teacher_logprobs=logprobs)


class LearningWorker(Worker):
    """A worker that is trained: what a checkpoint holds of it. Every rank saves and loads."""

    trainer: Trainer
    algorithm: Algorithm

    def save(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.save(folder)
        self.trainer.wait_saved()
        save_algorithm(self, self.algorithm, folder)

    def load(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.load(folder)
        load_algorithm(self.algorithm, folder)


class CriticWorker(LearningWorker):
    """The value function: judges samples before the policy's update and learns from them after."""

    trainer: ValueTrainer

    def __init__(self, *, config: ValueTrainer.Config, algorithm: AlgorithmConfig) -> None:
        self.algorithm = Algorithm(algorithm)
        rendezvous = rendezvous_of(self)
        self.trainer = ValueTrainer(config, self.algorithm, rendezvous=rendezvous, device=self.device)

    def onload(self) -> None:
        self.trainer.onload()

    def offload(self) -> None:
        self.trainer.offload()

    def judge(
        self, source: Channel, for_actor: Channel, for_critic: Channel, plan: StepPlan
    ) -> Mapping[str, float]:
        """Add values, then advantages and returns, whitened over all ranks."""
        with self.device_lock(source, for_actor):
            keys, samples = take_share(source, plan, self.trainer, whole_groups=True)
            values = self.trainer.values(samples)
            judged, figures = self.algorithm.advantages(
                [replace(s, values=v) for s, v in zip(samples, values, strict=True)],
                self.trainer.world.sum_over_data,
            )
            if self.trainer.world.leads:
                put_all(for_actor, keys, judged)
                put_all(for_critic, keys, judged)
            self.algorithm.observe(figures, plan.num_samples)
            return figures

    def train(self, source: Channel, plan: StepPlan) -> Mapping[str, float]:
        with self.device_lock(source):
            _, samples = take_share(source, plan, self.trainer, whole_groups=True)
            figures = self.trainer.update(samples)
        return {f"critic/{name.removeprefix('value/')}": value for name, value in figures.items()}


def save_algorithm(worker: Worker, algorithm: Algorithm, folder: str) -> None:
    """What the algorithm has learnt by itself, the KL coefficient; the same on every rank, so the first writes it."""
    if worker.rank == 0:
        write_atomically(Path(folder) / ALGORITHM_FILE, json.dumps(algorithm.state_dict()))


def load_algorithm(algorithm: Algorithm, folder: str) -> None:
    path = Path(folder) / ALGORITHM_FILE
    try:
        algorithm.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def rendezvous_of(worker: Worker) -> Rendezvous | None:
    """How a trainer's ranks find each other; None for one rank, which needs no process group."""
    if worker.world_size == 1:
        return None
    place = worker.rendezvous()
    return Rendezvous(init_method=place.init_method, rank=place.rank, world_size=place.world_size)


def take_share(
    channel: Channel, plan: StepPlan, trainer: Trainer, *, whole_groups: bool
) -> tuple[list[str], list[Sample]]:
    """Keys and samples of this data rank; ranks that compute one data rank together (tensor and context parallelism)
    get the same, taken once."""
    world = trainer.world
    keys = plan.share(world.data_rank, world.data_size, whole_groups=whole_groups, cost=trainer.cost_model)
    return keys, world.from_leader(channel.take(keys=keys) if world.leads else None)


def put_all(channel: Channel, keys: Sequence[str], samples: Sequence[Sample]) -> None:
    for key, sample in zip(keys, samples, strict=True):
        channel.put(sample, weight=float(sample.num_tokens), key=key)
