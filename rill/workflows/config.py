"""The tables of a recipe that several workflows share. Each is read once, by the part named in its docstring."""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rill.config import Config, OneOf, PartConfig
from rill.data.base import Split
from rill.data.curriculum import CurriculumConfig
from rill.data.loader import LoaderConfig
from rill.journal.token_log import JournalConfig
from rill.planning.elastic import ElasticConfig
from rill.telemetry.guards import Guard, default_guards, with_actions
from rill.telemetry.sinks.base import SINKS
from rill.workers.config import HELD_OUT, EvalSamplingConfig, EvalSetConfig, SampledConfig, SyncConfig

Seats = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
"""Device ids of a group, as rill.runtime.device.placement reads them: "0-3", "all", "0-3:0-7"; a bare 0 is "0"."""


MISMATCH_LIMITS = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest mean |log π_trainer − log π_engine| of the same tokens and weights, in nats, by the trainer's precision."""


class RecipeConfig(Config):
    """What every recipe has, whatever its workflow."""

    workflow: str
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Decides the order of the data, sampling and fresh weights; the same seed and plan give the same run."""
    sinks: tuple[Annotated[PartConfig, OneOf(SINKS)], ...] = ()
    """Trackers that get the metrics too, e.g. [{ type = "tensorboard" }]. Empty: the run folder only."""

    guard_actions: dict[str, Literal["off", "warn", "pause", "stop"]] = {}
    """What follows when a guard finds something, by the guard's name, e.g. { "entropy collapse" = "stop" }. Unset: the
    guard's own (docs/telemetry.md)."""
    stop_grace_s: float = Field(0.0, ge=0)
    """Seconds that a step may still take after Ctrl-C or SIGTERM; then the run ends at once, and resumes from its last
    checkpoint. Set it below what a scheduler waits before it kills. 0: as long as it takes."""

    def guards(self) -> list[Guard]:
        """What is watched while the recipe runs."""
        watched = default_guards(max_lag=0, mismatch_limit=MISMATCH_LIMITS["float32"])
        return with_actions(watched, self.guard_actions)


class LoopConfig(Config):
    """[loop]: read by rill.workflows.loop."""

    steps: int = Field(100, ge=1)
    """Training steps of the whole run, resumed parts included."""
    prompts_per_step: int = Field(32, ge=1)
    """Prompts in a batch; each is answered rollout.group_size times."""
    max_lag: int = Field(0, ge=0)
    """Versions that generation may run ahead of training. 0: synchronous. Above 0 set algorithm.correction too, for
    instance to "tis", which weighs tokens of older policies."""
    order: Literal["completion", "admission"] = "completion"
    """Which finished groups make the next batch: the first to finish, or strictly those admitted first. With
    max_lag 0 both are the same batch."""
    overprovision: float = Field(0.0, ge=0, le=1)
    """Groups begun beyond a batch, as a share of it, where max_lag is 0. Once the batch is full the slowest are
    stopped; they keep their tokens and go on, under newer weights, with the next batch. 0: off."""
    max_resumes: int = Field(8, ge=1)
    """With overprovision: a group that was stopped so many times is waited for. Bounds the lag of its oldest tokens."""
    max_refills: int = Field(20, ge=0)
    """Batches' worth of groups that filters may drop while one batch comes together; then the run ends and says why.
    0: no limit but step_timeout_s."""
    interrupt: bool = True
    """New weights interrupt running sequences, which continue under them (partial rollout). Off: engines finish
    what runs before they take new weights. Matters only where max_lag > 0."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps. 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """The newest so many are kept."""
    keep_best: str = ""
    """A metric, such as "eval/accuracy": the checkpoint of the step where it was highest is kept too. Empty: off."""
    step_timeout_s: float = Field(3600.0, gt=0)
    """A step that takes longer is reported as stuck."""
    max_relaunches: int = Field(3, ge=0)
    """Times that each engine may be started again after its process died or it could not take new weights. 0: the
    first such failure ends the run."""

    @property
    def num_extra(self) -> int:
        """Groups begun beyond a batch."""
        return math.ceil(self.overprovision * self.prompts_per_step)

    @property
    def largest_lag(self) -> int:
        """Versions that a token may be behind when it is trained on, where nothing is out of order."""
        return self.max_lag + (self.max_resumes if self.overprovision else 0)

    @model_validator(mode="after")
    def _can_be_stopped(self) -> LoopConfig:
        if self.overprovision and (self.max_lag > 0 or self.order == "admission"):
            raise ValueError(
                f"overprovision = {self.overprovision:g} with max_lag = {self.max_lag} and order = {self.order!r}: "
                "it is for max_lag = 0 and batches by completion; with max_lag > 0 slow groups go on by themselves "
                "while the trainer trains on others"
            )
        return self


class EvalConfig(EvalSamplingConfig):
    """[eval]: the held-out side of the training data, and any number of other sets; read by the controller."""

    every: int = Field(10, ge=0)
    """Steps between evaluations. 0: only before the first and after the last step."""
    sets: tuple[EvalSetConfig, ...] = ()

    def all_sets(self, data: PartConfig) -> dict[str, EvalSetConfig]:
        """Those that have prompts, by name; that of the training data's held-out side is HELD_OUT."""
        found = (*self.own_set(data, Split.HELD_OUT), *self.sets)
        return {each.name: each for each in found if each.num_prompts}

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [each.name for each in self.sets]
        if len(set(names)) < len(names) or HELD_OUT in names:
            raise ValueError(
                f"sets are called {', '.join(names)}: give each a name of its own, not {HELD_OUT!r}"
            )
        return self


