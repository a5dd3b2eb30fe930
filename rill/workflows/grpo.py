"""GRPO and its relatives: sample groups, reward them, learn from the difference.

The file is the algorithm. Where the groups run, whether they share devices, in what chunks samples move between them
and how far sampling runs ahead of training is the recipe's business; nothing here changes with it.
"""

from __future__ import annotations

from typing import Literal

from rill.algorithms import Algorithm, Need
from rill.training.score import ScoreModel
from rill.types import Group, Trajectory
from rill.workflows.episodes import FinishedGroup
from rill.workflows.flow import Flow, Stream
from rill.workflows.language import initial_model, launch_actor, launch_rollout, require_same_tokenizer
from rill.workflows.launch import Launcher
from rill.workflows.rl_config import RLConfig
from rill.workflows.scorers import InferenceWorker, ReferenceWorker, RewardModelWorker, TeacherWorker
from rill.workflows.workflow import Workflow


def finish_group(algorithm: Algorithm, group: Group, greedy: Trajectory | None) -> FinishedGroup:
    """What becomes of a group when its last episode ends, where it was made: the filter's verdict, and advantages from
    the rewards of the group. Failed episodes are in no baseline. An algorithm whose advantages need more than the group
    leaves them to the actor; with a reward model they are computed from its scores."""
    verdict = algorithm.keep(group.trajectories)
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
        """The frozen models that the algorithm needs."""
        config, needs = self.config, self.config.needs
        self.reward = self.inference = self.reference = self.teacher = None
        trainer = config.trainer
        policy = ScoreModel.Config(model=config.model, temperature=trainer.temperature).following(trainer)
        for other in (*config.teachers, *filter(None, [config.reward_model])):
            require_same_tokenizer(config.model, other.model)
        if config.reward_model is not None:
            judge = config.reward_model.following(trainer)
            self.reward = launch(RewardModelWorker, "reward", config=judge, algorithm=config.algorithm)
        if config.placement.inference is not None:
            self.inference = launch(InferenceWorker, "inference", config=policy, sync=launch.sync)
        if Need.REF_LOGPROBS in needs:
            begun = policy.model_copy(update={"model": initial_model(launch, config, self.actor)})
            self.reference = launch(ReferenceWorker, "reference", config=begun)
        if Need.TEACHER_LOGPROBS in needs:
            teacher = config.teachers[0].scoring(trainer.temperature).following(trainer)
            self.teacher = launch(TeacherWorker, "teacher", config=teacher)

    def step(self, flow: Flow) -> None:
        answers = flow.sample(self.rollout)  # prompts, as far ahead as the lag allows; episodes with rewards
        batch = flow.select(answers)  # whole groups with advantages, filtered, until the batch is full
        scored = self.scored(flow, batch)  # what the algorithm needs of other models
        flow.update(self.actor, scored)  # gradients chunk by chunk; engines come to version + 1

    def scored(self, flow: Flow, batch: Stream) -> Stream:
        """The batch on its way past them."""
        if self.reward is not None:
            batch = flow.through(self.reward, batch)
        if self.inference is not None:
            batch = flow.through(self.inference, batch, follows=True)
        elif Need.REWARD_LOGPROBS in self.config.needs:
            batch = flow.through(self.actor, batch)
        if self.reference is not None:
            batch = flow.through(self.reference, batch)
        if self.teacher is not None:
            batch = flow.through(self.teacher, batch)
        return batch
