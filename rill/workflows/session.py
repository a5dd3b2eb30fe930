"""A session: what the driver's parts (fleet, flow, loop) know of a run between two losses that cannot be mended alone.

Made by the launcher when all groups are there; a test or a benchmark makes one of groups of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rill.errors import RillError, WorkerError
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry.run import Run
from rill.weights.publishing import PublishingWorker
from rill.workflows.config import OnlineConfig
from rill.workflows.controller import Controller
from rill.workflows.records import Channels, Flows


class Engines(NamedTuple):
    """The rollout group, with the environments in it or in a group beside it: a language model's engines, or a robot's
    policy and its simulators."""

    group: WorkerGroup[Any]
    env: WorkerGroup[Any] | None = None


class Session(NamedTuple):
    config: OnlineConfig
    """The recipe; weights travel as its `sync` says."""
    run: Run
    channels: Channels
    flows: Flows
    controller: WorkerGroup[Controller]
    engines: Engines
    actor: WorkerGroup[PublishingWorker]
    take_turns: Callable[[str, str], bool] = lambda one, other: False
    """Whether two groups share devices and cannot be in memory together."""
    berth: Callable[[str], str] = lambda devices: devices
    """Where engines may join, for the devices that were asked for."""
    reseated: Callable[[], None] = lambda: None
    """Engines have joined or left."""

    def ask(self, call: Handle, timeout_s: float | None = None) -> Any:
        """What the first rank answers. An error of rill's own that it raised is raised here as it is. Unset: twice the
        time of a step, since the controller holds the deadline of one itself."""
        try:
            return call.wait(timeout_s=timeout_s or 2 * self.config.loop.step_timeout_s)[0]
        except WorkerError as error:
            if isinstance(error.__cause__, RillError):
                raise error.__cause__ from None
            raise