class ClusterConfig(Config):
    """[cluster]: where worker processes run."""

    type: Literal["local", "ray"] = "local"
    address: str = "local"
    """Ray only: "local" starts one, "auto" finds one, otherwise its address."""
    devices: Annotated[int, Field(ge=0)] | str = 0
    """Device slots to use, on each node: a number, or so many of each kind ("cuda:2,arm:1"). 0: all that are found."""
    colocate: bool | tuple[str, ...] = False
    """Groups that share devices fit on them together and keep their memory there: nothing is moved out and in
    between turns. Leave room for the others in rollout.engine.kv_memory_fraction. true: all; or these, by name."""
    threads: int = Field(0, ge=0)
    """Threads of each worker process. 0: cores divided by the device slots. Sums in other numbers of threads round
    differently: runs on other placements give the same bits only where this is set to the same number."""

    def threads_on(self, num_devices: int) -> int:
        """Of each worker: sharers of a slot take turns."""
        return self.threads or max(1, (os.cpu_count() or 1) // max(1, num_devices))


class FlowConfig(Config):
    """[flow]: in what chunks samples move between the groups of a step. Part of the plan: no worker's code knows it."""

    granularity: int = Field(0, ge=0)
    """Prompts to a chunk. Groups that have devices of their own work on a chunk as soon as it is finished, so that
    sampling, scoring and training overlap inside a step; those that take turns wait for the whole batch first. With
    other chunks the gradient is the same up to rounding; the same chunks in the same order give the same bits, on any
    placement (loop.order = "admission" fixes the order). 0: the whole batch."""
    edges: dict[str, Annotated[int, Field(ge=0)]] = {}
    """The granularity of single edges, by the group that consumes them, e.g. { reference = 4 }."""

    def granularity_of(self, consumer: str, batch: int) -> int:
        return min(self.edges.get(consumer, self.granularity) or batch, batch)


class PlacementConfig(Config):
    """[placement]: device ids of each group. Groups that name the same devices share them and take turns."""

    rollout: Seats = "all"
    actor: Seats = "all"


class OnlineConfig(RecipeConfig):
    """The tables of every workflow that learns from its own samples, whatever they are samples of."""

    data: PartConfig
    """What to learn from; its held-out side is the evaluation's."""
    loader: LoaderConfig = LoaderConfig()
    curriculum: CurriculumConfig | None = None
    """Draw problems by how well the policy does on their like. Unset: in the loader's order."""
    rollout: SampledConfig
    algorithm: Config
    trainer: Config
    loop: LoopConfig = LoopConfig()
    journal: JournalConfig = JournalConfig()
    elastic: ElasticConfig = ElasticConfig()
    flow: FlowConfig = FlowConfig()
    eval: EvalConfig = EvalConfig()
    sync: SyncConfig = SyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = Field(default_factory=PlacementConfig)

    handed_down = {"loader.seed": "seed", "curriculum.seed": "seed"}

    @property
    def pulling(self) -> tuple[str, ...]:
        """The placements of the groups that take the trainer's weights."""
        return (self.placement.rollout,)

    warm_up_table: ClassVar[str]
    """Of the supervised steps before the first: their number is its `steps`."""

    @property
    def model_name(self) -> str:
        """What a profile says that it was measured with."""
        return self.workflow

    @property
    def keeping_all(self) -> dict[str, Any]:
        """Changes of [algorithm] with which no group is dropped for what it was rewarded."""
        return {}

    @property
    def needs_whole_batch(self) -> bool:
        """Training begins when all of a batch is there: smaller chunks gain nothing."""
        return True

    @property
    def together(self) -> tuple[str, ...]:
        """Groups that stay in memory beside each other on devices that they share."""
        stay = self.cluster.colocate
        return tuple(type(self.placement).model_fields) if stay is True else stay or ()

    def stay(self, *groups: str) -> bool:
        """Whether these need no turns among themselves."""
        return set(groups) <= set(self.together)

    @property
    def reads_gpu(self) -> bool:
        """Engines can read weights where the trainer has them, on a GPU that both stay on."""
        return True

    @model_validator(mode="after")
    def _edges_lead_somewhere(self) -> Self:
        if unknown := set(self.flow.edges) - set(type(self.placement).model_fields) - {"rollout"}:
            known = ", ".join(name for name in type(self.placement).model_fields if name != "rollout")
            raise ValueError(
                f"flow.edges names {', '.join(sorted(unknown))}: groups that consume samples are {known}"
            )
        return self
