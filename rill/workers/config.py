"""The tables of a recipe that workers read: how prompts are answered, evaluations ask, and weights travel."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from rill.config import Config, OneOf, PartConfig
from rill.config.base import as_table
from rill.data.base import DATASETS, Split
from rill.envs.base import ENVIRONMENTS
from rill.inference.base import ENGINES
from rill.types import SamplingParams
from rill.weights.base import TRANSPORTS

HELD_OUT = "held_out"
"""The evaluation on the training data's held-out side; its metrics are eval/… without a name."""


def native_unless_named(engine: Any) -> Any:
    table = as_table(engine)
    return {"type": "native", **table} if isinstance(table, dict) else engine


class SamplingConfig(Config):
    """[rollout.sampling]: how completions are sampled."""

    max_new_tokens: int = Field(256, ge=1)
    """Tokens."""
    temperature: float = Field(1.0, ge=0)
    """0: greedy."""
    top_k: int = Field(0, ge=0)
    """0: off."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """0: off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. Empty: off."""

    def params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{**self.model_dump(), **changes})


class SampledConfig(Config):
    """[rollout]: what every kind has."""

    group_size: int = Field(8, ge=1)
    """Samples per prompt."""


class RolloutConfig(SampledConfig):
    """[rollout]"""

    engine: Annotated[PartConfig, OneOf(ENGINES), BeforeValidator(native_unless_named)]
    """The inference engine. Its model is the recipe's unless it names its own."""
    env: Annotated[PartConfig, OneOf(ENVIRONMENTS)]
    """What a prompt is put through, rewards included."""
    env_workers: int = Field(0, ge=0)
    """Processes that run environments and rewards, apart from the engines. 0: inside the engines' processes."""
    sampling: SamplingConfig = SamplingConfig()
    max_concurrent: int = Field(1024, ge=1)
    """Samples in flight on one engine; further tasks wait where other engines can take them."""
    log_groups: int = Field(4, ge=0)
    """Groups per step and process, and prompts of an evaluation set, whose text is kept for the viewer. 0: off."""


class EvalSamplingConfig(Config):
    """How an evaluation asks."""

    num_prompts: int = Field(128, ge=0)
    """The first of them. 0: none."""
    samples: int = Field(1, ge=1)
    """Completions per prompt; pass@k is reported for k up to this."""
    temperature: float = Field(0.0, ge=0)
    """0: greedy, which with samples > 1 makes no sense and is refused."""
    top_p: float = Field(1.0, gt=0, le=1)
    """1: off."""
    max_new_tokens: int = Field(0, ge=0)
    """0: as in training."""

    def params(self, training: SamplingConfig) -> SamplingParams:
        """How it samples, where training samples so."""
        limit = self.max_new_tokens or training.max_new_tokens
        return training.params(temperature=self.temperature, top_p=self.top_p, max_new_tokens=limit)

    def own_set(self, data: PartConfig, split: Split) -> list[EvalSetConfig]:
        """The evaluation on the training data, unless there is none."""
        own = self.model_dump(include=set(EvalSamplingConfig.model_fields))
        return [EvalSetConfig(name=HELD_OUT, data=data, split=split, **own)] if self.num_prompts else []

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples = {self.samples} with temperature = 0 would draw the same answer every time: set a "
                "temperature, or samples = 1"
            )
        return self


class EvalSetConfig(EvalSamplingConfig):
    """[[eval.sets]]: a data set that is only evaluated on."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Its metrics are eval/<name>/…"""
    data: Annotated[PartConfig, OneOf(DATASETS)]
    split: Split = Split.TRAIN
    """"train": all of its rows but those it holds out, if it does; "held_out": those."""
    env: Annotated[PartConfig, OneOf(ENVIRONMENTS)] | None = None
    """Unset: as in training."""


class SyncConfig(Config):
    """[sync]: how trained weights reach the engines; read by rill.weights.publishing and the workers at both ends."""

    transport: Annotated[PartConfig, OneOf(TRANSPORTS)] = Field(
        default_factory=lambda: TRANSPORTS.load("auto").Config()
    )
    """How the bytes travel. auto: by placement: tcp between machines, cuda_ipc on one GPU that all share and stay on
    (cluster.colocate), otherwise shm."""
    canary: bool = True
    """After each sync compare engine and trainer log-probabilities on fixed tokens."""
    canary_tolerance: float = Field(0.0, ge=0)
    """Largest mean difference allowed, in nats. 0: chosen by the precision of the weights."""
    timeout_s: float = Field(300.0, gt=0)
    """An engine that has not taken new weights by then is out of service until it has."""


class WarmStartConfig(Config):
    """[sft]: supervised steps before the first RL step, on the same trainer. 0 steps: off."""

    steps: int = Field(0, ge=0)
    data: Annotated[PartConfig, OneOf(DATASETS)] | None = None
    """What is imitated, where the run's own data has no written answers. Unset: the run's own."""
    batch_size: int = Field(64, ge=1)
    """Examples per step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Of these steps; RL uses the trainer's own."""
