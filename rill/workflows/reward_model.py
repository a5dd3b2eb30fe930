"""The reward model of a run: a worker group of its own, on devices of its own or taking turns.

It is a stage between the engines and the trainer and not a reward that environments ask: engines that wait for a model
which shares their device would wait for ever. What environments scored stays, and the model's score is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rill.algorithms import Algorithm, AlgorithmConfig
from rill.runtime.channel import Channel
from rill.runtime.worker import Worker
from rill.training.reward import RewardModel
from rill.types import Sample
from rill.workflows.jobs import StepPlan
from rill.workflows.stages import put_all

PART = "model"
"""The score's name among the parts of a reward."""


class RewardModelConfig(RewardModel.Config):
    """[reward_model]: a model that scores every answer, beside the environment's own reward."""

    weight: float = 1.0
    """What its score is multiplied with before it is added to the reward."""
    is_alone: bool = False
    """Train on its score alone. What the environment scored is still reported and still decides evaluations."""


class RewardModelWorker(Worker):
    """Each rank holds the whole model and scores its share of the groups."""

    def __init__(self, *, config: RewardModelConfig, algorithm: AlgorithmConfig) -> None:
        self.config = config
        self.algorithm = Algorithm(algorithm)
        self.model = RewardModel(config, device=self.device)

    def onload(self) -> None:
        self.model.onload()

    def offload(self) -> None:
        self.model.offload()

    def score(self, source: Channel, target: Channel, plan: StepPlan) -> Mapping[str, float]:
        """Add the model's score to every reward. Groups are whole here, so their advantages are computed anew."""
        with self.device_lock(source, target):
            keys = plan.share(self.rank, self.world_size, whole_groups=True)
            samples: list[Sample] = source.take(keys=keys)
            scores = self.model.scores([sample.trajectory.token_ids for sample in samples])
            rewarded = with_scores(samples, scores, self.config, self.algorithm)
            put_all(target, keys, rewarded)
        if not rewarded:
            return {}
        rewards = [sample.trajectory.reward for sample in rewarded]
        return {"reward/mean": float(np.mean(rewards)), f"reward/{PART}": float(np.mean(scores))}


def with_scores(
    samples: Sequence[Sample], scores: Sequence[float], config: RewardModelConfig, algorithm: Algorithm
) -> list[Sample]:
    """The samples with weight · score in their reward, and with the advantages that follow within each group."""
    rewarded = [
        replace(
            sample,
            trajectory=replace(
                sample.trajectory,
                reward=(0.0 if config.is_alone else sample.trajectory.reward) + config.weight * score,
                reward_parts={**sample.trajectory.reward_parts, PART: score},
            ),
        )
        for sample, score in zip(samples, scores, strict=True)
    ]
    if not algorithm.is_group_scoped:
        return rewarded  # the trainer or the critic computes them from the rewards
    return algorithm.advantages(rewarded)[0]
