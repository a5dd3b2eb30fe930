"""Claim: after a drift a run replans by itself within five steps, and wins back ≥ 80 % of what the best plan gains.

    python benchmarks/replan.py [--drift-at 5] [--after 10] [--alone 7]

Four-model PPO with a long-tailed task on two slots of one thread begins with the best hybrid plan of its profile, as
with `--plan hybrid`: engine and trainers apart. From step --drift-at on every answer is three times as long. The
replanner that every planned run has sees the steps' times alone. After that run, by themselves, with long answers from
the first step on: the hybrid plan (`kept`) and the best one (`best`). JSON lines: seconds of every step, when the run
switched and why, and the share of the gap between `kept` and `best` that the steps after the switch win back. Needs two
idle cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from plan_prediction import SKIP, TAIL, resolved, run_under, start, workload
from report import report

from rill.config.files import RecipeValues, with_overrides
from rill.planning.plan import Plan, choose
from rill.planning.profiler import measure
from rill.planning.recipe import devices_of, leave_in, problem_of
from rill.planning.replan import Replanner
from rill.planning.search import Mode
from rill.telemetry.run import Run

LONGER = 3.0


def recipe(steps: int, longer_from: int) -> RecipeValues:
    values = workload("ppo", argparse.Namespace(steps=steps, devices=2)).values
    values["loop"]["prompts_per_step"] = 16
    values["rollout"]["sampling"]["max_new_tokens"] = 620
    values["rollout"]["env"] = {**TAIL, "longer": LONGER, "longer_from": longer_from}
    return with_overrides(values, [], "replan")


def replanner(plan: Plan, left: dict[str, Any], config: Any, run: Run) -> Replanner:
    """`left`: what the plan rests on."""
    leave_in(run.path, plan, **left)
    pilot = Replanner.of(config, run, devices_of(config))
    assert pilot is not None, "the run does not replan"
    return pilot


def alone(name: str, plan: Plan, steps: int) -> float:
    with tempfile.TemporaryDirectory() as root:
        steps_s, _ = run_under(recipe(steps, 0), plan, Path(root))
    step_s = statistics.median(steps_s[SKIP:])
    report(run=name, plan=plan.structure, step_s=step_s, steps_s=[round(s, 2) for s in steps_s])
    return step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drift-at", type=int, default=5, help="step from which on answers are longer")
    parser.add_argument("--after", type=int, default=10, help="steps from there on")
    parser.add_argument("--alone", type=int, default=7, help="steps of the plans by themselves")
    args = parser.parse_args()
    never = 1_000_000_000
    short = resolved(recipe(1, never))
    devices = devices_of(short)
    profile = measure(short, {}, devices, start=start, num_rounds=1)
    problem = problem_of(short, {}, profile, devices)
    plan, found = choose(problem, Mode.HYBRID, tried=profile.tried)
    report(run="hybrid", plan=plan.structure, predicted_s=plan.step_s)
    values = recipe(args.drift_at + args.after, args.drift_at * short.loop.prompts_per_step)
    left = {"problem": problem, "found": found, "profile": profile}
    with tempfile.TemporaryDirectory() as root:
        steps_s, run = run_under(values, plan, Path(root), functools.partial(replanner, plan, left))
        why = json.loads((run.path / "plan.json").read_text()).get("why", [])
        followed = Plan.load(run.path / "plan.toml")
    report(run="replans", plan=followed.structure, steps_s=[round(s, 2) for s in steps_s], why=why)
    switched = [int(line.split("after step ")[1].split(",")[0]) for line in why if "after step" in line]
    kept_s = alone("kept", plan, args.alone)
    best_s = alone("best", choose(problem, tried=profile.tried)[0], args.alone)
    moved_s = statistics.median(steps_s[switched[-1] + 1 :]) if switched else kept_s
    report(
        benchmark="replan",
        kept_s=kept_s,
        best_s=best_s,
        moved_s=moved_s,
        recovered=(kept_s - moved_s) / (kept_s - best_s),
        steps_until=switched[0] - args.drift_at if switched else None,
        goal="0.8 within 5 steps",
    )


if __name__ == "__main__":
    main()
