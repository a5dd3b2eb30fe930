"""What every RL workflow needs before its loop can start: its recipe's shared tables, a cluster, prompts, channels.

A workflow's own file then only says who produces what and who consumes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, TypeVar

from pydantic import model_validator

from rill.algorithms import Algorithm, AlgorithmConfig, Need
from rill.config import OneOf, PartConfig
from rill.data.base import DATASETS, Split, open_indexed, prompts_of
from rill.data.curriculum import CurriculumConfig
from rill.data.loader import LoaderConfig
from rill.errors import PlanError
from rill.models.loading import ModelConfig, model_folder
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.runtime.placement import resolve
from rill.runtime.worker import Worker
from rill.telemetry.guards import Guard, default_guards
from rill.telemetry.run import Run
from rill.training.policy import PolicyTrainer
from rill.training.score import ScoreModel
from rill.types import Prompt
from rill.weights import SealedManifest, seated
from rill.workflows.actor import ActorWorker
from rill.workflows.checkpoints import RunCheckpoints, whole_checkpoints
from rill.workflows.evaluation import Evaluator
from rill.workflows.feeder import Feeder, PromptPlan
from rill.workflows.fleet import Fleet, Flow
from rill.workflows.jobs import TrainedStep
from rill.workflows.loop import Loop, Observer, Parts, TrainStep
from rill.workflows.reward_model import RewardModelConfig, RewardModelWorker
from rill.workflows.rollout import RolloutConfig, RolloutWorker
from rill.workflows.sections import (
    MISMATCH_LIMITS,
    ClusterConfig,
    EvalConfig,
    LoopConfig,
    RecipeConfig,
    SyncConfig,
    WarmupConfig,
    as_table,
)
from rill.workflows.stage_chain import Stage, StageChain
from rill.workflows.stages import InferenceWorker, ReferenceWorker, TeacherWorker
from rill.workflows.teachers import TeacherConfig, check_teachers, scoring_config
from rill.workflows.warmup import warm_up
from rill.workflows.weight_route import routed

W = TypeVar("W", bound=Worker)

MAX_JOBS = 1_000_000
PRELOAD = (
    "rill.workflows.rollout",
    "rill.workflows.actor",
    "rill.workflows.feeder",
    "rill.models.loading",
    "transformers",
)
"""Imported once, by the process that workers are forked from: seconds for every worker after the first."""
NEVER_S = 1e9
"""Engines wait for jobs and the feeder for outcomes as long as the run lasts; the loop holds the deadline of a step."""


class RLConfig(RecipeConfig):
    """The tables that all RL recipes have. `model` is handed to every part that does not name its own."""

    model: ModelConfig
    data: Annotated[PartConfig, OneOf(DATASETS)]
    """Problems to learn from; its held-out side is the evaluation's."""
    loader: LoaderConfig = LoaderConfig()
    curriculum: CurriculumConfig | None = None
    """Draw problems by how well the policy does on their like. Unset: in the loader's order."""
    rollout: RolloutConfig
    reward_model: RewardModelConfig | None = None
    """Scores every answer beside the environment's reward, in a group of its own (placement.reward). Unset: none."""
    teachers: tuple[TeacherConfig, ...] = ()
    """What on-policy distillation learns from, for an algorithm that has it. Empty: none."""
    algorithm: AlgorithmConfig
    trainer: PolicyTrainer.Config
    loop: LoopConfig = LoopConfig()
    eval: EvalConfig = EvalConfig()
    sync: SyncConfig = SyncConfig()
    warmup: WarmupConfig = WarmupConfig()
    cluster: ClusterConfig = ClusterConfig()

    handed_down = {
        "model.seed": "seed",
        "loader.seed": "seed",
        "curriculum.seed": "seed",
        "rollout.engine.model": "model",
        "trainer.model": "model",
        "rollout.engine.dtype": "trainer.compute_dtype",
        "trainer.temperature": "rollout.sampling.temperature",
    }

    def guards(self) -> list[Guard]:
        limit = MISMATCH_LIMITS[self.trainer.compute_dtype]
        return default_guards(max_lag=self.loop.largest_lag, mismatch_limit=limit)

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, values: Any) -> Any:
        """Fill what is said once at the top into the parts that need it."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        model, seed = values.get("model"), values.get("seed")
        if isinstance(model, dict) and seed is not None:
            model = values["model"] = {"seed": seed, **model}
        rollout = values["rollout"] = as_table(values.get("rollout", {}))
        engine = rollout["engine"] = {"type": "native", **as_table(rollout.get("engine", {}))}
        trainer = values["trainer"] = as_table(values.get("trainer", {}))
        if model is not None:
            engine.setdefault("model", model)
            trainer.setdefault("model", model)
        if engine.get("type", "native") == "native":
            engine.setdefault("dtype", trainer.get("compute_dtype", "float32"))  # sampled as it is trained
        sampling = rollout.get("sampling")
        if isinstance(sampling, dict) and sampling.get("temperature"):
            trainer.setdefault("temperature", sampling["temperature"])
        if seed is not None:
            values["loader"] = {"seed": seed, **as_table(values.get("loader", {}))}
            if values.get("curriculum") is not None:
                values["curriculum"] = {"seed": seed, **as_table(values["curriculum"])}
        return values

    @model_validator(mode="after")
    def _scores_come_in_time(self) -> RLConfig:
        """What is decided in the rollout worker does not know the reward model's scores yet."""
        if self.reward_model is None:
            return self
        filters = self.algorithm.filters
        if (
            filters.drop_equal_rewards
            or filters.min_mean_reward is not None
            or filters.max_mean_reward is not None
        ):
            raise ValueError(
                "[reward_model] scores groups after algorithm.filters has kept or dropped them by their reward: leave "
                "drop_equal_rewards, min_mean_reward and max_mean_reward unset"
            )
        if Need.GREEDY_BASELINE in Algorithm(self.algorithm).needs:
            raise ValueError(
                f"[reward_model] does not score the greedy answer that {self.algorithm.type!r} compares with: choose "
                "another algorithm"
            )
        return self

    @model_validator(mode="after")
    def _teachers_teach(self) -> RLConfig:
        check_teachers(self.teachers, self.algorithm)
        return self

    @model_validator(mode="after")
    def _temperatures_agree(self) -> RLConfig:
        sampled, trained = self.rollout.sampling.temperature, self.trainer.temperature
        if sampled == 0:
            raise ValueError(
                "rollout.sampling.temperature = 0 would give the same answer to a prompt every time, and nothing to "
                "learn from: set it above 0 (evaluations have a temperature of their own, eval.temperature)"
            )
        if sampled != trained:
            raise ValueError(
                f"rollout.sampling.temperature is {sampled} and trainer.temperature is {trained}: the trainer must "
                "recompute log-probabilities at the sampler's temperature; leave trainer.temperature unset"
            )
        return self


