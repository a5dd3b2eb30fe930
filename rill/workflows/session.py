"""A session: what the driver's parts (launcher, fleet, flow, loop) know of a run between two losses that cannot be
mended alone: its groups, the devices that they have, and the channels between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rill.errors import PlanError, RillError, WorkerError
from rill.runtime.channel import Channel
from rill.runtime.cluster import Cluster
from rill.runtime.device.placement import resolve, seats_on_free_devices
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry.run import Run
from rill.workers.records import Flows
from rill.workflows.config import OnlineConfig

MOVABLE = ("shm", "tcp", "disk")
"""Ways of weights that do not depend on where the groups were launched."""
NEVER_S = 1e9
MAX_ITEMS = 1_000_000


class Session:
    def __init__(self, config: OnlineConfig, run: Run, cluster: Cluster, suffix: str = "") -> None:
        """`config`: the recipe; weights travel as its `sync` says. `suffix`: of its channels' names."""
        self.config = config
        self.run = run
        self.cluster = cluster
        self._suffix = suffix
        self._channels: list[Channel] = []
        self._num_made: Counter[str] = Counter()
        # Nobody reads ahead of the tasks: one waits where any worker with room can take it.
        tasks = self.channel("tasks", timeout_s=NEVER_S, capacity_items=MAX_ITEMS)
        self.flows = Flows(tasks, self.channel("samples"), self.channel("outcomes", timeout_s=NEVER_S))
        self.groups: dict[str, WorkerGroup[Any]] = {}
        """"rollout" has engines, "env" their environments, where those have processes of their own; "actor" learns,
        "controller" admits prompts. What else there is belongs to the workflow."""
        self.devices: dict[str, frozenset[int]] = {}
        """Ids of those that each group has; none that runs beside them."""

    @property
    def can_move(self) -> bool:
        """Whether weights find their way to engines that are elsewhere than at launch."""
        return self.config.sync.transport.type in MOVABLE

    def channel(self, name: str, timeout_s: float | None = None, **how: Any) -> Channel:
        """A new one, under a name of its own: a name that was used before gets a number. Unset: whoever waits there
        waits as long as a step may last; NEVER_S: as long as the run does, whose loop holds the deadline of a step."""
        self._num_made[name] += 1
        nth = f"#{self._num_made[name]}" if self._num_made[name] > 1 else ""
        timeout_s = timeout_s or self.config.loop.step_timeout_s
        made = Channel.create(self.cluster, f"{name}{self._suffix}{nth}", timeout_s=timeout_s, **how)
        self._channels.append(made)
        return made

    def close_channels(self) -> None:
        """Nobody uses any of them any more."""
        for channel in self._channels:
            channel.close()

    def ask(self, call: Handle, timeout_s: float | None = None) -> Any:
        """What the first rank answers. An error of rill's own that it raised is raised here as it is. Unset: twice the
        time of a step, since the controller holds the deadline of one itself."""
        try:
            return call.wait(timeout_s=timeout_s or 2 * self.config.loop.step_timeout_s)[0]
        except WorkerError as error:
            if isinstance(error.__cause__, RillError):
                raise error.__cause__ from None
            raise

    # --- who is where -------------------------------------------------------------------------------------

    def ids_of(self, placement: str) -> frozenset[int]:
        return frozenset(d.id for seat in resolve(placement, self.cluster.devices) for d in seat.devices)

    def reseat(self, name: str = "rollout") -> None:
        """After ranks came or went."""
        self.devices[name] = frozenset[int]().union(*self.groups[name].devices.values())

    def let_stay(self, groups: bool | tuple[str, ...]) -> None:
        """From now on these keep their memory beside each other (cluster.colocate), and those before do not."""
        before = self.config.together
        cluster = self.config.cluster.model_copy(update={"colocate": groups})
        self.config = self.config.model_copy(update={"cluster": cluster})
        if self.config.together != before:
            self.cluster.take_turns(*before)
            self.cluster.coreside(*self.config.together)

    def take_turns(self, one: str, other: str) -> bool:
        """Whether two groups share devices and cannot be in memory together."""
        if self.config.stay(one, other):
            return False
        return bool(self.devices.get(one, frozenset()) & self.devices.get(other, frozenset()))

    def berth(self, devices: str) -> str:
        """Where engines may join: on devices that engines have, or nobody. PlanError: not there."""
        if not self.can_move:
            raise PlanError(
                f"weights travel by {self.config.sync.transport.type}, which was set up for the engines that there "
                "were at launch: engines join where sync.transport = 'shm' or 'tcp'"
            )
        if not devices:
            like = resolve(self.config.placement.rollout, self.cluster.devices)[0]
            held = frozenset[int]().union(*self.devices.values())
            (seat,) = seats_on_free_devices("rollout", 1, like, self.cluster.devices, held)
            return ",".join(str(device.id) for device in seat.devices) + ":0"
        wanted = self.ids_of(devices) - self.devices["rollout"]
        for name, held in self.devices.items():
            if name != "rollout" and wanted & held and not self.config.stay("rollout", name):
                raise PlanError(
                    f"device {min(wanted & held)} is {name}'s, and engines did not share it at launch: name devices "
                    "that engines have or nobody has"
                )
        return devices
