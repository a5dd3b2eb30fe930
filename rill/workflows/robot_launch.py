"""Launching an embodied run: the cluster, the groups where [placement] puts them, the channels of the cycle, the loop.

The counterpart of launch.py and workflow.py for robots: the controller, the flow, the fleet and the loop are theirs.
Whatever the recipe cannot run with (a simulator that is not installed, a policy of another robot) ends it here, before
anything is started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from rill.data.base import Split, open_indexed
from rill.data.initial_states import start_of
from rill.envs.robots.base import check_task
from rill.envs.robots.process import SimulatorProcess
from rill.errors import PlanError
from rill.journal.checkpoints import RunCheckpoints, whole_checkpoints
from rill.journal.token_log import JournalConfig
from rill.models.robots.base import check_fits
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker
from rill.telemetry.run import Run
from rill.types import InitialState, RobotSpec
from rill.weights import seated
from rill.workflows.config import ClusterConfig
from rill.workflows.controller import Controller, PromptPlan
from rill.workflows.episodes import Flows
from rill.workflows.evaluation import read_prompts
from rill.workflows.fleet import Crew, Engines, Fleet
from rill.workflows.flow import Flow, Seating
from rill.workflows.launch import MAX_TASKS, NEVER_S, NUM_REPORTS, routed
from rill.workflows.loop import Loop, Observer, StepReport
from rill.workflows.robot_actor import RobotActor
from rill.workflows.robot_config import RobotConfig
from rill.workflows.robot_env import RobotEnvWorker
from rill.workflows.robot_policy import RobotPolicyWorker
from rill.workflows.robot_settings import PolicySource, RobotSettings

W = TypeVar("W", bound=Worker)

PRELOAD = ("rill.workflows.robot_actor", "rill.workflows.robot_env", "rill.workflows.controller")
START_S = 300.0
WINDOW = 30
"""Steps that the gain of success is counted over."""


class RobotLauncher:
    """What an embodied workflow's `groups` is given."""

    def __init__(self, config: RobotConfig, run: Run, cluster: Cluster, spec: RobotSpec) -> None:
        self.config = config
        self.cluster = cluster
        self.seating = Seating(cluster, colocate=config.cluster.colocate)
        self.source = PolicySource(config.policy, spec, config.policy_path, config.seed)
        self.settings = RobotSettings(
            simulator=config.simulator,
            rollout=config.rollout,
            algorithm=config.algorithm,
            is_greedy=config.eval.temperature == 0,
            seed=config.seed,
            run_dir=str(run.path.resolve()),
        )
        self.sync = routed(
            config.sync,
            cluster.devices,
            actor=config.placement.actor,
            pulling=(config.placement.rollout,),
            stay_on_gpu=config.cluster.colocate,
        )
        self.evals = config.eval.all_sets(config.data)
        for chosen in self.evals.values():
            read_prompts(chosen)
        self.flows = Flows(
            tasks=self.channel("tasks", timeout_s=NEVER_S, capacity_items=MAX_TASKS),
            samples=self.channel("samples"),
            outcomes=self.channel("outcomes", timeout_s=NEVER_S),
        )
        self._starting: list[WorkerGroup[Any]] = []

    def __call__(self, worker: type[W], name: str, **init_kwargs: Any) -> WorkerGroup[W]:
        """Start a group where [placement] puts it."""
        placement = getattr(self.config.placement, name)
        self.seating.seat(name, placement)
        threads = self.config.cluster.threads or 1
        group = worker.launch_async(
            self.cluster, name=name, placement=placement, threads=threads, **init_kwargs
        )
        self._starting.append(group)
        return group

    def env(self) -> WorkerGroup[RobotEnvWorker]:
        return self(RobotEnvWorker, "env", settings=self.settings)

    def policy(self) -> WorkerGroup[RobotPolicyWorker]:
        return self(RobotPolicyWorker, "rollout", source=self.source, sync=self.sync)

    def actor(self, num_receivers: int) -> WorkerGroup[RobotActor]:
        transport = seated(self.sync.transport, rank=0, num_receivers=num_receivers)
        config = self.config
        self.seating.seat("actor", config.placement.actor)
        if config.loop.max_lag > 0 and self.seating.take_turns("rollout", "actor"):
            raise PlanError(
                f"loop.max_lag = {config.loop.max_lag} lets the policy act while the trainer trains, but both are "
                f"placed on devices {self.seating.shared('rollout', 'actor')}: place them apart (cluster.devices=2 "
                "placement.actor=1), keep both in memory (cluster.colocate=true), or set loop.max_lag = 0"
            )
        return self(
            RobotActor,
            "actor",
            config=config.trainer,
            algorithm=config.algorithm,
            source=self.source,
            sync=self.sync.model_copy(update={"transport": transport}),
            seed=config.seed,
        )

    def controller(self) -> WorkerGroup[Controller]:
        config = self.config
        group = Controller.launch_async(
            self.cluster,
            name="controller",
            placement=[self.cluster.devices[0].id],
            threads=1,
            prompts=PromptPlan(data=config.data, loader=config.loader),
            config=config.loop,
            group_size=config.rollout.group_size,
            evals=self.evals,
            run_dir=self.settings.run_dir,
            journal=JournalConfig(),  # the batches that were chosen; an episode's chunks are played again
        )
        self._starting.append(group)
        return group

    def ready(self) -> None:
        for group in self._starting:
            group.ready(START_S)
        if self.config.cluster.colocate:
            self.cluster.coreside(*self.seating.names)

    def fleet(
        self,
        env: WorkerGroup[RobotEnvWorker],
        rollout: WorkerGroup[RobotPolicyWorker],
        actor: WorkerGroup[RobotActor],
    ) -> Fleet:
        loop, flows = self.config.loop, self.flows
        requests = self.channel("requests", timeout_s=NEVER_S, capacity_items=MAX_TASKS)
        answers = tuple(self.channel(f"answers[{rank}]", timeout_s=NEVER_S) for rank in range(env.size))
        policies = Crew(
            rollout, lambda ranks: rollout.on(*ranks).serve(requests, answers), loop.max_relaunches
        )
        simulators = Crew(
            env, lambda ranks: env.on(*ranks).run(flows, requests, answers), loop.max_relaunches
        )
        return Fleet(policies, simulators, requests, actor, self.sync, loop)

    def channel(
        self, name: str, *, timeout_s: float | None = None, capacity_items: int | None = None
    ) -> Channel:
        limit_s = self.config.loop.step_timeout_s if timeout_s is None else timeout_s
        return Channel.create(self.cluster, name, timeout_s=limit_s, capacity_items=capacity_items)


