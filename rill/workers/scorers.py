"""Models that add something to every sample on its way from the episodes to the trainer: they learn nothing.

    reward      the score of a reward model, added to the environment's; advantages follow from it
    inference   log π_old under the weights that the step starts from, in place of the trainer
    reference   log-probabilities of the policy as RL began
    teacher     log-probabilities of the model that is learnt from

Each is a loop over its edge: it takes its share of a chunk, waits for its turn on the devices, and puts the samples,
with the same keys, into the next edge. A model is whole on every rank, or cut over all of them (`shard`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.errors import UnsupportedError
from rill.runtime.channel import Channel
from rill.runtime.worker import Worker, concurrent
from rill.training.parallel import Rendezvous
from rill.training.reward import RewardModel
from rill.training.score import FrozenModel, ScoreModel
from rill.types import Floats, PolicyVersion, Sample
from rill.weights import SealedManifest, open_receiver
from rill.workers.config import SyncConfig
from rill.workers.edges import Edge, num_shares

PART = "model"
"""The score's name among the parts of a reward."""


class TeacherConfig(FrozenModel.Config):
    """[[teachers]]: a frozen model of the student's vocabulary.

    form "advantage": one teacher, a group of its own (placement.teacher); form "full_vocabulary": any number, beside
    the trainer, where their logits are rebuilt chunk by chunk.
    """

    weight: float = 1.0
    """Of its divergence among those of several teachers."""

    def scoring(self, temperature: float) -> ScoreModel.Config:
        return ScoreModel.Config(**self.model_dump(exclude={"weight"}), temperature=temperature)


class RewardModelConfig(RewardModel.Config):
    """[reward_model]: a model that scores every answer, beside the environment's own reward."""

    weight: float = 1.0
    """What its score is multiplied with before it is added to the reward."""
    replaces_reward: bool = False
    """Train on its score alone. What the environment scored is still reported and still decides evaluations."""


class ScoringWorker(Worker):
    """One rank of a frozen model."""

    model: FrozenModel
    whole_groups = False

    def onload(self) -> None:
        self.model.onload()

    def offload(self) -> None:
        self.model.offload()

    @concurrent
    def num_shares(self) -> int:
        return num_shares(self.world_size, self.model.world)

    def score(
        self, source: Edge, target: Channel, manifest: SealedManifest | None = None
    ) -> Mapping[str, float]:
        """One batch, chunk by chunk. Metrics are means over this rank's samples. `manifest`: of the weights to score
        with, for a model that is not frozen."""
        sums: dict[str, float] = {}
        count = 0
        for part in source.parts(self, self.model.world, whole_groups=self.whole_groups):
            with self.device_lock():
                self._follow(manifest)
                scored, found = self._scored(part.samples())
            part.put(target, scored)
            count += len(scored) if found else 0
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value * len(scored)
        return {name: total / count for name, total in sums.items() if count}

    def _follow(self, manifest: SealedManifest | None) -> None:
        """Nothing, where the model is frozen."""

    @abstractmethod
    def _scored(self, samples: list[Sample]) -> tuple[list[Sample], Mapping[str, float]]: ...


class ReferenceWorker(ScoringWorker):
    """The frozen policy that training must not stray far from."""

    model: ScoreModel
    column = "ref_logprobs"

    def __init__(self, *, config: ScoreModel.Config) -> None:
        self.model = ScoreModel(config, rendezvous=rendezvous_of(self), device=self.device)

    def _scored(self, samples: list[Sample]) -> tuple[list[Sample], Mapping[str, float]]:
        logprobs = self.model.logprobs(samples, trained_only=True)
        return with_column(samples, self.column, logprobs), {}


class TeacherWorker(ReferenceWorker):
    """The frozen policy that is learnt from (on-policy distillation on the advantage)."""

    column = "teacher_logprobs"


class InferenceWorker(ReferenceWorker):
    """The policy as the trainer has it, for reading only: log π_old is computed here and not by the trainer, on devices
    of its own or before the trainer's turn."""

    column = "old_logprobs"

    def __init__(self, *, config: ScoreModel.Config, sync: SyncConfig) -> None:
        super().__init__(config=config)
        self.receiver = open_receiver(sync.transport)
        self.version: PolicyVersion | None = None

    def close(self) -> None:
        self.receiver.close()

    def _follow(self, manifest: SealedManifest | None) -> None:
        if manifest is not None and self.version != manifest.version:
            self.version = None  # until every tensor is in: a pull that breaks off leaves a mixture
            self.model.load_weights(self.receiver.pull(manifest.open()))
            self.version = manifest.version


class RewardModelWorker(ScoringWorker):
    """A stage and not a reward that environments ask: engines that wait for a model which shares their device would
    wait for ever. Groups are whole here, so that their advantages can be computed from the new rewards."""

    model: RewardModel
    whole_groups = True

    def __init__(self, *, config: RewardModelConfig, algorithm: AlgorithmConfig) -> None:
        self.config = config
        self.algorithm = Algorithm(algorithm)
        self.model = RewardModel(config, rendezvous=rendezvous_of(self), device=self.device)

    def _scored(self, samples: list[Sample]) -> tuple[list[Sample], Mapping[str, float]]:
        if any(sample.trajectory.pictures for sample in samples):
            raise UnsupportedError("a reward model reads text alone, and the samples have pictures")
        scores = self.model.scores([sample.trajectory.token_ids for sample in samples])
        rewarded = with_scores(samples, scores, self.config, self.algorithm)
        judged = [sample.trajectory for sample in rewarded if sample.trajectory.error is None]
        if not judged:
            return rewarded, {}
        means = {"reward/mean": fmean(t.reward for t in judged)}
        return rewarded, means | {f"reward/{PART}": fmean(t.reward_parts[PART] for t in judged)}


def with_scores(
    samples: Sequence[Sample], scores: Sequence[float], config: RewardModelConfig, algorithm: Algorithm
) -> list[Sample]:
    """The samples with weight · score in their reward, and with the advantages that follow within each group; an
    algorithm that needs more than the group leaves them to the critic or the actor. One without a score has failed.
    Where an agent's episode gave several samples its score is that of the last, as a reward is for its last answer."""
    rewarded = []
    played = [(s.trajectory.episode_id or s.id, s.trajectory.agent) for s in samples]
    score_of = dict(zip(played, scores, strict=True))
    for sample, episode in zip(samples, played, strict=True):
        t, score = sample.trajectory, score_of[episode]
        own = 0.0 if config.replaces_reward else t.reward
        parts = {**t.reward_parts, PART: score}
        scored = replace(t, reward=own + config.weight * score, reward_parts=parts)
        if config.replaces_reward:
            scored = replace(scored, rewards=None)
        if math.isnan(score):
            scored = replace(t, error=t.error or "too long for the reward model")
        rewarded.append(replace(sample, trajectory=scored))
    if not algorithm.is_group_scoped or not rewarded:
        return rewarded
    judged, _ = algorithm.advantages(rewarded)
    return list(judged)


def with_column(samples: Sequence[Sample], name: str, values: Sequence[Floats]) -> list[Sample]:
    change: Any = replace  # the name of the column is a variable
    return [change(sample, **{name: value}) for sample, value in zip(samples, values, strict=True)]


def rendezvous_of(worker: Worker) -> Rendezvous | None:
    """How the ranks of one model find each other; None for one rank."""
    if worker.world_size == 1:
        return None
    place = worker.rendezvous()
    return Rendezvous(open_store=place.open_store, rank=place.rank, world_size=place.world_size)