def open_cluster(config: ClusterConfig, run: Run) -> Cluster:
    devices = config.devices or "auto"
    if config.type == "ray":
        return Cluster.ray(config.address, devices=devices, trace_dir=run.path, log_dir=run.path / "logs")
    return Cluster(devices=devices, preload=PRELOAD, trace_dir=run.path, log_dir=run.path / "logs")


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of figures by name, over the ranks of a group."""
    if len(rows) == 1:
        return dict(rows[0])
    return {name: fmean(row[name] for row in rows) for name in (rows[0] if rows else ())}


def threads_of(config: ClusterConfig, cluster: Cluster) -> int:
    """Threads of each worker: the cores divided among the device slots, since sharers of a slot take turns."""
    return config.threads or max(1, (os.cpu_count() or 1) // max(1, len(cluster.devices)))


class RLSetup:
    """The groups and channels that every RL workflow has, and the loop around its training step.

    Calls, in order: `launch_policy`, `initial_model` and `launch` where the workflow has more models, `run_loop`.
    """

    rollout: WorkerGroup[RolloutWorker]
    actor: WorkerGroup[ActorWorker]
    feeder: WorkerGroup[Feeder]
    sync: SyncConfig

    def __init__(self, config: RLConfig, run: Run, cluster: Cluster, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.cluster = cluster
        self.observers = observers
        # Bounded, so that engines do not read ahead: a job waits where any engine with room can take it.
        self.jobs = Channel.create(cluster, "jobs", capacity_items=MAX_JOBS, timeout_s=NEVER_S)
        self.rollouts = self.channel("rollouts")
        self.outcomes = Channel.create(cluster, "outcomes", timeout_s=NEVER_S)
        self._launched: list[str] = []
        self._fleet: Fleet | None = None
        self._is_warm = bool(whole_checkpoints(run))
        if config.model.path and config.cluster.type == "local":
            # Here, where a wrong path is one line and not a worker's traceback.
            model_folder(config.model.path)
        self._held_out = self._read_held_out()  # so is data that has none

    def launch(self, worker: type[W], name: str, placement: str, **init_kwargs: Any) -> WorkerGroup[W]:
        """Start a group; it is ready when this returns."""
        group = worker.launch_async(
            self.cluster, name=name, placement=placement, threads=self._threads, **init_kwargs
        )
        group.ready(self.config.loop.step_timeout_s)
        self._launched.append(name)
        return group

    def launch_policy(self, rollout: str, actor: str, inference: str | None = None) -> None:
        """The feeder, the engines and the trainer of the policy, side by side. `inference`: where another group that
        follows the weights is going to be."""
        config = self.config
        self._check_ahead(rollout, actor)
        self.sync = routed(
            config.sync,
            self.cluster.devices,
            actor=actor,
            pulling=(rollout, inference),
            stay_on_gpu=config.cluster.resident and config.rollout.engine.type == "native",
        )
        self.feeder = Feeder.launch_async(
            self.cluster,
            name="feeder",
            placement=[self.cluster.devices[0].id],
            threads=1,
            prompts=PromptPlan(data=config.data, loader=config.loader, curriculum=config.curriculum),
            config=config.loop,
            group_size=config.rollout.group_size,
        )
        self.rollout = RolloutWorker.launch_async(
            self.cluster,
            name="rollout",
            placement=rollout,
            threads=self._threads,
            config=config.rollout,
            algorithm=config.algorithm,
            model=config.model,
            sync=self.sync,
            seed=config.seed,
            run_dir=str(self.folder.path.resolve()),
        )
        transport = seated(self.sync.transport, rank=0, num_receivers=self.rollout.size)
        self.actor = self.launch(
            ActorWorker,
            "actor",
            actor,
            config=config.trainer,
            algorithm=config.algorithm,
            sync=self.sync.model_copy(update={"transport": transport}),
            teachers=config.teachers,
        )
        self.rollout.ready(config.loop.step_timeout_s)

    def initial_model(self) -> ModelConfig:
        """The policy as RL begins: the recipe's model, or what the warm-up made of it, kept in the run folder."""
        if self.config.warmup.steps == 0:
            return self.config.model
        folder = self.folder.path.resolve() / "initial_model"
        if not (folder / "config.json").exists():
            self._warm_up()
            self.wait(self.actor.export(str(folder)))
        return ModelConfig(path=str(folder), tokenizer=self.config.model.tokenizer)

    def launch_reference(self, placement: str) -> Stage:
        """A frozen copy of the policy as RL begins."""
        trainer = self.config.trainer
        model = ScoreModel.Config(model=self.initial_model(), temperature=trainer.temperature)
        model = model.following(trainer)
        return self.launch(ReferenceWorker, "reference", placement, config=model).score

    def launch_teacher(self, placement: str) -> Stage:
        """The teacher of distillation on the advantage."""
        (teacher,) = self.config.teachers
        model = scoring_config(teacher, self.config.trainer.temperature).following(self.config.trainer)
        return self.launch(TeacherWorker, "teacher", placement, config=model).score

    def launch_reward(self, placement: str) -> Stage:
        """The reward model."""
        config = self.config
        group = self.launch(
            RewardModelWorker,
            "reward",
            placement,
            config=config.reward_model and config.reward_model.following(config.trainer),
            algorithm=config.algorithm,
        )
        return group.score

    def launch_inference(self, placement: str) -> Stage:
        """A group that recomputes the policy's log-probabilities in place of the trainer, as the trainer would."""
        trainer = self.config.trainer
        model = ScoreModel.Config(model=self.config.model, temperature=trainer.temperature).following(trainer)
        group = self.launch(InferenceWorker, "inference", placement, config=model, sync=self.sync)
        return lambda source, target, plan: group.score(source, target, plan, self._manifest())

    def chain(self, stages: Mapping[str, Stage]) -> StageChain:
        """What every sample passes on its way from the engines, by the name of the channel behind each stage."""
        return StageChain(self.rollouts, [(stage, self.channel(name)) for name, stage in stages.items()])

    def channel(self, name: str) -> Channel:
        """For samples on their way to the trainer: whoever waits for them waits as long as a step may last."""
        return Channel.create(self.cluster, name, timeout_s=self.config.loop.step_timeout_s)

    def wait(self, *calls: Handle) -> dict[str, float]:
        """The figures of all calls together, each the mean of what the group's ranks return."""
        figures: dict[str, float] = {}
        for call in calls:
            figures |= mean_of([row for row in call.wait(timeout_s=self.config.loop.step_timeout_s) if row])
        return figures

    def step(self, train: Handle, *others: Handle) -> TrainedStep:
        """A training step: what the actor's `train` gives, with the figures of the calls beside it."""
        figures = self.wait(*others)
        ranks: list[TrainedStep] = train.wait(timeout_s=self.config.loop.step_timeout_s)
        return ranks[0]._replace(figures={**figures, **mean_of([rank.figures for rank in ranks])})

    def run_loop(self, train_step: TrainStep, trained: Mapping[str, WorkerGroup[Any]]) -> None:
        """Warm up or resume, train to the last step, leave the model in the run folder."""
        config, timeout_s = self.config, self.config.loop.step_timeout_s
        if config.cluster.resident:
            self.cluster.coreside("rollout", *self._launched)
        self._warm_up()
        self.feeder.ready(timeout_s)
        flow = Flow(jobs=self.jobs, rollouts=self.rollouts, outcomes=self.outcomes)
        fleet = self._fleet = Fleet(self.rollout, self.actor, flow, config.sync, config.loop)
        groups = {**trained, "feeder": self.feeder}
        parts = Parts(
            fleet=fleet,
            feeder=self.feeder,
            flow=flow,
            train_step=train_step,
            evaluator=Evaluator(config.eval, fleet, self._held_out, timeout_s),
            checkpoints=RunCheckpoints(self.folder, groups, config.loop.keep_checkpoints, timeout_s),
        )
        loop = Loop(config.loop, parts, self.observers)
        loop.restore()
        loop.run()
        self.wait(self.actor.export(str(self.folder.path.resolve() / "model")))

    def _manifest(self) -> SealedManifest:
        """Where the newest weights are, for a group that follows the policy. Only while the loop runs."""
        assert self._fleet is not None
        return self._fleet.manifest()

    def _check_ahead(self, rollout: str, actor: str) -> None:
        """Engines that run ahead hold their devices for the whole run: a trainer that shares them never gets a turn."""
        if self.config.loop.max_lag == 0 or self.config.cluster.resident:
            return
        seats = [resolve(placement, self.cluster.devices) for placement in (rollout, actor)]
        engines, trainers = ({d.id for seat in group for d in seat.devices} for group in seats)
        if engines & trainers:
            raise PlanError(
                f"loop.max_lag = {self.config.loop.max_lag} lets engines sample while the trainer trains, but both are "
                f"placed on devices {sorted(engines & trainers)}: place them apart (cluster.devices=2 "
                "placement.rollout=0 placement.actor=1), keep both in memory (cluster.resident=true), or set "
                "loop.max_lag = 0"
            )

    @property
    def _threads(self) -> int:
        return threads_of(self.config.cluster, self.cluster)

    def _warm_up(self) -> None:
        if not self._is_warm:
            config = self.config
            warm_up(
                self.actor,
                config.data,
                config.warmup,
                config.seed,
                self.observers,
                config.loop.step_timeout_s,
            )
            self._is_warm = True

    def _read_held_out(self) -> list[Prompt]:
        if self.config.eval.num_prompts == 0:
            return []
        return list(prompts_of(open_indexed(self.config.data, Split.HELD_OUT), self.config.eval.num_prompts))
