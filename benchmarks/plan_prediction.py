"""Claim: what a plan predicts is what the run takes: within 5 % (median), with the modes in the right order.

    python benchmarks/plan_prediction.py [--steps 12] [--rounds 2] [--workloads grpo,ppo,tail,slow,pair] [--svg F]

GRPO (engine, reference, actor), PPO (engine, reference, critic, actor), GRPO with a long-tailed task and GRPO whose
answers wait for a slow tool (both of benchmarks/longtail.py), and the long-tailed one without a reference (engine and
actor: two slots can be split), each on so many slots of one thread: the recipe is profiled, every mode is searched for,
and the plan found runs for some steps. `asynchronous` is the split plan one step
ahead. One JSON line a run: seconds of a step, predicted (plans near the best were tried with the profile), by the model
alone, simulated, and real (the median, without the first steps), with the seconds of each worker, by the model and
real; then one a workload: the median error, whether the modes come in the right order, and how auto compares with the
best and the worst. Needs a quiet machine with more free cores than slots: hub and driver work beside them. Shared
machines change their speed by the minute, so a fixed piece of work is timed with every profile and run: `drift` is how
much longer it took than at the profile, and `error_without_drift` the error with the prediction scaled by it. --svg
draws a step of each mode, as predicted and as it was.

    python benchmarks/plan_prediction.py --workloads h200

predicts the step of benchmarks/grpo_step_h200.py (a 1.5B model, 16 prompts × 16 samples) on one GPU that engine and
trainer share, from a profile alone, and takes it in the same launch. On one device there is one plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rill.config.files import RecipeValues, with_overrides
from rill.config.resolve import dump_config, resolve
from rill.errors import PlanError
from rill.planning.pilot import Pilot
from rill.planning.plan import Plan, choose
from rill.planning.price import price, stage_seconds
from rill.planning.profile import Profile
from rill.planning.profiler import measure, try_ahead
from rill.planning.recipe import FOLDED, devices_of, predicted_lanes, problem_of, put_into
from rill.planning.search import Mode
from rill.planning.simulator import simulate
from rill.planning.traced import CHUNK, StepTimes, read_history, steps_of, whole_calls, work_of_step
from rill.telemetry import trace
from rill.telemetry.chrome import read_trace
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.loop import StepReport
from rill.workflows.rl_config import RLConfig

SKIP = 3
MODES = (("shared", 0), ("split", 0), ("hybrid", 0), ("auto", 0), ("split", 1))
TAIL = {
    "type": "longtail:LongTail",
    "answer_tokens": 16,
    "median_tokens": 24,
    "sigma": 1.0,
    "max_tokens": 200,
}
SLOW = TAIL | {"median_tokens": 16, "sigma": 0.3, "max_tokens": 40, "tool_s": 0.5}


def one_gpu(args: argparse.Namespace) -> RecipeValues:
    """The recipe of benchmarks/grpo_step_h200.py, a sixteenth of its batch; every step has the long tail."""
    from grpo_step_h200 import SHAPE, SMALL, recipe, save_random_model

    is_cuda = torch.cuda.is_available()
    model = Path(tempfile.gettempdir()) / "plan-prediction-model"
    if not model.exists():
        save_random_model(model, SHAPE if is_cuda else SMALL, "cuda" if is_cuda else "cpu")
    settings = argparse.Namespace(
        sequences=256, max_tokens=1024 if is_cuda else 64, median=384 if is_cuda else 16, sigma=0.7, micro=8192,
        tree_packing=False, no_compile=False, group_size=16 if is_cuda else 2, groups=16, steps=args.steps - 1,
        timeout=230.0, resident=True, checkpoint_every=0,
    )  # fmt: skip
    values = recipe(settings, model)
    values["rollout"]["env"]["warmup_groups"] = 0
    return with_overrides(values, [], "h200")


def workload(name: str, args: argparse.Namespace, lag: int = 0) -> RecipeValues:
    if name == "h200":
        return one_gpu(args)
    is_ppo = name == "ppo"
    shape = {
        "model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 384, "vocab_size": 104, "max_position_embeddings": 640,
        "tie_word_embeddings": True,
    }  # fmt: skip
    env = {"type": "single_turn", "reward": {"type": "exact", "answer": "last_number"}}
    values: dict[str, Any] = {
        "workflow": "ppo" if is_ppo else "grpo",
        "model": {"shape": shape, "tokenizer": "chars"},
        "data": {"type": "arithmetic", "digits": [3, 3]},
        "rollout": {
            "group_size": 4,
            "sampling": {"max_new_tokens": 200 if name in ("tail", "pair") else 40},
            "env": {"tail": TAIL, "pair": TAIL, "slow": SLOW}.get(name, env),
        },
        "algorithm": {
            "type": "ppo" if is_ppo else "grpo",
            "kl": {"coefficient": 0.0 if name == "pair" else 0.02},
            **({"correction": "tis"} if lag else {}),
        },
        "trainer": {"optimizer": {"learning_rate": 1e-4}},
        "loop": {"steps": args.steps, "prompts_per_step": 32, "max_lag": lag},
        "eval": {"every": 0, "num_prompts": 0},
        "cluster": {"devices": args.devices, "threads": 1},
    }
    if is_ppo:
        values["critic"] = {"optimizer": {"learning_rate": 1e-4}}
    return with_overrides(values, [], name)


def resolved(values: RecipeValues) -> RLConfig:
    config = resolve(recipe_schema(values.values), values.values, values.provenance)
    assert isinstance(config, RLConfig)
    return config


class Lane(NamedTuple):
    """What a worker did on a device, from the beginning of a step on."""

    device: int
    worker: str
    start_s: float
    end_s: float


class Picture(NamedTuple):
    """A step under a plan, predicted and real."""

    workload: str
    mode: str
    drift: float
    predicted_s: float
    real_s: float
    predicted: list[Lane]
    real: list[Lane]


class Real(NamedTuple):
    """A run under a plan: seconds of a step, of each worker in it, and one step of it."""

    step_s: float
    busy_s: dict[str, float]
    lanes: list[Lane]


def real_lanes(run: Run, plan: Plan, step: StepTimes) -> list[Lane]:
    """An engine while it has its devices, a stage while it works on a chunk."""
    seen: list[tuple[int, str, float, float]] = []
    for call in whole_calls(read_history(run.path)):
        if call.group == "rollout":
            seen += [(d, call.group, t.started_s, t.ended_s) for t in call.turns for d in t.devices]
    for event in read_trace(run.path):
        group, _, rank = event.lane.partition("[")
        if event.name == CHUNK and group in plan.workers:
            begin_s = event.at_ns / 1e9
            device = plan.workers[group].ids[int(rank.rstrip("]"))]
            seen.append((device, group, begin_s, begin_s + event.duration_ns / 1e9))
    return [
        Lane(device, group, max(a, step.began_s) - step.began_s, min(b, step.ended_s) - step.began_s)
        for device, group, a, b in seen
        if b > step.began_s and a < step.ended_s
    ]


def real_run(values: RecipeValues, plan: Plan, root: Path) -> Real:
    put_into(values.values, values.provenance, plan, "plan")
    config = resolved(values)
    steps: list[float] = []

    def observe(report: StepReport) -> None:
        if "time/step_s" in report.metrics:
            steps.append(report.metrics["time/step_s"])

    run = Run.create("measured", root=root, config_toml=dump_config(config))
    trace.configure(run.path, "driver")
    with run.running():
        WORKFLOWS.load(config.workflow)(config, run, [observe]).run()
    trace.shutdown()
    calls = whole_calls(read_history(run.path))
    later = steps_of(read_trace(run.path))[SKIP:]
    worked = [work_of_step(calls, step, FOLDED) for step in later]
    groups = {group for one in worked for group in one}
    busy = {g: statistics.median(one[g].busy_s for one in worked if g in one) for g in sorted(groups)}
    step_s = statistics.median(steps[min(SKIP, len(steps) - 2) :])
    typical = min(later, key=lambda step: abs(step.ended_s - step.began_s - step_s))
    return Real(step_s, busy, real_lanes(run, plan, typical))


def pace() -> float:
    """Seconds of a fixed piece of work: products of the size of the model's, one thread. The median of many."""
    torch.set_num_threads(1)
    a, b = torch.randn(256, 128), torch.randn(128, 384)
    times = []
    for _ in range(40):
        began_s = time.perf_counter()
        for _ in range(100):
            torch.mm(a, b)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def start(config: RLConfig, run: Run, pilot: Pilot) -> None:
    WORKFLOWS.load(config.workflow)(config, run, ()).run(pilot=pilot)


