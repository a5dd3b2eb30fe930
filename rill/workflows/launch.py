"""Launching a workflow's groups: the cluster, the channels of generation, and a group for every line of `groups`.

    launch = Launcher(config, run, observers, cluster)
    critic = launch(CriticWorker, "critic", config=…)      a group where the recipe's [placement] puts it
    actor = launch.trainer(ActorWorker, rollout, …)        the one that brings its weights to the engines

Groups start side by side; `ready` waits for all. Nothing here knows what they compute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from rill.errors import PeerDiedError, PlanError, RillError, RunError
from rill.journal.checkpoints import RunCheckpoints, step_of, whole_checkpoints
from rill.runtime.cluster import Cluster
from rill.runtime.device.accelerator import CUDA
from rill.runtime.device.device import Device
from rill.runtime.device.placement import Placement, resolve
from rill.runtime.group import WorkerGroup
from rill.runtime.worker import Worker
from rill.telemetry.run import Run
from rill.weights import chosen_transport, seated
from rill.workers.config import RolloutConfig, SyncConfig
from rill.workflows import PRELOAD
from rill.workflows.config import ClusterConfig, FlowConfig, OnlineConfig
from rill.workflows.controller import Controller
from rill.workflows.evaluation import read_prompts
from rill.workflows.fleet import Fleet, soon
from rill.workflows.loop import Observer, StepReport
from rill.workflows.session import Session

log = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

FLEET = ("rollout", "env")
"""Groups whose lost ranks are replaced while the others go on (fleet.py)."""
CLOSE_S = 1.0
"""What a group that waits for a lost one has to end by itself."""
REST_S = 60.0
"""What engines and environments have to put down what they do. A tool call that lasts longer is repeated."""
NUM_REPORTS = 20
"""Of the supervised steps before RL."""
WARM_UP_SHARE = 0.05
"""Of their time, what checkpoints of them may take."""


class Launcher:
    """What a workflow's `groups` is given."""

    def __init__(
        self,
        config: OnlineConfig,
        run: Run,
        observers: Sequence[Observer],
        cluster: Cluster,
        *,
        number: int = 0,
        kept: Mapping[str, WorkerGroup[Any]] | None = None,
    ) -> None:
        """`number`: of the session in its cluster. `kept`: engines and environments of the session before, which the
        workflow's `groups` gets instead of new ones."""
        self._number = number
        self._kept = kept or {}
        self._fleet: Fleet | None = None
        self.sync = routed(config, cluster.devices)
        self.config = config.model_copy(update={"sync": self.sync})
        self.session = Session(self.config, run, cluster, f"~{number}" if number else "")
        both = self.session.ids_of(config.placement.rollout) & self.session.ids_of(config.placement.actor)
        if config.loop.max_lag > 0 and both and not config.stay("rollout", "actor"):
            # Engines that run ahead hold their devices for the whole run: a trainer there never gets a turn.
            raise PlanError(
                f"loop.max_lag = {config.loop.max_lag} lets engines go on while the trainer trains, but both are "
                f"placed on devices {sorted(both)}: place them apart (cluster.devices=2 placement.rollout=0 "
                "placement.actor=1), keep both in memory (cluster.colocate=true), or set loop.max_lag = 0"
            )
        for chosen in config.eval.all_sets(config.data).values():
            read_prompts(chosen)  # one that cannot be read is an error here, and not after an hour
        self.trained: dict[str, WorkerGroup[Any]] = {}
        """Groups that a checkpoint holds."""
        self._observers = observers
        self._threads = config.cluster.threads_on(len(cluster.devices))
        self._starting: list[WorkerGroup[Any]] = []
        self.is_ready = False
        """Whether everything that was started has been."""
        self.is_resumed = any(step_of(folder) >= 0 for folder in whole_checkpoints(run))
        self.was_warmed_up = False
        """Supervised steps were taken, which no checkpoint holds yet."""

    def __call__(
        self, worker: type[W], name: str, *, is_trained: bool = False, **init_kwargs: Any
    ) -> WorkerGroup[W]:
        """Start a group where [placement] puts it. `is_trained`: a checkpoint holds it."""
        placement = getattr(self.config.placement, name) or self.config.placement.rollout
        group = self._launch(worker, name, placement, self._threads, init_kwargs)
        self.session.reseat(name)
        if is_trained:
            self.trained[name] = group
        return group

    def beside(self, worker: type[W], name: str, count: int, **init_kwargs: Any) -> WorkerGroup[W]:
        """Start `count` processes that hold no device, on all nodes by turns."""
        ids = [device.id for device in self.session.cluster.devices]
        return self._launch(worker, name, [ids[n % len(ids)] for n in range(count)], 1, init_kwargs)

    def _launch(
        self, worker: type[W], name: str, placement: Placement, threads: int, init_kwargs: Mapping[str, Any]
    ) -> WorkerGroup[W]:
        """Or give what the session before has kept."""
        group = self._kept.get(name)
        if group is None:
            group = worker.launch_async(
                self.session.cluster, name=name, placement=placement, threads=threads, **init_kwargs
            )
            self._starting.append(group)
        self.session.groups[name] = group
        return group

    def trainer(self, worker: type[W], rollout: WorkerGroup[Any], **init_kwargs: Any) -> WorkerGroup[W]:
        """Start the group that learns the policy and brings it to the engines (`sync`: its end of the way there)."""
        transport = seated(self.sync.transport, rank=0, num_receivers=rollout.size)
        sync = self.sync.model_copy(update={"transport": transport})
        return self(worker, "actor", is_trained=True, sync=sync, **init_kwargs)

    def warm_up(self, actor: WorkerGroup[Any], num_steps: int, *arguments: Any) -> None:
        """Supervised steps of the actor before RL, `warm_up(done, count, *arguments)`, some at a time, reported and
        kept like any other. None where the run is resumed: a checkpoint has what they made."""
        timeout_s = self.config.loop.step_timeout_s
        actor.ready(timeout_s)
        if self.is_resumed:
            return
        at_once = max(1, num_steps // NUM_REPORTS)
        run = self.session.run
        with RunCheckpoints(run, {"actor": actor}, 1, timeout_s, compacts=False, is_warm_up=True) as kept:
            done = max(0, num_steps + (kept.load_latest() or -num_steps))
            saved_s, cost_s = time.monotonic(), 0.0
            while done < num_steps:
                count = min(at_once, num_steps - done)
                metrics = actor.warm_up(done, count, *arguments).wait(timeout_s=timeout_s)[0]
                done += count
                report = StepReport(step=done, num_steps=num_steps, metrics=metrics, phase="warm-up")
                report.tell(self._observers)
                self.was_warmed_up = True
                began_s = time.monotonic()
                if done < num_steps and began_s - saved_s >= cost_s / WARM_UP_SHARE:
                    kept.save(done - num_steps)
                    kept.settle()
                    saved_s = time.monotonic()
                    cost_s = saved_s - began_s

    def move(self, placement: Mapping[str, str]) -> tuple[list[str], RunError | None]:
        """Put groups on other devices, between two steps; the names of those that were started again, and why they are
        all where they were if one did not come up. They begin as at launch: what was trained has to be loaded."""
        session = self.session
        if getattr(self.config.placement, "env", "") is None:  # simulators go where the policy is
            placement = {"env": placement["rollout"], **placement}
        here = [name for name in session.groups if name in placement]
        moved = [name for name in here if session.devices[name] != session.ids_of(placement[name])]
        # Engines hold the version that a new trainer publishes first: they begin anew, too.
        if "actor" in moved:
            moved = [name for name in here if name in {*moved, "rollout"}]
        if moved and not session.can_move:
            raise PlanError(
                f"weights travel by {self.sync.transport.type}, which was set up for the devices that "
                f"{', '.join(moved)} had at launch: groups stay, or set sync.transport = 'shm' or 'tcp'"
            )
        before = {name: list(session.groups[name].devices.values()) for name in moved}
        for number, name in enumerate(moved):
            try:
                self._move(name, placement[name])
            except RunError as error:  # this one is back already
                for other in moved[:number]:
                    # One that dies on its way back is found lost; those before it have to load what they had learnt.
                    with suppress(RunError):
                        self._move(other, before[other])
                return moved[: number + 1], error
        return moved, None

    def settle_on(self, placement: Mapping[str, str], flow: FlowConfig) -> None:
        """What was changed while the run goes on is the next session's, too."""
        places = self.config.placement.model_copy(update=dict(placement))
        self.config = self.session.config.model_copy(update={"placement": places, "flow": flow})

    def ready(self) -> None:
        """Wait for everything that was started. An engine or environment worker that dies meanwhile is started again; a
        trainer's ranks wait for each other, and the run ends with the first that is lost."""
        starting, self._starting = self._starting, []
        for group in starting:
            self._await(group)
        if self.config.together:  # they need no turns among themselves
            self.session.cluster.coreside(*self.config.together)
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

    def lost(self) -> list[str]:
        """Ranks of groups that the fleet does not look after whose process is gone."""
        groups = [group for group in self.session.groups.values() if group.name not in FLEET]
        return soon(lambda: [f"{group.name}[{rank}]" for group in groups for rank in group.lost()])

    def again(self) -> Launcher | None:
        """For the next session in this cluster, once a process is lost that cannot be replaced alone: engines and
        environments stay as they are, with what they hold in the token log, where they can; all others are started
        again. None: weights travel in a way that was set up with the cluster, or it is at fault itself."""
        session, number = self.session, self._number + 1
        if not session.can_move:
            return None
        try:
            self._close(set(session.groups) - set(FLEET))
            kept = self._rested()
            self._close(set(session.groups) - set(kept))
            session.close_channels()
            return Launcher(
                self.config, session.run, self._observers, session.cluster, number=number, kept=kept
            )
        except RillError as error:
            log.warning("the cluster is started again too: %s", str(error).splitlines()[0])
            return None

    def _rested(self) -> dict[str, WorkerGroup[Any]]:
        """Engines and environments, with nothing left to do; none where one is lost, too, or has no end."""
        kept = {name: group for name, group in self.session.groups.items() if name in FLEET}
        try:
            if not isinstance(self.config.rollout, RolloutConfig):
                raise RunError("a robot's simulators keep no token log")
            if self._fleet is not None:
                self._fleet.rest(REST_S)
            elif kept != self._kept:
                raise RunError("the engines were not ready yet")
            for group in kept.values():
                group.rest().wait(timeout_s=REST_S)
            return kept
        except RillError as error:
            log.warning("engines are started again too: %s", str(error).splitlines()[0])
            return {}

    def _close(self, names: Collection[str]) -> None:
        """All at once: those that wait for a lost one do not end before the time is over."""
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            list(pool.map(lambda name: self.session.groups[name].close(timeout_s=CLOSE_S), names))

    def _move(self, name: str, placement: Placement) -> None:
        self.session.groups[name].move(placement, timeout_s=self.config.loop.step_timeout_s)
        self.session.reseat(name)

    # --- the parts that every run has -----------------------------------------------------------------------

    def controller(self) -> WorkerGroup[Controller]:
        group = self.beside(Controller, "controller", 1, config=self.config, run_dir=self.run_dir)
        self.trained["controller"] = group
        return group

    def fleet(self) -> Fleet:
        """Once all groups are there, and again when some have moved."""
        self._fleet = Fleet(self.session)
        return self._fleet

    @property
    def run_dir(self) -> str:
        return str(self.session.run.path.resolve())


def open_cluster(config: ClusterConfig, run: Run, preload: Sequence[str] = PRELOAD) -> Cluster:
    devices = config.devices or "auto"
    if config.type == "ray":
        return Cluster.ray(config.address, devices=devices, trace_dir=run.path, log_dir=run.path / "logs")
    return Cluster(devices=devices, preload=preload, trace_dir=run.path, log_dir=run.path / "logs")


def routed(config: OnlineConfig, devices: Sequence[Device]) -> SyncConfig:
    """[sync] with the transport that the placement asks for, where the recipe leaves it open."""
    publisher = resolve(config.placement.actor, devices)[0]
    ends = [publisher, *(seat for place in config.pulling for seat in resolve(place, devices))]
    first = {seat.devices[0].id: seat.devices[0].kind for seat in ends}
    stay_on_gpu = config.stay("rollout", "actor") and config.reads_gpu
    transport = chosen_transport(
        config.sync.transport,
        is_one_machine=len({seat.node_id for seat in ends}) == 1,
        is_one_gpu=stay_on_gpu and list(first.values()) == [CUDA],
    )
    log.info("weights travel by %s", transport.type)
    return config.sync.model_copy(update={"transport": transport})
