"""Whether a run should change its plan between two steps: the decision, without the change.

Answers grow while a model learns to reason, engines join and leave, and a plan that was best is best no more.
`decide` takes
what was predicted and what was seen of each worker, prices the present plan with the times as they are now,
searches again,
and says keep or switch, with a reason to be logged. Noise moves nothing: a worker has drifted only when the median
of its
last steps is off by more than `min_drift` and by more than its own steps differ from each other; and a switch must gain
`min_gain` of the step and pay for itself within the steps that are left.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rill.errors import PlanError
from rill.planning.cost import Pool, Problem
from rill.planning.plan import structure_text
from rill.planning.price import price, stage_seconds
from rill.planning.search import Found, Tree, search


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

    @property
    def is_switch(self) -> bool:
        return self.found is not None


def decide(
    problem: Problem,
    tree: Tree,
    observed: Mapping[str, Sequence[float]],
    *,
    steps_left: int,
    switch_s: float = 0.0,
    steps_since_switch: int = 1_000_000,
    pools: tuple[Pool, ...] | None = None,
    policy: Policy | None = None,
) -> Decision:
    """Keep the plan or switch. `observed`: seconds of a step in which each node worked, the latest last. `pools`: the
    devices there are now, where some have joined or left."""
    policy = policy or Policy()
    present = price(problem, tree)
    drifts = _drifts(problem, present.tree, observed, policy)
    now = _with_times(problem, drifts)
    has_devices_changed = pools is not None and pools != problem.pools
    if has_devices_changed:
        assert pools is not None
        now = replace(now, pools=pools)
    elif not drifts:
        return Decision(reason="no worker has drifted", step_s=present.step_s, problem=problem)
    elif steps_since_switch < policy.cooldown:
        return Decision(
            reason=f"switched {steps_since_switch} steps ago", step_s=present.step_s, problem=problem
        )
    words = ", ".join(f"{name} takes {ratio:.2f} × the predicted time" for name, ratio in drifts.items())
    words = words or "the devices have changed"
    best = search(now)
    try:
        kept_s = price(now, tree).step_s
    except PlanError as error:  # devices of the present plan are gone
        return Decision(
            reason=f"{words}; the plan no longer fits ({error})", found=best, step_s=best.step_s, problem=now
        )
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
    """Nodes that take another time than predicted, and how many times as long."""
    found = {}
    for stage in tree.stages():
        name = stage.nodes[0]
        recent = list(observed.get(name, ()))[-policy.window :]
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
                        o, work_s=o.work_s.scaled(ratio), tail_s=o.tail_s * ratio, step_s=o.step_s * ratio
                    )
                    for o in workers[member].options
                )
                workers[member] = replace(workers[member], options=options)
    return replace(problem, workers=workers)