def report(name: str, label: str, plan: Plan, real_s: float, **also: object) -> None:
    line = {
        "benchmark": "plan_prediction", "workload": name, "mode": label, "plan": plan.structure,
        "devices": {worker: placed.devices for worker, placed in plan.workers.items()},
        "predicted_s": round(plan.step_s, 4), "real_s": round(real_s, 4),
        "error": round(plan.step_s / real_s - 1, 4), **also,
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def one_plan(name: str, args: argparse.Namespace) -> None:
    """Predicted by the model, real by the trial of the only plan, in one launch."""
    config = resolved(workload(name, args))
    devices = devices_of(config)
    profile = measure(config, {}, devices, start=start, num_rounds=args.rounds, tries_one=True)
    problem = problem_of(config, {}, profile, devices)
    plan, _ = choose(problem)
    report(name, "auto", plan, profile.tried[plan.signature])


def compared(
    name: str, mode: str, lag: int, args: argparse.Namespace, profile: Profile, profile_pace_s: float
) -> Picture:
    values = workload(name, args, lag)
    config = resolved(values)
    devices = devices_of(config)
    if lag:
        profile = try_ahead(config, {}, profile, devices, start=start)
    problem = problem_of(config, {}, profile, devices)
    plan, found = choose(problem, Mode(mode), tried=profile.tried)
    priced = price(problem, found.tree)
    before_s = pace()
    with tempfile.TemporaryDirectory() as root:
        real = real_run(values, plan, Path(root))
    drift = (before_s + pace()) / 2 / profile_pace_s
    label = "asynchronous" if lag else mode
    stages = {stage.nodes[0]: stage_seconds(problem, stage) for stage in priced.tree.stages()}
    report(
        name, label, plan, real.step_s,
        drift=round(drift, 4),
        error_without_drift=round(plan.step_s * drift / real.step_s - 1, 4),
        by_the_model_s=round(priced.step_s, 4),
        simulated_s=round(simulate(problem, found.tree, steps=5).mean_step_s, 4),
        workers={w: [round(stages.get(w, 0.0), 4), round(seconds, 4)] for w, seconds in real.busy_s.items()},
    )  # fmt: skip
    lanes = predicted_lanes(problem, found, plan)
    predicted = [Lane(int(x["lane"].split()[1]), x["name"], x["start_s"], x["end_s"]) for x in lanes]
    return Picture(name, label, drift, plan.step_s, real.step_s, predicted, real.lanes)


def draw(pictures: list[Picture]) -> str:
    """Predicted on the left, real on the right, one block a mode."""
    colours = dict(
        zip(("rollout", "reference", "critic", "actor"), ("#4c78a8", "#f58518", "#b279a2", "#54a24b"))
    )
    devices = 1 + max(lane.device for one in pictures for lane in one.predicted)
    scale = 360 / max(max(one.predicted_s, one.real_s) for one in pictures)
    block, height = 22 + 16 * devices, 46 + (36 + 16 * devices) * len(pictures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="860" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="860" height="{height}" fill="white"/><text x="10" y="18" font-size="13">'
        "A step, predicted (left) and real (right)</text>"
    ]
    for i, (name, colour) in enumerate(colours.items()):
        parts.append(f'<rect x="{480 + 90 * i}" y="9" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{494 + 90 * i}" y="18">{name}</text>')
    for i, one in enumerate(pictures):
        top = 46 + (block + 14) * i
        sides = ((60, one.predicted_s, one.predicted), (460, one.real_s, one.real))
        for left, step_s, lanes in sides:
            parts.append(f'<text x="{left}" y="{top}">{one.workload}, {one.mode}, {step_s:.3g} s</text>')
            parts.append(
                f'<rect x="{left}" y="{top + 4}" width="{step_s * scale:.1f}" height="{16 * devices}" fill="#eee"/>'
            )
            for lane in lanes:
                for start_s, end_s in drawn(lane, step_s, is_ahead=one.mode == "asynchronous"):
                    parts.append(
                        f'<rect x="{left + start_s * scale:.1f}" y="{top + 6 + 16 * lane.device}" height="12" '
                        f'width="{max(0.5, (end_s - start_s) * scale):.1f}" fill="{colours[lane.worker]}"/>'
                    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn(lane: Lane, step_s: float, *, is_ahead: bool) -> list[tuple[float, float]]:
    """A batch that begins before its step, or ends after it, is seen in a step as parts of two batches."""
    if not is_ahead:
        return [(lane.start_s, lane.end_s)]
    moved = [(lane.start_s + shift, lane.end_s + shift) for shift in (-step_s, 0.0, step_s)]
    return [(max(0.0, start), min(step_s, end)) for start, end in moved if start < step_s and end > 0.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--workloads", default="grpo,ppo,tail,slow")
    parser.add_argument("--rounds", type=int, default=2, help="times that every size is profiled")
    parser.add_argument("--svg", type=Path, help="where to draw the steps")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # for longtail
    pictures: list[Picture] = []
    for name in args.workloads.split(","):
        if name == "h200":
            one_plan(name, args)
            continue
        config = resolved(workload(name, args))
        before_s = pace()
        profile = measure(config, {}, devices_of(config), start=start, num_rounds=args.rounds)
        pace_s = (before_s + pace()) / 2
        print(json.dumps({"workload": name, "profile": profile.dumps()}), flush=True)
        rows: dict[str, Picture] = {}
        for mode, lag in MODES:
            label = "asynchronous" if lag else mode
            try:
                rows[label] = compared(name, mode, lag, args, profile, pace_s)
            except PlanError as error:
                print(json.dumps({"workload": name, "mode": label, "impossible": str(error)}), flush=True)
        pictures += [one for one in rows.values() if one.mode != "auto"]
        if args.svg:
            args.svg.write_text(draw(pictures))
        errors = [abs(one.predicted_s / one.real_s - 1) for one in rows.values()]
        without = [abs(one.predicted_s * one.drift / one.real_s - 1) for one in rows.values()]
        auto_s = rows["auto"].real_s
        others = {one.mode: one.real_s for one in rows.values() if one.mode not in ("auto", "asynchronous")}
        by_prediction = sorted(others, key=lambda label: rows[label].predicted_s)
        summary = {
            "benchmark": "plan_prediction", "workload": name, "limit": 0.05,
            "median_error": round(statistics.median(errors), 4),
            "median_error_without_drift": round(statistics.median(without), 4),
            "order_holds": by_prediction == sorted(others, key=others.__getitem__),
            "auto_over_best": round(auto_s / min(others.values()), 3),
            "worst_over_auto": round(max(others.values()) / auto_s, 3),
        }  # fmt: skip
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
