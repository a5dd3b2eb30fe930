"""Launching a workflow's groups: the cluster, the channels of generation, and a group for every line of `groups`.

    launch = Launcher(config, run, observers, cluster)
    critic = launch(CriticWorker, "critic", config=…)      a group where the recipe's [placement] puts it
    actor = launch.trainer(ActorWorker, engines, …)        the one that brings its weights to the engines

Groups start side by side; `ready` waits for all. Nothing here knows what they compute.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rill.errors import PeerDiedError, PlanError, RillError, RunError
from rill.journal.checkpoints import whole_checkpoints
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.device.accelerator import CUDA
from rill.runtime.device.device import Device
from rill.runtime.device.placement import resolve, seats_on_free_devices
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker
from rill.telemetry.run import Run
from rill.weights import chosen_transport, seated
from rill.workflows.config import ClusterConfig, EvalSetConfig, OnlineConfig, RolloutConfig, SyncConfig
from rill.workflows.controller import Controller, PromptPlan
from rill.workflows.elastic import Door, Scaler
from rill.workflows.evaluation import read_prompts
from rill.workflows.fleet import Crew, Engines, Fleet
from rill.workflows.flow import Seating
from rill.workflows.loop import Observer, StepReport
from rill.workflows.records import Flows

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

MAX_TASKS = 1_000_000
PRELOAD = (
    "rill.workflows.rollout",
    "rill.workflows.actor",
    "rill.workflows.controller",
    "rill.models.loading",
    "transformers",
)
"""Imported once, by the process that workers are forked from: seconds for every worker after the first."""
NEVER_S = 1e9
"""Workers wait for tasks and the controller for outcomes as long as the run lasts; the loop holds the deadline of a
step."""
FLEET = ("rollout", "env")
"""Groups whose lost ranks are replaced while the others go on (fleet.py)."""
CLOSE_S = 1.0
"""What a group that waits for a lost one has to end by itself."""
REST_S = 60.0
"""What engines and environments have to put down what they do. A tool call that lasts longer is repeated."""
MOVABLE = ("shm", "tcp", "disk")
"""Ways of weights that do not depend on where the groups were launched."""
NUM_REPORTS = 20
"""Of the supervised steps before RL."""


class Launcher:
    """What a workflow's `groups` is given."""

    def __init__(
        self,
        config: OnlineConfig,
        run: Run,
        observers: Sequence[Observer],
        cluster: Cluster,
        *,
        session: int = 0,
        kept: Mapping[str, WorkerGroup[Any]] | None = None,
    ) -> None:
        """`kept`: engines and environments of the session before, which the workflow's `groups` gets instead of new
        ones."""
        self._session = session
        self._kept = kept or {}
        self._channels: list[Channel] = []
        self._fleet: Fleet | None = None
        self.config = config
        self.folder = run
        self.cluster = cluster
        self.evals = checked_evals(config)
        self.groups: dict[str, WorkerGroup[Any]] = {}
        """Those that [placement] places."""
        self.trained: dict[str, WorkerGroup[Any]] = {}
        """Groups that a checkpoint holds."""
        self.seating = Seating(cluster, colocate=config.cluster.colocate)
        # Bounded, so that nobody reads ahead: a task waits where any worker with room can take it.
        self.flows = Flows(
            tasks=self.channel("tasks", timeout_s=NEVER_S, capacity_items=MAX_TASKS),
            samples=self.channel("samples"),
            outcomes=self.channel("outcomes", timeout_s=NEVER_S),
        )
        self._observers = observers
        self._starting: list[WorkerGroup[Any]] = []
        self.is_ready = False
        """Whether everything that was started has been."""
        self._num_fleets = 0
        self.is_resumed = bool(whole_checkpoints(run))
        self.was_warmed_up = False
        """Supervised steps were taken, which no checkpoint holds yet."""
        self.sync = routed(
            config.sync,
            cluster.devices,
            actor=config.placement.actor,
            pulling=config.pulling,
            stay_on_gpu=config.cluster.colocate and config.reads_gpu,
        )

    def __call__(
        self, worker: type[W], name: str, *, is_trained: bool = False, **init_kwargs: Any
    ) -> WorkerGroup[W]:
        """Start a group where [placement] puts it. `is_trained`: a checkpoint holds it."""
        if name in self._kept:
            self.groups[name] = self._kept[name]
            return self.groups[name]
        placement = getattr(self.config.placement, name)
        self.seating.seat(name, placement)
        group = worker.launch_async(
            self.cluster, name=name, placement=placement, threads=self.threads, **init_kwargs
        )
        self._begin(group)
        if is_trained:
            self.trained[name] = group
        return group

    def beside(self, worker: type[W], name: str, count: int, **init_kwargs: Any) -> WorkerGroup[W]:
        """Start `count` processes that hold no device, on all nodes by turns."""
        if name in self._kept:
            self.groups[name] = self._kept[name]
            return self.groups[name]
        ids = [device.id for device in self.cluster.devices]
        placement = [ids[n % len(ids)] for n in range(count)]
        group = worker.launch_async(self.cluster, name=name, placement=placement, threads=1, **init_kwargs)
        self._begin(group)
        return group

    def trainer(self, worker: type[W], engines: Engines, **init_kwargs: Any) -> WorkerGroup[W]:
        """Start the group that learns the policy and brings it to the engines (`sync`: its end of the way there)."""
        self._check_ahead()
        transport = seated(self.sync.transport, rank=0, num_receivers=engines.group.size)
        sync = self.sync.model_copy(update={"transport": transport})
        return self(worker, "actor", is_trained=True, sync=sync, **init_kwargs)

    def warm_up(self, num_steps: int, steps: Callable[[int], Mapping[str, float]]) -> None:
        """Supervised steps before RL, some at a time, reported like any other. None where the run is resumed: a
        checkpoint has what they made."""
        if self.is_resumed:
            return
        at_once = max(1, num_steps // NUM_REPORTS)
        for done in range(0, num_steps, at_once):
            count = min(at_once, num_steps - done)
            metrics = steps(count)
            report = StepReport(step=done + count, num_steps=num_steps, metrics=metrics, phase="warm-up")
            for observer in self._observers:
                observer(report)
            self.was_warmed_up = True

    def move(self, placement: Mapping[str, str]) -> tuple[list[str], RunError | None]:
        """Put groups on other devices, between two steps; the names of those that were started again, and why they are
        all where they were if one did not come up. They begin as at launch: what was trained has to be loaded."""
        here = [name for name in self.groups if name in placement]
        moved = [name for name in here if self.seating.ids(name) != self.seating.ids_of(placement[name])]
        if moved and self.sync.transport.type not in MOVABLE:
            raise PlanError(
                f"weights travel by {self.sync.transport.type}, which was set up for the devices that "
                f"{', '.join(moved)} had at launch: groups stay, or set sync.transport = 'shm' or 'tcp'"
            )
        before = {name: ",".join(map(str, sorted(self.seating.ids(name)))) for name in moved}
        for number, name in enumerate(moved):
            try:
                self._move(name, placement[name])
            except RunError as error:  # this one is back already
                for other in moved[:number]:
                    self._move(other, before[other])
                return moved[: number + 1], error
        return moved, None

    def ready(self) -> None:
        """Wait for everything that was started. An engine or environment worker that dies meanwhile is started again; a
        trainer's ranks wait for each other, and the run ends with the first that is lost."""
        starting, self._starting = self._starting, []
        for group in starting:
            self._await(group)
        self.is_ready = True

    def _await(self, group: WorkerGroup[Any]) -> None:
        timeout_s, tries_left = self.config.loop.step_timeout_s, self.config.loop.max_relaunches
        lost: list[int] = []
        while True:
            try:
                for rank in lost:
                    group.relaunch(rank, timeout_s=timeout_s)
                group.ready(timeout_s)
                return
            except PeerDiedError as death:
                if group.name not in FLEET or tries_left == 0:
                    raise
                log.warning("%s: started again", str(death).splitlines()[0])
                tries_left, lost = tries_left - 1, group.lost()

    def lost(self, timeout_s: float) -> list[str]:
        """Ranks of groups that the fleet does not look after whose process is gone, once one is or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            groups = [group for group in self.groups.values() if group.name not in FLEET]
            found = [f"{group.name}[{rank}]" for group in groups for rank in group.lost()]
            if found or time.monotonic() > deadline_s:
                return found
            time.sleep(0.1)

    def again(self) -> Launcher | None:
        """For the next session in this cluster, once a process is lost that cannot be replaced alone: engines and
        environments stay as they are, with what they hold in the token log; all others are ended. None: they cannot."""
        fleet, kept = self._fleet, {name: self.groups[name] for name in FLEET if name in self.groups}
        can_stay = isinstance(self.config.rollout, RolloutConfig) and self.sync.transport.type in MOVABLE
        if not can_stay or (fleet is None and kept != self._kept):
            return None
        try:
            for name in set(self.groups) - set(kept):
                self.groups[name].close(timeout_s=CLOSE_S)
            if fleet is not None:
                fleet.rest(self.flows.tasks, REST_S)
            for group in kept.values():
                group.rest().wait(timeout_s=REST_S)
            for channel in self._channels:
                channel.close()
        except RillError as error:
            log.warning("the engines are started again too: %s", str(error).splitlines()[0])
            return None
        session = self._session + 1
        return Launcher(self.config, self.folder, self._observers, self.cluster, session=session, kept=kept)

    def _move(self, name: str, placement: str) -> None:
        self.groups[name].move(placement, timeout_s=self.config.loop.step_timeout_s)
        self.seating.seat(name, placement)

    # --- the parts that every run has -----------------------------------------------------------------------

    def controller(self) -> WorkerGroup[Controller]:
        config = self.config
        group = self.beside(
            Controller,
            "controller",
            1,
            prompts=PromptPlan(data=config.data, loader=config.loader, curriculum=config.curriculum),
            config=config.loop,
            group_size=config.rollout.group_size,
            evals=self.evals,
            run_dir=self.run_dir,
            journal=config.journal,
        )
        self.trained["controller"] = group
        return group

    def fleet(self, engines: Engines, actor: WorkerGroup[Any]) -> Fleet:
        if self._kept:  # some may have joined
            self._reseat()
        self._fleet = self._new_fleet(engines, actor)
        return self._fleet

    def _new_fleet(self, engines: Engines, actor: WorkerGroup[Any]) -> Fleet:
        rollout, env, flows, loop = engines.group, engines.env, self.flows, self.config.loop
        scaler = Scaler(self.config.elastic)
        door = Door(self.folder.path, self._berth, self._reseat, scaler, self._num_prompts)
        if env is None:
            crew = Crew(rollout, lambda ranks: rollout.on(*ranks).generate(flows), loop.max_relaunches)
            return Fleet(crew, None, None, actor, self.sync, loop, door)
        self._num_fleets += 1  # after a move there is another, with channels of its own
        nth = f"#{self._num_fleets}" if self._num_fleets > 1 else ""
        requests = self.channel(f"requests{nth}", timeout_s=NEVER_S, capacity_items=MAX_TASKS)
        answers = tuple(self.channel(f"answers[{rank}]{nth}", timeout_s=NEVER_S) for rank in range(env.size))
        crew = Crew(rollout, lambda ranks: rollout.on(*ranks).serve(requests, answers), loop.max_relaunches)
        environments = Crew(
            env,
            lambda ranks: env.on(*ranks).run(flows, requests, answers),
            loop.max_relaunches,
        )
        return Fleet(crew, environments, requests, actor, self.sync, loop, door)

    def _berth(self, devices: str) -> str:
        """Where engines may join: on devices that engines have, or nobody. PlanError: not there."""
        engines, seating = self.groups["rollout"], self.seating
        if self.sync.transport.type not in MOVABLE:
            raise PlanError(
                f"weights travel by {self.sync.transport.type}, which was set up for the engines that there were at "
                "launch: engines join where sync.transport = 'shm' or 'tcp'"
            )
        if not devices:
            like = resolve(self.config.placement.rollout, self.cluster.devices)[0]
            held = {number for name in seating.names for number in seating.ids(name)}
            (seat,) = seats_on_free_devices(engines.name, 1, like, self.cluster.devices, held)
            return ",".join(str(device.id) for device in seat.devices) + ":0"
        for name in set(seating.names) - {engines.name}:
            taken = sorted((seating.ids_of(devices) - seating.ids(engines.name)) & seating.ids(name))
            if taken and not self.config.cluster.colocate:
                raise PlanError(
                    f"device {taken[0]} is {name}'s, and engines did not share it at launch: name devices that engines "
                    "have or nobody has"
                )
        return devices

    def _num_prompts(self) -> int:
        stats = self.flows.tasks.stats()
        return int(stats["depth"] + stats["leased"])

    def _reseat(self) -> None:
        """After engines came or went."""
        ids = {number for devices in self.groups["rollout"].devices.values() for number in devices}
        self.seating.seat("rollout", ",".join(map(str, sorted(ids))))

    def channel(
        self, name: str, *, timeout_s: float | None = None, capacity_items: int | None = None
    ) -> Channel:
        """Whoever waits for samples waits as long as a step may last."""
        limit_s = self.config.loop.step_timeout_s if timeout_s is None else timeout_s
        if self._session:  # a name is never used again
            name = f"{name}~{self._session}"
        channel = Channel.create(self.cluster, name, timeout_s=limit_s, capacity_items=capacity_items)
        self._channels.append(channel)
        return channel

    def colocate(self) -> None:
        """Groups that fit on their devices together need no turns, where the recipe says that they do."""
        if self.config.cluster.colocate:
            self.cluster.coreside(*self.seating.names)

    # --- inside -------------------------------------------------------------------------------------------

    def _begin(self, group: WorkerGroup[Any]) -> None:
        self._starting.append(group)
        self.groups[group.name] = group

    @property
    def run_dir(self) -> str:
        return str(self.folder.path.resolve())

    @property
    def threads(self) -> int:
        return threads_of(self.config.cluster, len(self.cluster.devices))

    def _check_ahead(self) -> None:
        """Engines that run ahead hold their devices for the whole run: a trainer that shares them never gets a turn."""
        lag = self.config.loop.max_lag
        for name in ("actor", "rollout"):
            self.seating.seat(name, getattr(self.config.placement, name))
        if lag > 0 and self.seating.take_turns("rollout", "actor"):
            raise PlanError(
                f"loop.max_lag = {lag} lets engines go on while the trainer trains, but both are placed on devices "
                f"{self.seating.shared('rollout', 'actor')}: place them apart (cluster.devices=2 placement.rollout=0 "
                "placement.actor=1), keep both in memory (cluster.colocate=true), or set loop.max_lag = 0"
            )


def open_cluster(config: ClusterConfig, run: Run, preload: Sequence[str] = PRELOAD) -> Cluster:
    devices = config.devices or "auto"
    if config.type == "ray":
        return Cluster.ray(config.address, devices=devices, trace_dir=run.path, log_dir=run.path / "logs")
    return Cluster(devices=devices, preload=preload, trace_dir=run.path, log_dir=run.path / "logs")


def routed(
    sync: SyncConfig,
    devices: Sequence[Device],
    *,
    actor: str,
    pulling: Iterable[str],
    stay_on_gpu: bool,
) -> SyncConfig:
    """`sync` with the transport that the placement asks for, where the recipe leaves it open.

    pulling: the placements of the groups that take the weights.
    stay_on_gpu: groups that share a GPU keep their memory on it, and their engines can read weights from it.
    """
    publisher = resolve(actor, devices)[0]
    ends = [publisher, *(seat for place in pulling for seat in resolve(place, devices))]
    first = {seat.devices[0].id: seat.devices[0].kind for seat in ends}
    transport = chosen_transport(
        sync.transport,
        is_one_machine=len({seat.node_id for seat in ends}) == 1,
        is_one_gpu=stay_on_gpu and list(first.values()) == [CUDA],
    )
    log.info("weights travel by %s", transport.type)
    return sync.model_copy(update={"transport": transport})


def threads_of(config: ClusterConfig, num_devices: int) -> int:
    """Threads of each worker: the cores divided among the device slots, since sharers of a slot take turns."""
    return config.threads or max(1, (os.cpu_count() or 1) // max(1, num_devices))


def checked_evals(config: OnlineConfig) -> Mapping[str, EvalSetConfig]:
    """The evaluation sets; one that cannot be read is an error here, and not after an hour."""
    sets = config.eval.all_sets(config.data)
    for chosen in sets.values():
        read_prompts(chosen)
    return sets
