"""Learning from preferences: a reward model (`reward_model`), or the policy itself (`dpo`).

Rows have a prompt, a `chosen` and a `rejected` answer. A reward model's folder goes into an RL recipe as
`reward_model.model.path`; a DPO policy is a model like any other.
"""

from __future__ import annotations

from typing import Any, Literal

from rill.data.pairs import encode_pair
from rill.training.preference import PreferenceTrainer, RewardTrainer, open_loss
from rill.training.score import ScoreModel
from rill.workflows.supervised import Kind, SupervisedConfig, SupervisedWorkflow


def open_policy(config: PreferenceTrainer.Config, *, device: str, **where: Any) -> PreferenceTrainer:
    """Each rank holds the whole reference, the policy as it was before the first step, where the loss needs one."""
    reference = None
    if open_loss(config.loss).needs_reference:
        reference = ScoreModel(ScoreModel.Config(model=config.model).following(config), device=device)
    return PreferenceTrainer(config, reference=reference, device=device, **where)


class RewardModelWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["reward_model"] = "reward_model"
        trainer: RewardTrainer.Config

    kind = Kind(RewardTrainer, encode_pair)


class DPOWorkflow(SupervisedWorkflow):
    class Config(SupervisedConfig):
        workflow: Literal["dpo"] = "dpo"
        trainer: PreferenceTrainer.Config

    kind = Kind(open_policy, encode_pair)
