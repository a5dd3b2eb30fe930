"""One algorithm, assembled from its parts: what the rollout side, the trainer and the critic call.

    trajectories ──keep──> as_samples ──> advantages ──> TokenBatch ──> policy_loss, value_loss

Owns no process, model or file. State is the KL controller's coefficient, saved with the run. Guarantees: the
losses of the micro-batches of a batch add up to the same gradient however the batch is split (see base), what a
masked token holds never matters, and NaN in a trained token is a TrainingError, never a wrong update.

N token, S sequence, G sample of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rill.algorithms.advantages import ADVANTAGES
from rill.algorithms.advantages.base import (
    AdvantageBatch,
    Advantages,
    GroupAdvantage,
    Scope,
    TokenAdvantage,
    checked_group,
)
from rill.algorithms.advantages.group_statistics import over_episode
from rill.algorithms.aggregation import Aggregation, token_weights
from rill.algorithms.base import LossSum, Metric, Need, Reduce, TokenBatch, one_rank
from rill.algorithms.checks import (
    checked_advantage_batch,
    full_precision,
    require_finite,
    required,
    sanitised,
    zero_unless,
)
from rill.algorithms.corrections import CORRECTIONS
from rill.algorithms.corrections.base import Correction
from rill.algorithms.distill import DistillationConfig, distilled_advantages
from rill.algorithms.estimate import as_samples, fill_advantages
from rill.algorithms.filters import DropReason, FilterConfig, Verdict, group_verdict
from rill.algorithms.kl import KL_CONTROLLERS, FixedKL, KLConfig, kl_penalty
from rill.algorithms.losses import LOSSES
from rill.algorithms.losses.base import PolicyLoss
from rill.algorithms.losses.value import ValueConfig, value_loss
from rill.algorithms.mismatch import mismatch_metrics
from rill.algorithms.presets import expand
from rill.algorithms.segments import last_trained, seq_sum
from rill.config.base import Config, OneOf, PartConfig
from rill.errors import ConfigError, InvalidSampleError
from rill.types import Sample, Trajectory

_SAMPLE_NEEDS = frozenset({Need.VALUES, Need.REF_LOGPROBS, Need.REWARD_LOGPROBS, Need.ENERGIES})
"""What stages between the engines and the trainer write into samples."""


class AlgorithmConfig(Config):
    """What stands under [algorithm]; `algorithm = "dapo"` is short for the preset of that name."""

    type: str = "grpo"
    """A preset of rill.algorithms.presets; every key below overrides it."""
    advantage: Annotated[PartConfig, OneOf(ADVANTAGES)]
    loss: Annotated[PartConfig, OneOf(LOSSES)]
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    aggregation_constant: float = Field(0.0, ge=0)
    """Tokens: the divisor of seq-mean-token-sum-norm, usually max_new_tokens. 0: not set."""
    correction: Annotated[PartConfig, OneOf(CORRECTIONS)] = Field(
        default_factory=lambda: CORRECTIONS.load("none").Config()
    )
    kl: KLConfig = Field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0
    """Times the entropy of each trained position, taken from the loss. 0: off."""
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    filters: FilterConfig = Field(default_factory=FilterConfig)
    value: ValueConfig = Field(default_factory=ValueConfig)
    """The critic's loss; unused without a critic."""
    check_finite: bool = True
    """Look for NaN and infinity in every micro-batch; costs one device synchronisation."""

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, value: Any) -> Any:
        return expand(value)

    @model_validator(mode="after")
    def _constant_is_set(self) -> AlgorithmConfig:
        if self.aggregation is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM and self.aggregation_constant <= 0:
            raise ValueError(f"{self.aggregation} needs aggregation_constant > 0, e.g. max_new_tokens")
        return self


