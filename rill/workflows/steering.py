"""What may be changed while a workflow runs, between two of its steps: devices, chunks, the size of a batch.

    step ─▶ report ─▶ pilot.after_step(steering) ─▶ step …
                          └─ switch: engines rest ─▶ checkpoint ─▶ groups that must go move ─▶ load ─▶ publish ─▶ edges

A pilot decides (rill.planning.pilot), the steering does. The driver, the controller and groups that stay are not
touched; a switch loses nothing, since it passes a checkpoint. Beside it the steering keeps the run's history on
disk, which the planner and the dashboard read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from rill.planning.pilot import Pilot
from rill.planning.traced import write_history
from rill.runtime.hub.history import CallRecord
from rill.telemetry import trace
from rill.telemetry.run import Run
from rill.types import PolicyVersion
from rill.workflows.config import FlowConfig
from rill.workflows.launch import Launcher
from rill.workflows.loop import Loop, StepReport


class Steering(NamedTuple):
    launch: Launcher
    loop: Loop
    pilot: Pilot | None = None

    @property
    def run(self) -> Run:
        return self.launch.session.run

    def observe(self, report: StepReport) -> None:
        """The loop's last observer. The history is written after 1, 2, 4, 8 … steps."""
        if report.phase != "step":
            return
        if report.step and report.step & (report.step - 1) == 0:
            self.record()
        self.loop.flow.fleet.attend(report.step)
        if self.pilot is not None:
            self.pilot.after_step(self, report)

    def record(self) -> None:
        with suppress(OSError):  # on a full disk it has to wait
            write_history(self.run, self.history())

    def history(self, since_s: float = 0.0) -> list[CallRecord]:
        return self.launch.session.cluster.history(since_s)

    def resize(self, num_prompts: int) -> None:
        """Prompts of a batch, from the next step on."""
        self.loop.rest()
        session = self.launch.session
        session.ask(session.groups["controller"].resize(num_prompts))

    def switch(
        self,
        placement: Mapping[str, str],
        flow: FlowConfig,
        staying: bool | tuple[str, ...],
        *,
        keeps_state: bool = True,
    ) -> float:
        """Go on with groups on these devices and these chunks, `staying` in memory beside each other there; the seconds
        that it took. `keeps_state`: off where what was learnt so far is of no interest. Raises what kept a group from
        its new devices, once all are back."""
        began_s = time.monotonic()
        with trace.span("switch", lane="loop", step=self.loop.step):
            self.loop.rest()
            if keeps_state:
                self.loop.save()
                self.loop.checkpoints.settle()
            moved, error = self.launch.move(placement)
            if error is None:
                self.launch.session.let_stay(staying)
                self.launch.settle_on(placement, flow)
            if keeps_state:
                folder, trained = self.run.checkpoints_dir / f"step-{self.loop.step:06d}", self.launch.trained
                for loading in [trained[name].load(str(folder / name)) for name in moved if name in trained]:
                    loading.wait(timeout_s=self.loop.config.step_timeout_s)
            if moved:
                fleet = self.loop.flow.fleet = self.launch.fleet()
                if "actor" in moved:
                    fleet.publish(PolicyVersion(self.loop.step + 1))
                elif "rollout" in moved:
                    fleet.catch_up(self.launch.session.groups["rollout"].ranks)
            self.loop.flow.rewire(self.loop.flow.config if error else flow)
        if error is not None:
            raise error
        return time.monotonic() - began_s
