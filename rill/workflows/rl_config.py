"""The recipe of a workflow that trains a language model on its own samples.

What is said once (`model`, `seed`, the temperature) is handed to every part that does not name its own; what cannot
run is refused here, with one line, before anything is started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from rill.algorithms import LOSSES, Algorithm, AlgorithmConfig, Need, Scope
from rill.algorithms.fit import check_run
from rill.algorithms.presets import expand
from rill.config import OneOf, PartConfig
from rill.config.base import as_table, value_at
from rill.data.base import DATASETS
from rill.errors import ConfigError
from rill.models.loading import ModelConfig
from rill.telemetry.guards import Guard, default_guards, with_actions
from rill.training.policy import PolicyTrainer
from rill.workers.config import RolloutConfig, WarmStartConfig
from rill.workers.scorers import RewardModelConfig, TeacherConfig
from rill.workflows.config import MISMATCH_LIMITS, OnlineConfig, PlacementConfig, Seats

logger = logging.getLogger(__name__)

QUANTIZED_LIMIT = 0.15
"""As MISMATCH_LIMITS, where the engine samples in 8 bits."""
QUANTIZED_CANARY = 0.5
"""sync.canary_tolerance there: its tokens are random, their log-probabilities far apart, and 8 bits move them more.
It proves less then: that the engine has the weights of about this version, by the right names."""


class ModelPlacementConfig(PlacementConfig):
    """Those of the models beside the policy."""

    inference: Seats | None = None
    """Recomputes log π_old where it is needed before the policy's update. Unset: the actor does it itself."""
    reference: Seats = "all"
    """Used only where the algorithm has a KL term."""
    reward: Seats = "all"
    """Used only with a [reward_model]; a rule or a judge is scored by the environment."""
    teacher: Seats = "all"
    """Used only for distillation on the advantage."""