class Algorithm:
    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.advantage: GroupAdvantage | TokenAdvantage = _build(ADVANTAGES, config.advantage)
        self.loss: PolicyLoss = _build(LOSSES, config.loss)
        self.correction: Correction = _build(CORRECTIONS, config.correction)
        controller = KL_CONTROLLERS.load(config.kl.controller.type)
        self.kl_controller: FixedKL = controller(config.kl.controller, config.kl.coefficient)
        if self.loss.uses_rollout_ratio and self.correction.uses_rollout_ratio:
            raise ConfigError(
                f"loss {config.loss.type!r} already holds the ratio to the sampling policy; with correction "
                f"{config.correction.type!r} it would count twice: set algorithm.correction = 'none', or a correction "
                "that only leaves tokens out"
            )
        has_penalty = config.filters.overlong is not None or self._has_kl_in_reward
        if has_penalty and isinstance(self.advantage, TokenAdvantage) and not self.advantage.reads_rewards:
            raise ConfigError(
                f"advantage {config.advantage.type!r} reads the reward's parts alone, and a penalty would be lost: "
                "unset algorithm.filters.overlong, and set algorithm.kl.place = 'loss'"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """What must be computed before the loss."""
        needs = self.advantage.needs | self.loss.needs | self.correction.needs
        if self.config.kl.coefficient > 0:
            needs |= {Need.REF_LOGPROBS}
            if self.config.kl.place == "reward":
                needs |= {Need.REWARD_LOGPROBS}
        if self.config.entropy_coefficient != 0:
            needs |= {Need.ENTROPY}
        if self.config.distillation.coefficient > 0:
            is_full = self.config.distillation.form == "full_vocabulary"
            needs |= {Need.FULL_VOCABULARY_TEACHER if is_full else Need.TEACHER_LOGPROBS}
        return needs

    @property
    def advantage_needs(self) -> frozenset[Need]:
        """What must be in the samples before advantages() is called."""
        needs = self.advantage.needs & _SAMPLE_NEEDS
        return needs | {Need.REF_LOGPROBS, Need.REWARD_LOGPROBS} if self._has_kl_in_reward else needs

    @property
    def scope(self) -> Scope:
        """What must be together in one call of advantages()."""
        return self.advantage.scope

    @property
    def is_group_scoped(self) -> bool:
        """True where advantages() can run as soon as a group is whole, wherever it lies."""
        return self.scope is not Scope.BATCH and not self.advantage_needs

    # --- groups and their advantages ----------------------------------------------------------------------

    def keep(self, trajectories: Sequence[Trajectory], greedy: Sequence[Trajectory] = ()) -> Verdict:
        """Whether to train on a group, and why not. `greedy`: the samples of its prompt's greedy episode."""
        if any(t.error is not None for t in greedy) and not self.config.filters.train_failed:
            return Verdict(DropReason.FAILED)
        return group_verdict(trajectories, self.config.filters, min_samples=self.advantage.min_samples)

    def as_samples(
        self,
        trajectories: Sequence[Trajectory],
        greedy: Sequence[Trajectory] = (),
    ) -> list[Sample]:
        """One sample to each trajectory; advantages() fills them in, here or after what it needs has been computed.

        `greedy` are the samples of their prompt's greedy episode (Need.GREEDY_BASELINE).
        """
        return as_samples(trajectories, self.config.filters, greedy)

    def advantages(
        self,
        samples: Sequence[Sample],
        reduce: Reduce = one_rank,
        keeps: Callable[[int], bool] = lambda num_tokens: True,
    ) -> tuple[list[Sample], dict[str, float]]:
        """The samples with advantages, and returns where there is a critic; and metrics over all ranks.

        `reduce` sums over data-parallel ranks; `keeps`: whether the trainer takes a sample of so many tokens. See
        `scope` and `advantage_needs` for what must be there.
        """
        return fill_advantages(samples, self, reduce, keeps)

    def group_advantages(
        self,
        rewards_G: npt.ArrayLike,
        lengths_G: npt.ArrayLike | None = None,
        greedy_reward: float | None = None,
    ) -> npt.NDArray[np.float64]:
        """The scalars of a group estimator, one to each episode."""
        estimator, name = self.advantage, self.config.advantage.type
        assert isinstance(estimator, GroupAdvantage), f"advantage {name!r} is of tokens"
        if estimator.reads_lengths and lengths_G is None:
            raise InvalidSampleError(
                f"advantage {name!r} weighs samples by their trained tokens: give lengths_G"
            )
        rewards, lengths = checked_group(rewards_G, lengths_G)
        if Need.GREEDY_BASELINE in estimator.needs and (
            greedy_reward is None or not np.isfinite(greedy_reward)
        ):
            raise InvalidSampleError(
                f"advantage {name!r} needs the reward of a greedy answer, got {greedy_reward}"
            )
        return estimator.group(rewards, lengths, greedy_reward)

    def batch_advantages(self, batch: AdvantageBatch, reduce: Reduce = one_rank) -> Advantages:
        """Advantages of every token of one rank; works for every estimator.

        `reduce` sums a tensor over data-parallel ranks. Groups must be whole on a rank.
        """
        batch = checked_advantage_batch(batch)
        rewards_N, penalty_S, metrics = self._rewards(batch)
        if isinstance(self.advantage, TokenAdvantage):
            batch = replace(batch, rewards_S=batch.rewards_S - penalty_S)
            result = self.advantage.tokens(batch, rewards_N, reduce)
        else:
            result = self._group_by_group(self.advantage, batch, penalty_S)
        return replace(result, metrics={**metrics, **result.metrics})

    # --- losses, on the trainer's side --------------------------------------------------------------------

    def policy_loss(self, batch: TokenBatch) -> LossSum:
        """This micro-batch's share of: correction · policy loss + β·KL − c·entropy + λ·KL(teacher), and its metrics.

        Tokens that a correction takes out of the denominator are out of every term."""
        batch = self._checked_batch(batch)
        weights = self.correction.weights(batch)
        low, high = self.correction.bounds
        metrics: dict[str, Metric] = {}
        if batch.knows_old:
            metrics = mismatch_metrics(
                batch.old_logprobs_N, batch.rollout_logprobs_N, batch.mask_N, low=low, high=high
            )
        token_loss = self.loss(batch)
        loss_N = weights.weights_N * token_loss.loss_N
        metrics |= weights.metrics | token_loss.metrics
        loss_N = self._with_regularisers(loss_N, batch, metrics)
        mask_N = batch.mask_N if weights.kept_N is None else batch.mask_N * weights.kept_N
        weights_N, denominator = token_weights(
            self.config.aggregation,
            mask_N,
            batch.seq_N,
            batch.num_seqs,
            constant=self.config.aggregation_constant,
        )
        numerator = (weights_N * loss_N).sum()
        if self.config.aggregation is Aggregation.TOKEN_SUM:  # a sum has no weight to report a mean by
            metrics["policy/loss"] = Metric.mean(loss_N, mask_N)
        else:
            metrics["policy/loss"] = Metric(total=numerator.detach(), weight=denominator.detach())
        return LossSum(numerator=numerator, denominator=denominator, metrics=metrics)

    def value_loss(self, batch: TokenBatch) -> LossSum:
        """This micro-batch's share of the critic's loss, always a mean over tokens."""
        values_N, old_N = required(batch, "values_N"), required(batch, "old_values_N")
        returns_N, mask_N = required(batch, "returns_N"), batch.mask_N
        is_on_N = mask_N > 0
        values_N, old_N, returns_N = (
            zero_unless(is_on_N, full_precision(x)) for x in (values_N, old_N, returns_N)
        )
        if self.config.check_finite:
            require_finite({"values": values_N, "old_values": old_N, "returns": returns_N})
        loss_N, clipped_N = value_loss(values_N, old_N, returns_N, clip=self.config.value.clip)
        mask_N = mask_N.to(loss_N.dtype)
        metrics = {
            "value/clipped": Metric.mean(clipped_N.to(mask_N.dtype), mask_N),
            "value/mean": Metric.mean(values_N, mask_N),
            "value/error": Metric.mean((values_N - returns_N).abs(), mask_N),
        }
        numerator = self.config.value.coefficient * (loss_N * mask_N).sum()
        metrics["value/loss"] = Metric.mean(loss_N, mask_N)
        return LossSum(numerator=numerator, denominator=mask_N.sum(), metrics=metrics)

    def statistics(self, batches: Sequence[TokenBatch], reduce: Reduce = one_rank) -> dict[str, Tensor]:
        """Figures over all micro-batches and ranks for TokenBatch.statistics; empty unless Need.STATISTICS."""
        if Need.STATISTICS not in self.needs:
            return {}
        checked = [self._checked_batch(batch) for batch in batches]
        with torch.no_grad():
            return {**self.correction.statistics(checked, reduce), **self.loss.statistics(checked, reduce)}

    def observe(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Tell the KL controller how far the policy is from the reference, after a step on `num_samples`.

        `metrics` are reduced over ranks, so that all ranks keep the same coefficient; without policy/kl_ref in
        them nothing changes.
        """
        if self.config.kl.coefficient > 0 and "policy/kl_ref" in metrics:
            self.kl_controller.update(metrics["policy/kl_ref"], num_samples)

    # --- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"kl": self.kl_controller.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_controller.load_state_dict(state["kl"])

    # --- inside -------------------------------------------------------------------------------------------

    def _group_by_group(
        self, estimator: GroupAdvantage, batch: AdvantageBatch, penalty_S: Tensor
    ) -> Advantages:
        if batch.group_S is None:
            raise InvalidSampleError(f"advantage {self.config.advantage.type!r} needs group_S")
        lengths_S = batch.lengths_S
        if lengths_S is None:
            lengths_S = seq_sum(batch.mask_N, batch.seq_N, batch.num_seqs)
        rewards, penalty, lengths = (
            x.double().cpu().numpy() for x in (batch.rewards_S, penalty_S, lengths_S)
        )
        groups = batch.group_S.cpu().numpy()
        episodes = np.arange(batch.num_seqs) if batch.episode_S is None else batch.episode_S.cpu().numpy()
        advantages_S = np.zeros(batch.num_seqs)
        for group in np.unique(groups):
            members = np.flatnonzero(groups == group)
            if not lengths[members].any():  # another model's, say: nothing to weigh
                continue
            greedy = None if batch.greedy_rewards_S is None else float(batch.greedy_rewards_S[members[0]])
            _, first, number = np.unique(episodes[members], return_index=True, return_inverse=True)
            of_episode = (rewards - penalty)[members][first]
            length = np.bincount(number, lengths[members], len(first))
            advantages_S[members] = self.group_advantages(of_episode, length, greedy)[number]
        on_device_S = torch.from_numpy(advantages_S).to(batch.mask_N)
        return Advantages(
            advantages_N=on_device_S[batch.seq_N] * batch.mask_N,
            left_out_S=on_device_S == 0 if estimator.drops_zeros else None,
        )

    @property
    def _has_kl_in_reward(self) -> bool:
        return self.config.kl.coefficient > 0 and self.config.kl.place == "reward"

    def _rewards(self, batch: AdvantageBatch) -> tuple[Tensor, Tensor, dict[str, Metric]]:
        """(r_N, P_S): r_t = the reward given at t − β·KL_t, a reward without a place at the last trained token; and
        the sum of β·KL over the sequences of each one's episode.

        A sequence without trained tokens has no place for R in r_N and still counts in its group's baseline.
        """
        if batch.token_rewards_N is not None:
            rewards_N = batch.token_rewards_N
        else:
            last_S = last_trained(batch.mask_N, batch.seq_N, batch.num_seqs)
            place_S = last_S >= 0
            rewards_N = torch.zeros_like(batch.mask_N).index_put((last_S[place_S],), batch.rewards_S[place_S])
        metrics: dict[str, Metric] = {}
        penalty_N = torch.zeros_like(batch.mask_N)
        if self._has_kl_in_reward:
            logprobs_N, ref_N = required(batch, "logprobs_N"), required(batch, "ref_logprobs_N")
            kl_N = kl_penalty(logprobs_N, ref_N, self.config.kl.estimator).detach() * batch.mask_N
            metrics["policy/kl_ref"] = Metric.mean(kl_N, batch.mask_N)
            penalty_N = self.kl_controller.coefficient * kl_N
        penalty_S = over_episode(batch, seq_sum(penalty_N, batch.seq_N, batch.num_seqs))
        return rewards_N - penalty_N, penalty_S, metrics

    def _with_regularisers(self, loss_N: Tensor, batch: TokenBatch, metrics: dict[str, Metric]) -> Tensor:
        kl = self.config.kl
        if kl.coefficient > 0 and kl.place == "loss":
            kl_N = kl_penalty(batch.logprobs_N, required(batch, "ref_logprobs_N"), kl.estimator)
            metrics["policy/kl_ref"] = Metric.mean(kl_N, batch.mask_N)
            loss_N = loss_N + self.kl_controller.coefficient * kl_N
        if batch.entropy_N is not None:
            metrics["policy/entropy"] = Metric.mean(batch.entropy_N, batch.mask_N)
        if self.config.entropy_coefficient != 0:
            loss_N = loss_N - self.config.entropy_coefficient * required(batch, "entropy_N")
        if Need.FULL_VOCABULARY_TEACHER in self.needs:
            teacher_kl_N = required(batch, "teacher_kl_N")
            metrics["distillation/kl"] = Metric.mean(teacher_kl_N, batch.mask_N)
            loss_N = loss_N + self.config.distillation.coefficient * teacher_kl_N
        return loss_N

    def _checked_batch(self, batch: TokenBatch) -> TokenBatch:
        """The batch with every field in full precision, 0 where masked, distilled advantages, checked."""
        clean = sanitised(batch, check_finite=self.config.check_finite)
        distillation = self.config.distillation
        if distillation.coefficient > 0 and distillation.form == "advantage":
            clean = replace(
                clean,
                advantages_N=distilled_advantages(
                    clean.advantages_N,
                    clean.old_logprobs_N,
                    required(clean, "teacher_logprobs_N"),
                    distillation.coefficient,
                ),
            )
        return clean


def _build(registry: Any, config: PartConfig) -> Any:
    return registry.load(config.type)(config)