class RobotWorkflow(ABC):
    """The groups of an embodied workflow, one step, and the loop around them."""

    Config: ClassVar[type[RobotConfig]]

    env: WorkerGroup[RobotEnvWorker]
    rollout: WorkerGroup[RobotPolicyWorker]
    actor: WorkerGroup[RobotActor]

    def __init__(self, config: RobotConfig, run: Run, observers: Sequence[Observer]) -> None:
        self.config = config
        self.folder = run
        self.observers = observers
        self._successes: list[float] = []

    @abstractmethod
    def groups(self, launch: RobotLauncher) -> None:
        """Launch `self.env`, `self.rollout` and `self.actor`."""

    @abstractmethod
    def step(self, flow: Flow) -> None:
        """One step, once per batch: calls that return at once."""

    @property
    def engines(self) -> Engines:
        """The policy with its simulators, as the flow takes samples from them."""
        return Engines(self.rollout, self.env)  # type: ignore[arg-type]

    def run(self) -> None:
        """Imitate or resume, train to the last step, leave the policy in the run folder."""
        config, loop = self.config, self.config.loop
        spec = spec_of(config)
        with open_robot_cluster(config.cluster, self.folder) as cluster:
            launch = RobotLauncher(config, self.folder, cluster, spec)
            controller = launch.controller()
            self.groups(launch)
            launch.ready()
            is_warm = bool(whole_checkpoints(self.folder))
            if config.imitation.steps and not is_warm:
                self._imitate()
            fleet = launch.fleet(self.env, self.rollout, self.actor)
            flow = Flow(config.flow, loop, controller, fleet, launch.seating, launch.flows, launch.channel)
            groups: Mapping[str, WorkerGroup[Any]] = {"actor": self.actor, "controller": controller}
            with RunCheckpoints(
                self.folder, groups, loop.keep_checkpoints, loop.step_timeout_s
            ) as checkpoints:
                running = Loop(
                    loop,
                    flow,
                    self.step,
                    controller,
                    checkpoints,
                    [self._observe],
                    eval_every=config.eval.every,
                    has_evals=bool(launch.evals),
                )
                running.restore()
                controller.start(launch.flows).wait(timeout_s=loop.step_timeout_s)
                running.run()
            self.actor.export(str(self.folder.path.resolve() / "model")).wait(timeout_s=loop.step_timeout_s)

    def _imitate(self) -> None:
        """The warm start, reported like any other step. Demonstrations begin in states of the training side."""
        config, imitation = self.config, self.config.imitation
        states = open_indexed(config.data, Split.TRAIN)
        # From the end: RL begins with the first ones, in the loader's order.
        starts = [start_of(states[len(states) - 1 - n]) for n in range(min(imitation.demos, len(states)))]
        timeout_s = config.loop.step_timeout_s
        seen = self.actor.watch(config.simulator, imitation, starts).wait(timeout_s=timeout_s)[0]
        chunk = max(1, imitation.steps // NUM_REPORTS)
        for done in range(0, imitation.steps, chunk):
            num_steps = min(chunk, imitation.steps - done)
            is_last = done + num_steps == imitation.steps
            call = self.actor.imitate(imitation, num_steps, is_last)
            metrics = {**seen, **call.wait(timeout_s=timeout_s)[0]}
            self._tell(
                StepReport(step=done + num_steps, num_steps=imitation.steps, metrics=metrics, phase="warm-up")
            )

    def _observe(self, report: StepReport) -> None:
        """Adds how far success has come, for those who watch whether it does."""
        metrics = dict(report.metrics)
        if "throughput/tokens_per_s" in metrics:  # what the flow counts in a sample: actions here
            metrics["throughput/actions_per_s"] = metrics.pop("throughput/tokens_per_s")
        if "success/mean" in metrics:
            self._successes.append(metrics["success/mean"])
            recent = self._successes[-2 * WINDOW :]
            half = len(recent) // 2
            is_settled = min(recent[half:]) >= 0.9
            if len(recent) == 2 * WINDOW and not is_settled:
                metrics["success/gain"] = sum(recent[half:]) / half - sum(recent[:half]) / half
        self._tell(
            StepReport(step=report.step, num_steps=report.num_steps, metrics=metrics, notes=report.notes)
        )

    def _tell(self, report: StepReport) -> None:
        for observer in self.observers:
            observer(report)


def spec_of(config: RobotConfig) -> RobotSpec:
    """The robot's shapes, asked of a simulator in a process of its own: one that cannot be opened is told of here."""
    simulators = SimulatorProcess(config.simulator, 1, timeout_s=config.rollout.timeout_s)
    try:
        spec = simulators.spec()
    finally:
        simulators.close()
    for task in config.data.tasks:
        check_task(InitialState(config.simulator.type, task, 0), spec)
    source = PolicySource(config.policy, spec, config.policy_path, config.seed)
    policy = source.open()  # here, where a policy that does not fit is one line and not a worker's traceback
    check_fits(policy.spec, spec, config.policy_path or "the recipe")
    return spec


def open_robot_cluster(config: ClusterConfig, run: Run) -> Cluster:
    devices = config.devices or "auto"
    if config.type == "ray":
        return Cluster.ray(config.address, devices=devices, trace_dir=run.path, log_dir=run.path / "logs")
    return Cluster(devices=devices, preload=PRELOAD, trace_dir=run.path, log_dir=run.path / "logs")