class RLConfig(OnlineConfig):
    """The tables of the recipes for language models. `model` is handed to every part that does not name its own."""

    model: ModelConfig
    data: Annotated[PartConfig, OneOf(DATASETS)]
    rollout: RolloutConfig
    reward_model: RewardModelConfig | None = None
    """Scores every answer beside the environment's reward, in a group of its own (placement.reward). Unset: none."""
    teachers: tuple[TeacherConfig, ...] = ()
    """What on-policy distillation learns from, for an algorithm that has it. Empty: none."""
    algorithm: AlgorithmConfig
    trainer: PolicyTrainer.Config
    sft: WarmStartConfig = WarmStartConfig()
    placement: ModelPlacementConfig = Field(default_factory=ModelPlacementConfig)

    handed_down = {
        **OnlineConfig.handed_down,
        "model.seed": "seed",
        "rollout.engine.model": "model",
        "trainer.model": "model",
        "trainer.temperature": "rollout.sampling.temperature",
    }
    warm_up_table = "sft"
    provides: ClassVar[frozenset[Need]] = frozenset(Need) - {Need.VALUES}
    """What the workflow's groups can give an algorithm, or the trainer by itself: all but what a critic says."""

    def guards(self) -> list[Guard]:
        limit = QUANTIZED_LIMIT if self.is_quantized else MISMATCH_LIMITS[self.trainer.compute_dtype]
        watched = default_guards(max_lag=self.loop.largest_lag, mismatch_limit=limit)
        return with_actions(watched, self.guard_actions)

    @property
    def pulling(self) -> tuple[str, ...]:
        inference = self.placement.inference
        return (self.placement.rollout, *([] if inference is None else [inference]))

    @property
    def is_quantized(self) -> bool:
        """Whether one of engine and trainer computes with fewer bits than the other."""
        engine: Any = self.rollout.engine
        is_fp8 = getattr(engine, "kv_cache_dtype", "") == "fp8" or self.trainer.fp8
        return is_fp8 or getattr(engine, "quantization", None) not in (None, self.trainer.quantization_aware)

    @property
    def reads_gpu(self) -> bool:
        return self.rollout.engine.type == "native"

    @property
    def model_name(self) -> str:
        shape = self.model.shape
        keys = ("model_type", "num_hidden_layers", "hidden_size")
        return self.model.path or "-".join(str(shape.get(key)) for key in keys)

    @property
    def keeping_all(self) -> dict[str, Any]:
        off = {"drop_equal_rewards": False, "min_mean_reward": None, "max_mean_reward": None}
        return {"filters": self.algorithm.filters.model_copy(update=off)}

    @property
    def needs(self) -> frozenset[Need]:
        return Algorithm(self.algorithm).needs

    @property
    def num_updates(self) -> int:
        """Optimizer steps on a batch."""
        return self.trainer.num_epochs * self.trainer.num_mini_batches

    @property
    def needs_whole_batch(self) -> bool:
        return self.num_updates > 1 or Algorithm(self.algorithm).scope is Scope.BATCH

    @model_validator(mode="before")
    @classmethod
    def _sampled_as_it_is_trained(cls, values: Any) -> Any:
        """The native engine computes in the trainer's precision unless it is given one of its own."""
        if not isinstance(values, dict) or not isinstance(values.get("rollout"), dict):
            return values
        engine, trainer = as_table(values["rollout"].get("engine", {})), values.get("trainer", {})
        is_native = isinstance(engine, dict) and engine.get("type", "native") == "native"
        dtype = trainer.get("compute_dtype", "float32") if isinstance(trainer, dict) else None
        if is_native and str(dtype) in MISMATCH_LIMITS:  # anything else is the trainer's mistake alone
            engine = {"dtype": dtype, **engine}
            values = {**values, "rollout": {**values["rollout"], "engine": engine}}
        return values

    @model_validator(mode="before")
    @classmethod
    def _corrected_where_quantized(cls, values: Any) -> Any:
        """What is sampled with other bits than trained is weighed (tis), unless the recipe names a correction or its
        loss has the ratio. The canary allows for 8 bits, unless the recipe says what; 4 bits are the trainer's too."""
        engine = as_table(value_at(values, "rollout.engine"))
        if not isinstance(engine, dict) or engine.get("type", "native") != "native":
            engine = {}
        is_fp8 = engine.get("kv_cache_dtype") == "fp8" or value_at(values, "trainer.fp8")
        if not (engine.get("quantization") or is_fp8):
            return values
        if engine.get("quantization") == "int4" and isinstance(trainer := values.get("trainer", {}), dict):
            values = {**values, "trainer": {"quantization_aware": "int4", **trainer}}
        elif isinstance(sync := values.get("sync", {}), dict):
            values = {**values, "sync": {"canary_tolerance": QUANTIZED_CANARY, **sync}}
        algorithm = as_table(values.get("algorithm", {}))
        whole = expand(algorithm)
        loss = as_table(whole.get("loss", {})) if isinstance(whole, dict) else None
        if not isinstance(loss, dict) or "correction" in whole or loss.get("type") not in LOSSES:
            return values
        if LOSSES.load(loss["type"]).uses_rollout_ratio:
            return values
        logger.info("fewer bits here or there: algorithm.correction = 'tis', since the recipe names none")
        return {**values, "algorithm": {**algorithm, "correction": {"type": "tis"}}}

    @model_validator(mode="after")
    def _can_run(self) -> Self:
        """Whatever an algorithm needs there is, and nothing is there that it does not use."""
        try:
            check_run(
                Algorithm(self.algorithm),
                workflow=self.workflow,
                provides=self.provides,
                group_size=self.rollout.group_size,
                num_steps=self.num_updates,
                sampling=self.rollout.sampling.params(),
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error
        for refusal in self._refusals():
            raise ValueError(refusal)
        return self

    def _refusals(self) -> Iterator[str]:
        """What does not go together, and what to do about it."""
        needs, algorithm, filters = self.needs, self.algorithm, self.algorithm.filters
        if self.placement.inference is not None:
            if Need.REWARD_LOGPROBS not in needs and self.num_updates == 1:
                yield (
                    "placement.inference has nothing to do: with one optimizer step per batch (trainer.num_epochs and "
                    "trainer.num_mini_batches are 1) the old log-probabilities are the current ones. Leave it unset"
                )
            if Need.ENERGIES in needs:
                yield (
                    f"algorithm {algorithm.type!r} needs more of the policy than log-probabilities, which only the "
                    "actor computes: leave placement.inference unset"
                )
        if self.reward_model is not None:  # unknown where the episodes run
            bounds = (filters.min_mean_reward, filters.max_mean_reward)
            if filters.drop_equal_rewards or bounds != (None, None):
                yield (
                    "[reward_model] scores groups after algorithm.filters has kept or dropped them by their reward: "
                    "leave drop_equal_rewards, min_mean_reward and max_mean_reward unset"
                )
            if Need.GREEDY_BASELINE in needs:
                yield (
                    f"[reward_model] does not score the greedy answer that {algorithm.type!r} compares with: choose "
                    "another algorithm"
                )
        if Need.TEACHER_LOGPROBS in needs and len(self.teachers) != 1:
            yield (
                f"distillation on the advantage follows one teacher, the recipe has {len(self.teachers)} [[teachers]]: "
                "name one or set algorithm.distillation.form = 'full_vocabulary'"
            )
        if Need.FULL_VOCABULARY_TEACHER in needs and not self.teachers:
            yield "distillation over the vocabulary needs [[teachers]]: name at least one"
        if self.teachers and not needs & {Need.TEACHER_LOGPROBS, Need.FULL_VOCABULARY_TEACHER}:
            yield (
                "[[teachers]] have nothing to teach: set algorithm = 'distill', or algorithm.distillation.coefficient"
            )
        sampled, trained = self.rollout.sampling.temperature, self.trainer.temperature
        if sampled == 0:
            yield (
                "rollout.sampling.temperature = 0 would give the same answer to a prompt every time, and nothing to "
                "learn from: set it above 0 (evaluations have a temperature of their own, eval.temperature)"
            )
        if sampled != trained:
            yield (
                f"rollout.sampling.temperature is {sampled} and trainer.temperature is {trained}: the trainer must "
                "recompute log-probabilities at the sampler's temperature; leave trainer.temperature unset"
            )
