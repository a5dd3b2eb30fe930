"""Learning from preferences: a reward model (`reward_model`), or the policy itself (`dpo`).

Rows have a prompt, a `chosen` and a `rejected` answer. A reward model's folder goes into an RL recipe as
`reward_model.model.path`; a DPO policy is a model like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rill.data.pairs import PreferencePair, encode_pair
from rill.training.engine_config import EngineConfig
from rill.training.preference import PreferenceTrainer, RewardTrainer, open_loss
from rill.training.score import ScoreModel
from rill.types import Prompt
from rill.workflows.scorers import rendezvous_of
from rill.workflows.supervised import SupervisedConfig, SupervisedWorker, SupervisedWorkflow


class PairWorker(SupervisedWorker):
    def _examples(self, rows: Sequence[Prompt]) -> list[PreferencePair]:
        return [encode_pair(self.encoder, row) for row in rows]


class RewardModelWorker(PairWorker):
    def _open_trainer(self, config: EngineConfig) -> RewardTrainer:
        assert isinstance(config, RewardTrainer.Config)
        return RewardTrainer(config, rendezvous=rendezvous_of(self), device=self.device)


class DPOWorker(PairWorker):
    """Each rank holds the whole reference, the policy as it was before the first step, where the loss needs one."""

    def _open_trainer(self, config: EngineConfig) -> PreferenceTrainer:
        assert isinstance(config, PreferenceTrainer.Config)
        reference = None
        if open_loss(config.loss).needs_reference:
            reference = ScoreModel(
                ScoreModel.Config(model=config.model).following(config), device=self.device
            )
        return PreferenceTrainer(
            config, reference=reference, rendezvous=rendezvous_of(self), device=self.device
        )


class RewardModelWorkflow(SupervisedWorkflow):
    worker = RewardModelWorker

    class Config(SupervisedConfig):
        workflow: Literal["reward_model"] = "reward_model"
        trainer: RewardTrainer.Config


class DPOWorkflow(SupervisedWorkflow):
    worker = DPOWorker

    class Config(SupervisedConfig):
        workflow: Literal["dpo"] = "dpo"
        trainer: PreferenceTrainer.Config
