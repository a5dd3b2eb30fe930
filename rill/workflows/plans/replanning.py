"""Replanning: a run that follows a plan compares what its steps take with what was predicted, and changes its plan when
that pays.

After every step the seconds that each group worked come out of the runtime's history. `rill.planning.replan.decide`
says keep or switch (drift beyond noise, a gain worth having, earned back in the steps left, some steps since the last);
the steering switches, between two steps, without a restart. Each switch is told, with its reason, and some steps later
what it gained. Synchronous runs only: an engine that runs ahead is never seen to begin or end a batch.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rill.errors import PlanError, RunError
from rill.planning.cost import Pin, Problem
from rill.planning.plan import Plan
from rill.planning.price import price
from rill.planning.profile import Profile
from rill.planning.replan import Decision, Policy, decide
from rill.planning.search import Tree
from rill.planning.traced import StepTimes, whole_calls, work_of_step
from rill.runtime.device.device import Device
from rill.telemetry.run import Run
from rill.workflows.loop import StepReport
from rill.workflows.plans.recipe import (
    FOLDED,
    PLAN_TOML,
    PROFILE_TOML,
    edges_of,
    identity_of,
    leave_in,
    placement_of,
    problem_of,
    rewrite_config,
)
from rill.workflows.rl_config import RLConfig
from rill.workflows.steering import Steering

log = logging.getLogger(__name__)


@dataclass
class Replanner:
    """A pilot (steering.py)."""

    config: RLConfig
    plan: Plan
    profile: Profile
    problem: Problem
    tree: Tree
    """The plan, priced."""
    policy: Policy = field(default_factory=Policy)
    _began_s: float = 0.0
    _last: StepTimes | None = None
    _observed: dict[str, list[float]] = field(default_factory=dict)
    _steps_s: list[float] = field(default_factory=list)
    _since_switch: int = 1_000_000
    _before_s: float = 0.0
    _why: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: RLConfig, run: Run, devices: Sequence[Device]) -> Replanner | None:
        """For a run folder that holds a plan with its profile."""
        files = [run.path / name for name in (PLAN_TOML, PROFILE_TOML)]
        if config.loop.max_lag > 0 or not all(file.exists() for file in files):
            return None
        plan, profile = Plan.load(files[0]), Profile.load(files[1])
        if any(getattr(config.placement, n, ids) != ids for n, ids in placement_of(plan).items()):
            log.warning("the recipe places groups elsewhere than %s: the plan is not followed", files[0])
            return None
        mine = identity_of(config, len(devices), "")
        try:
            profile.check({name: getattr(mine, name) for name in ("model", "machine", "version")})
        except PlanError as error:
            log.warning("the run does not replan: %s", error)
            return None
        pins = {name: Pin(ids=placed.ids) for name, placed in plan.workers.items() if placed.pinned}
        problem = replace(problem_of(config, {}, profile, devices), pins=pins)
        return cls(config, plan, profile, problem, price(problem, plan.tree(problem.graph)).tree)

    def after_step(self, steering: Steering, report: StepReport) -> None:
        now_s = time.time()
        self._see(steering)
        is_clean = self._began_s > 0 and not any(name.startswith("eval/") for name in report.metrics)
        self._last = StepTimes(began_s=self._began_s, ended_s=now_s) if is_clean else None
        if is_clean:
            self._steps_s.append(report.metrics["time/step_s"])
        self._since_switch += 1
        if self._since_switch == self.policy.window + 1 and self._before_s:
            self._tell_gain()
        decision = self._decide(report.num_steps - report.step)
        if decision is not None and decision.found is not None:
            self._switch(steering, decision, report.step)
        self._began_s = time.time()

    def _see(self, steering: Steering) -> None:
        """What the groups did in the step before the last: by now all of its calls have told."""
        if self._last is None:
            return
        calls = whole_calls(steering.history(self._last.began_s))
        for group, worked in work_of_step(calls, self._last, FOLDED).items():
            self._observed.setdefault(group, []).append(worked.busy_s)

    def _decide(self, steps_left: int) -> Decision | None:
        if min((len(seen) for seen in self._observed.values()), default=0) < self.policy.window:
            return None
        return decide(
            self.problem,
            self.tree,
            self._observed,
            steps_left=steps_left,
            switch_s=self.profile.switch_s,
            steps_since_switch=self._since_switch,
            policy=self.policy,
        )

    def _switch(self, steering: Steering, decision: Decision, step: int) -> None:
        found = decision.found
        assert found is not None, "a switch has a plan"
        plan = Plan.of(decision.problem, found, basis=self.profile.basis(), notes=self.plan.notes)
        self._before_s = statistics.median(self._steps_s[-self.policy.window :])
        try:
            flow = self.config.flow.model_copy(update={"edges": edges_of(plan)})
            took_s = steering.switch(placement_of(plan), flow)
        except (RunError, PlanError) as error:
            log.warning("replanning: the switch failed, the run goes on as before: %s", error)
            self._since_switch = 0
            return
        self._say(f"replanned after step {step}, in {took_s:.1f} s: {decision.reason}")
        self.plan, self.problem, self.tree = plan, decision.problem, found.tree
        self._since_switch, self._observed, self._last = 0, {}, None
        rewrite_config(steering.run.config_path, plan, f"replanned after step {step}")
        leave_in(
            steering.run.path,
            plan,
            problem=decision.problem,
            found=found,
            profile=self.profile,
            why=self._why,
        )

    def _tell_gain(self) -> None:
        after_s = statistics.median(self._steps_s[-self.policy.window :])
        gain = self._before_s / after_s - 1
        self._say(
            f"replanning: a step took {self._before_s:.3g} s before and takes {after_s:.3g} s now ({gain:+.0%})"
        )
        self._before_s = 0.0

    def _say(self, line: str) -> None:
        log.warning("%s", line)
        self._why.append(line)
