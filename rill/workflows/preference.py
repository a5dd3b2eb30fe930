"""Learning from preferences: a reward model (`reward_model`), or the policy itself (`dpo`).

Rows have a prompt, a `chosen` and a `rejected` answer. A reward model's folder goes into an RL recipe as
`reward_model.model.path`; a DPO policy is a model like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rill.data.pairs import PairExample, encode_pair
from rill.data.sft import SFTExample
from rill.training.engine_config import EngineConfig
from rill.training.preference import (
    Answer,
    PairTrainer,
    PreferencePair,
    PreferenceTrainer,
    RewardTrainer,
    answer_sequence,
)
from rill.training.score import ScoreModel
from rill.types import Prompt
from rill.workflows.scorers import rendezvous_of
from rill.workflows.supervised import SupervisedConfig, SupervisedWorker, SupervisedWorkflow


class PairWorker(SupervisedWorker):
    trainer: PairTrainer

    def _update(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        return self.trainer.update(self._pairs(prompts))

    def _evaluate(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        return self.trainer.evaluate(self._pairs(prompts))

    def _pairs(self, prompts: Sequence[Prompt]) -> list[PreferencePair]:
        return [_pair(encode_pair(self.encoder, prompt)) for prompt in prompts]


class RewardModelWorker(PairWorker):
    def _open_trainer(self, config: EngineConfig) -> RewardTrainer:
        assert isinstance(config, RewardTrainer.Config)
        return RewardTrainer(config, rendezvous=rendezvous_of(self), device=self.device)


class DPOWorker(PairWorker):
    """Each rank holds the whole reference, the policy as it was before the first step."""

    def _open_trainer(self, config: EngineConfig) -> PreferenceTrainer:
        assert isinstance(config, PreferenceTrainer.Config)
        self.reference = ScoreModel(
            ScoreModel.Config(
                model=config.model,
                dtype=config.compute_dtype,
                micro_batch_tokens=config.micro_batch_tokens,
                compile=config.compile,
            ),
            device=self.device,
        )
        return PreferenceTrainer(config, rendezvous=rendezvous_of(self), device=self.device)

    def _pairs(self, prompts: Sequence[Prompt]) -> list[PreferencePair]:
        pairs = super()._pairs(prompts)
        # Those that the trainer will leave out need no reference, which could not hold them either.
        kept = [i for i, pair in enumerate(pairs) if self.trainer.keeps(pair.num_tokens)]
        answers = [answer for i in kept for answer in (pairs[i].chosen, pairs[i].rejected)]
        scored = self.reference.logprobs_of([answer_sequence(answer) for answer in answers])
        filled = iter([replace(a, ref_logprobs=s) for a, s in zip(answers, scored, strict=True)])
        for i in kept:
            pairs[i] = replace(pairs[i], chosen=next(filled), rejected=next(filled))
        return pairs


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


def _pair(example: PairExample) -> PreferencePair:
    return PreferencePair(
        id=example.id,
        chosen=_answer(example.chosen),
        rejected=_answer(example.rejected),
        margin=example.margin,
    )


def _answer(example: SFTExample) -> Answer:
    return Answer(token_ids=example.token_ids, loss_mask=example.loss_mask)
