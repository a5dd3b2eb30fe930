"""Launching a workflow's groups: the cluster, the channels of generation, and a group for every line of `groups`.

    launch = Launcher(config, run, observers, cluster)
    critic = launch(CriticWorker, "critic", config=…)      a group where the recipe's [placement] puts it
    actor = launch.trainer(ActorWorker, engines, …)        the one that brings its weights to the engines

Groups start side by side; `ready` waits for all. Nothing here knows what they compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rill.errors import PeerDiedError, PlanError, RillError, RunError
from rill.journal.checkpoints import whole_checkpoints
from rill.planning.elastic import Scaler
from rill.runtime.cluster import Cluster
from rill.runtime.device.accelerator import CUDA
from rill.runtime.device.device import Device
from rill.runtime.device.placement import resolve, seats_on_free_devices
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker
from rill.telemetry.requests import open_requests
from rill.telemetry.run import Run
from rill.weights import chosen_transport, seated
from rill.workflows.config import ClusterConfig, OnlineConfig, RolloutConfig, SyncConfig
from rill.workflows.controller import Controller, PromptPlan
from rill.workflows.evaluation import read_prompts
from rill.workflows.fleet import Door, Engines, Fleet
from rill.workflows.loop import Observer, StepReport
from rill.workflows.records import Channels, Flows

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

PRELOAD = (
    "rill.workflows.rollout",
    "rill.workflows.actor",
    "rill.workflows.controller",
    "rill.inference.native.engine",
    "rill.envs.single_turn",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Imported once, by the process that workers are forked from: seconds for every worker after the first, and for every
one that is lost. `transformers` alone imports next to nothing, and an optimizer imports the compiler."""
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
        self._fleet: Fleet | None = None
        self.config = config
        self.folder = run
        self.cluster = cluster
        both = self._ids_of(config.placement.rollout) & self._ids_of(config.placement.actor)
        if config.loop.max_lag > 0 and both and not config.cluster.colocate:
            # Engines that run ahead hold their devices for the whole run: a trainer there never gets a turn.
            raise PlanError(
                f"loop.max_lag = {config.loop.max_lag} lets engines go on while the trainer trains, but both are "
                f"placed on devices {sorted(both)}: place them apart (cluster.devices=2 placement.rollout=0 "
                "placement.actor=1), keep both in memory (cluster.colocate=true), or set loop.max_lag = 0"
            )
        self.evals = config.eval.all_sets(config.data)
        for chosen in self.evals.values():  # one that cannot be read is an error here, and not after an hour
            read_prompts(chosen)
        self.groups: dict[str, WorkerGroup[Any]] = {}
        """Those that [placement] places."""
        self.trained: dict[str, WorkerGroup[Any]] = {}
        """Groups that a checkpoint holds."""
        self.devices: dict[str, frozenset[int]] = {}
        """Ids of those that each placed group has."""
        suffix = f"~{session}" if session else ""  # a name is never used again
        self.channels = Channels(cluster, config.loop.step_timeout_s, suffix)
        self.flows = Flows.of(self.channels)
        self._observers = observers
        self._threads = config.cluster.threads_on(len(cluster.devices))
        self._starting: list[WorkerGroup[Any]] = []
        self.is_ready = False
        """Whether everything that was started has been."""
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
            self._reseat(name)
            return self.groups[name]
        placement = getattr(self.config.placement, name)
        self.devices[name] = self._ids_of(placement)
        group = worker.launch_async(
            self.cluster, name=name, placement=placement, threads=self._threads, **init_kwargs
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
        moved = [name for name in here if self.devices[name] != self._ids_of(placement[name])]
        # Engines hold the version that a new trainer publishes first: they begin anew, too.
        if "actor" in moved:
            moved = [name for name in here if name in {*moved, "rollout"}]
        if moved and self.sync.transport.type not in MOVABLE:
            raise PlanError(
                f"weights travel by {self.sync.transport.type}, which was set up for the devices that "
                f"{', '.join(moved)} had at launch: groups stay, or set sync.transport = 'shm' or 'tcp'"
            )
        before = {name: ",".join(map(str, sorted(self.devices[name]))) for name in moved}
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
        if self.config.cluster.colocate:  # groups that fit on their devices together need no turns
            self.cluster.coreside(*self.devices)
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
        environments stay as they are, with what they hold in the token log; all others are started again. None: they
        cannot stay, or weights travel in a way that was set up with the cluster."""
        if not isinstance(self.config.rollout, RolloutConfig) or self.sync.transport.type not in MOVABLE:
            return None
        kept = {name: self.groups[name] for name in FLEET if name in self.groups}
        try:
            for name in set(self.groups) - set(kept):
                self.groups[name].close(timeout_s=CLOSE_S)
            if self._fleet is not None:
                self._fleet.rest(self.flows.tasks, REST_S)
            elif kept != self._kept:
                raise RunError("the engines were not ready yet")
            for group in kept.values():
                group.rest().wait(timeout_s=REST_S)
            self.channels.close()
        except RillError as error:
            log.warning("the cluster is started again too: %s", str(error).splitlines()[0])
            return None
        session = self._session + 1
        return Launcher(self.config, self.folder, self._observers, self.cluster, session=session, kept=kept)

    def _move(self, name: str, placement: str) -> None:
        self.groups[name].move(placement, timeout_s=self.config.loop.step_timeout_s)
        self.devices[name] = self._ids_of(placement)

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
        open_requests(self.folder.path)
        door = Door(
            self.folder.path, self._berth, self._reseat, Scaler(self.config.elastic), self._num_prompts
        )
        self._fleet = Fleet(engines, self.flows, self.channels, actor, self.sync, self.config.loop, door)
        return self._fleet

    def _berth(self, devices: str) -> str:
        """Where engines may join: on devices that engines have, or nobody. PlanError: not there."""
        engines = self.groups["rollout"]
        if self.sync.transport.type not in MOVABLE:
            raise PlanError(
                f"weights travel by {self.sync.transport.type}, which was set up for the engines that there were at "
                "launch: engines join where sync.transport = 'shm' or 'tcp'"
            )
        if not devices:
            like = resolve(self.config.placement.rollout, self.cluster.devices)[0]
            held = frozenset[int]().union(*self.devices.values())
            (seat,) = seats_on_free_devices(engines.name, 1, like, self.cluster.devices, held)
            return ",".join(str(device.id) for device in seat.devices) + ":0"
        for name in set(self.devices) - {engines.name}:
            taken = sorted((self._ids_of(devices) - self.devices[engines.name]) & self.devices[name])
            if taken and not self.config.cluster.colocate:
                raise PlanError(
                    f"device {taken[0]} is {name}'s, and engines did not share it at launch: name devices that engines "
                    "have or nobody has"
                )
        return devices

    def _num_prompts(self) -> int:
        stats = self.flows.tasks.stats()
        return int(stats["depth"] + stats["leased"])

    def _reseat(self, name: str = "rollout") -> None:
        """After ranks came or went."""
        self.devices[name] = frozenset[int]().union(*self.groups[name].devices.values())

    def take_turns(self, one: str, other: str) -> bool:
        """Whether two groups share devices and cannot be in memory together."""
        return not self.config.cluster.colocate and bool(self.devices[one] & self.devices[other])

    # --- inside -------------------------------------------------------------------------------------------

    def _begin(self, group: WorkerGroup[Any]) -> None:
        self._starting.append(group)
        self.groups[group.name] = group

    def _ids_of(self, placement: str) -> frozenset[int]:
        return frozenset(d.id for seat in resolve(placement, self.cluster.devices) for d in seat.devices)

    @property
    def run_dir(self) -> str:
        return str(self.folder.path.resolve())


def open_cluster(config: ClusterConfig, run: Run, preload: Sequence[str] = PRELOAD) -> Cluster:
    devices = config.devices or "auto"
    if config.type == "ray":
        return Cluster.ray(config.address, devices=devices, trace_dir=run.path, log_dir=run.path / "logs")
    return Cluster(devices=devices, preload=preload, trace_dir=run.path, log_dir=run.path / "logs")


def routed(
    sync: SyncConfig, devices: Sequence[Device], *, actor: str, pulling: Iterable[str], stay_on_gpu: bool
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
