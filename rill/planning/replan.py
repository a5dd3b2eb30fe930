"""Replanning: a run that follows a plan compares what its steps take with what was predicted, and changes its plan when
that pays.

Answers grow while a model learns to reason, and a plan that was best is best no more. After every step the seconds that
each group worked come out of the runtime's history. `decide` prices the present plan with the times as they are now,
searches again, and says keep or switch, with a reason to be logged. Noise moves nothing: a worker has drifted only when
the median of its last steps is off by more than `min_drift` and by more than its own steps differ from each other; and
a switch must gain `min_gain` of the step and pay for itself within the steps that are left.
The steering switches, between two steps, without a restart. Each switch is told, with its reason, and some steps later
what it gained. Synchronous runs only: an engine that runs ahead is never seen to begin or end a batch.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rill.errors import PlanError, RunError
from rill.planning.cost import Problem
from rill.planning.pilot import Report, Steering
from rill.planning.plan import Plan, structure_text
from rill.planning.price import price, stage_seconds
from rill.planning.profile import Profile
from rill.planning.recipe import (
    FOLDED,
    PLAN_TOML,
    PROFILE_TOML,
    Recipe,
    edges_of,
    identity_of,
    leave_in,
    placement_of,
    problem_of,
    rewrite_config,
)
from rill.planning.search import Found, Tree, search
from rill.planning.traced import StepTimes, whole_calls, work_of_step
from rill.runtime.device.device import Device
from rill.telemetry.run import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    window: int = 4
    """Steps that are looked at; a worker with fewer is taken as predicted."""
    min_drift: float = 0.1
    """Relative change of a worker's time below which nothing is done."""
    min_gain: float = 0.05
    """Of the step, that another plan must save."""
    cooldown: int = 5
    """Steps after a switch in which there is no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    reason: str
    found: Found | None = None
    """The new plan; None: keep the present one."""
    step_s: float
    """Of the plan that is to be followed, with the times as they are now."""
    problem: Problem
    """With the times as they are now: what the next decision starts from after a switch."""


def decide(
    problem: Problem,
    tree: Tree,
    observed: Mapping[str, Sequence[float]],
    *,
    steps_left: int,
    switch_s: float = 0.0,
    steps_since_switch: int = 1_000_000,
    policy: Policy | None = None,
) -> Decision:
    """Keep the plan or switch. `observed`: seconds of a step in which each node worked, the latest last."""
    policy = policy or Policy()
    present = price(problem, tree)
    drifts = _drifts(problem, present.tree, observed, policy)
    if not drifts:
        return Decision(reason="no worker has drifted", step_s=present.step_s, problem=problem)
    if steps_since_switch < policy.cooldown:
        return Decision(
            reason=f"switched {steps_since_switch} steps ago", step_s=present.step_s, problem=problem
        )
    words = ", ".join(f"{name} takes {ratio:.2f} × the predicted time" for name, ratio in drifts.items())
    now = _with_times(problem, drifts)
    best, kept_s = search(now), price(now, tree).step_s
    gain_s = kept_s - best.step_s
    if gain_s < policy.min_gain * kept_s:
        reason = f"{words}; the best plan would save {max(0.0, gain_s) / kept_s:.1%} of a step, too little"
        return Decision(reason=reason, step_s=kept_s, problem=now)
    if gain_s * steps_left <= switch_s:
        reason = f"{words}; {steps_left} steps are too few to earn back a switch of {switch_s:.3g} s"
        return Decision(reason=reason, step_s=kept_s, problem=now)
    reason = (
        f"{words}; a step of {kept_s:.4g} s becomes {best.step_s:.4g} s with {structure_text(best.tree)}, "
        f"earned back after {switch_s / gain_s:.1f} steps"
    )
    return Decision(reason=reason, found=best, step_s=best.step_s, problem=now)


def _drifts(
    problem: Problem, tree: Tree, observed: Mapping[str, Sequence[float]], policy: Policy
) -> dict[str, float]:
    """Nodes that take another time than predicted, and how many times as long. The members of a cycle take their times
    one after the other where they share devices, and the longest of them where each has its own."""
    members = {node.name: node.members or (node.name,) for node in problem.graph.nodes}
    found = {}
    for stage in tree.stages():
        name = stage.nodes[0]
        each = [observed.get(member, ())[-policy.window :] for member in members[name]]
        recent = [max(seconds) if stage.is_apart else sum(seconds) for seconds in zip(*each)]
        predicted = stage_seconds(problem, stage)
        if len(recent) < policy.window or predicted <= 0:
            continue
        middle = statistics.median(recent)
        off = abs(middle - predicted)
        noise = statistics.median(abs(x - middle) for x in recent)
        is_one_sided = all(x > predicted for x in recent) or all(x < predicted for x in recent)
        if is_one_sided and off > policy.min_drift * predicted and off > 3 * noise:
            found[name] = middle / predicted
    return found


def _with_times(problem: Problem, drifts: Mapping[str, float]) -> Problem:
    workers = dict(problem.workers)
    for node in problem.graph.nodes:
        ratio = drifts.get(node.name)
        for member in node.members or (node.name,):
            if ratio is not None:
                options = tuple(
                    replace(
                        o,
                        work_s=o.work_s.scaled(ratio),
                        **{name: ratio * getattr(o, name) for name in ("joined_s", "tail_s", "step_s")},
                    )
                    for o in workers[member].options
                )
                workers[member] = replace(workers[member], options=options)
    return replace(problem, workers=workers)


@dataclass
class Replanner:
    """A pilot."""

    config: Recipe
    plan: Plan
    profile: Profile
    problem: Problem
    tree: Tree
    """The plan, priced."""
    policy: Policy = Policy()
    _began_s: float = 0.0
    _last: StepTimes | None = None
    _observed: dict[str, list[float]] = field(default_factory=dict)
    _steps_s: list[float] = field(default_factory=list)
    _since_switch: int = 1_000_000
    _before_s: float = 0.0
    _why: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: Recipe, run: Run, devices: Sequence[Device]) -> Replanner | None:
        """For a run folder that holds a plan with its profile."""
        files = [run.path / name for name in (PLAN_TOML, PROFILE_TOML)]
        if config.loop.max_lag > 0 or not all(file.exists() for file in files):
            return None
        mine = identity_of(config, len(devices), "")
        try:
            plan, profile = Plan.load(files[0]), Profile.load(files[1])
            if any(getattr(config.placement, n, ids) != ids for n, ids in placement_of(plan).items()):
                raise PlanError(f"the recipe places groups elsewhere than {files[0]}")
            profile.check({name: getattr(mine, name) for name in ("model", "machine", "version")})
            pins = {name: placed.ids for name, placed in plan.workers.items() if placed.pinned}
            problem = replace(problem_of(config, {}, profile, devices), pins=pins)
            tree = price(problem, plan.tree(problem.graph)).tree
        except PlanError as error:
            log.warning("the run does not replan: %s", error)
            return None
        return cls(config, plan, profile, problem, tree)

    def after_step(self, steering: Steering, report: Report) -> None:
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
        try:
            flow = self.config.flow.model_copy(update={"edges": edges_of(plan)})
            took_s = steering.switch(placement_of(plan), flow, plan.staying)
        except (RunError, PlanError) as error:
            log.warning("replanning: the switch failed, the run goes on as before: %s", error)
            self._since_switch = 0
            return
        self._before_s = statistics.median(self._steps_s[-self.policy.window :])
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
