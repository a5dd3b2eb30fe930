"""GRPO and its relatives: sample groups, reward them, learn from the difference.

The file is the algorithm. Where the groups run, whether they share devices, in what chunks samples move between them
and how far sampling runs ahead of training is the recipe's business; nothing here changes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from rill.algorithms import Algorithm, Need
from rill.runtime.group import WorkerGroup
from rill.training.score import ScoreModel
from rill.types import Group, Trajectory
from rill.workers.episodes import FinishedGroup
from rill.workers.scorers import InferenceWorker, ReferenceWorker, RewardModelWorker, TeacherWorker
from rill.workflows.flow import Flow, Stream
from rill.workflows.language import initial_model, launch_actor, launch_rollout, require_same_tokenizer
from rill.workflows.launch import Launcher
from rill.workflows.rl_config import RLConfig
from rill.workflows.workflow import Workflow


def finish_group(algorithm: Algorithm, group: Group, greedy: Sequence[Trajectory]) -> FinishedGroup:
    """What becomes of a group when its last episode ends, where it was made: the filter's verdict, and advantages from
    the rewards of the group. Failed episodes are in no baseline. An algorithm whose advantages need more than the group
    leaves them to the actor; with a reward model they are computed from its scores."""
    verdict = algorithm.keep(group.trajectories, greedy)
    if not verdict.keep:
        return FinishedGroup(verdict, [])
    samples = algorithm.as_samples(group.trajectories, greedy)
    if algorithm.is_group_scoped:
        samples, _ = algorithm.advantages(samples)
    return FinishedGroup(verdict, list(samples))


class GRPO(Workflow):
    class Config(RLConfig):
        workflow: Literal["grpo"] = "grpo"

    config: RLConfig

    def groups(self, launch: Launcher) -> None:
        self.rollout = launch_rollout(launch, self.config, finish_group)
        self.actor = launch_actor(launch, self.config, self.rollout)
        self.scorers(launch)

    def scorers(self, launch: Launcher) -> None:
        """What a batch passes on its way to the trainer: the models that the algorithm needs, in this order."""
        config, needs = self.config, self.config.needs
        self.stages: list[WorkerGroup[Any]] = []
        self.inference: WorkerGroup[InferenceWorker] | None = None
        trainer = config.trainer
        policy = ScoreModel.Config(model=config.model, temperature=trainer.temperature).following(trainer)
        for other in (*config.teachers, *filter(None, [config.reward_model])):
            require_same_tokenizer(config.model, other.model)
        if config.reward_model is not None:
            judge = config.reward_model.following(trainer)
            self.stages += [launch(RewardModelWorker, "reward", config=judge, algorithm=config.algorithm)]
        if config.placement.inference is not None:
            self.inference = launch(InferenceWorker, "inference", config=policy, sync=launch.sync)
            self.stages += [self.inference]
        elif Need.REWARD_LOGPROBS in needs:
            self.stages += [self.actor]
        if Need.REF_LOGPROBS in needs:
            begun = policy.model_copy(update={"model": initial_model(launch, config, self.actor)})
            self.stages += [launch(ReferenceWorker, "reference", config=begun)]
        if Need.TEACHER_LOGPROBS in needs:
            teacher = config.teachers[0].scoring(trainer.temperature).following(trainer)
            self.stages += [launch(TeacherWorker, "teacher", config=teacher)]

    def step(self, flow: Flow) -> None:
        answers = flow.sample(self.rollout)  # prompts, as far ahead as the lag allows; episodes with rewards
        batch = flow.select(answers)  # whole groups with advantages, filtered, until the batch is full
        scored = self.scored(flow, batch)  # what the algorithm needs of other models
        flow.update(self.actor, scored)  # gradients chunk by chunk; engines come to version + 1

    def scored(self, flow: Flow, batch: Stream) -> Stream:
        """The batch on its way past them."""
        for stage in self.stages:
            batch = flow.through(stage, batch, follows=stage is self.inference)
        return batch
