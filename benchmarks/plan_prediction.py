"""Claim: what a plan predicts is what the run takes: within 5 % (median), with the modes in the right order.

    python benchmarks/plan_prediction.py [--steps 12] [--turns 2] [--workloads grpo,ppo,tail,slow,pair] [--svg F]

GRPO (engine, reference, actor), PPO (engine, reference, critic, actor), GRPO with a long-tailed task and GRPO whose
answers wait for a slow tool (both of benchmarks/longtail.py), and the long-tailed one without a reference (engine and
actor: two slots can be split), each on so many slots of one thread: the recipe is profiled, the best plan of every mode
is searched for, and each runs for some steps. `asynchronous` is the split plan one step ahead. Shared machines change
their speed by the minute, so profile and runs take turns, as often as --turns says: a prediction is of all profiles
together, what is real of all runs. One JSON line a mode: seconds of a step, predicted (plans near the best were tried
with the profiles), by the model alone, simulated, and real (the median, without the first steps of each run), by how
much its runs differ (`repeats`: the longest over the shortest), with the seconds of each worker, by the model and real;
then one a workload: the median error, whether the modes come in the right order, and how auto's choice compares with
the best and the worst. Needs a quiet machine with more free cores than slots: hub and driver work beside them. --svg
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rill.config.files import RecipeValues, with_overrides
from rill.config.resolve import dump_config, resolve
from rill.errors import PlanError
from rill.planning.pilot import Pilot
from rill.planning.plan import Plan, choose
from rill.planning.price import price, stage_seconds
from rill.planning.profile import Profile, merge_all
from rill.planning.profiler import measure, try_ahead
from rill.planning.recipe import FOLDED, devices_of, predicted_lanes, problem_of, put_into
from rill.planning.search import Found, Mode
from rill.planning.simulator import simulate
from rill.planning.traced import CHUNK, StepTimes, read_history, steps_of, whole_calls, work_of_step
from rill.telemetry import trace
from rill.telemetry.chrome import read_trace
from rill.telemetry.run import Run
from rill.workflows import WORKFLOWS, recipe_schema
from rill.workflows.loop import StepReport
from rill.workflows.rl_config import RLConfig

SKIP = 3
MODES = (("shared", 0), ("split", 0), ("hybrid", 0), ("split", 1))
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
    from grpo_step_h200 import recipe, save_random_model
    from shapes import QWEN_1_5B, SMALL

    is_cuda = torch.cuda.is_available()
    model = Path(tempfile.gettempdir()) / "plan-prediction-model"
    if not model.exists():
        save_random_model(model, QWEN_1_5B if is_cuda else SMALL, "cuda" if is_cuda else "cpu")
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
    predicted_s: float
    real_s: float
    predicted: list[Lane]
    real: list[Lane]


class Real(NamedTuple):
    """A run under a plan: seconds of a step, of each worker in it, and one step of it."""

    steps_s: list[float]
    busy_s: dict[str, float]
    lanes: list[Lane]

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)


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


def run_under(
    values: RecipeValues,
    plan: Plan,
    root: Path,
    pilot_of: Callable[[Any, Run], Any] = lambda config, run: None,
) -> tuple[list[float], Run]:
    """Seconds of its steps. `pilot_of`: who may change the plan while it runs."""
    put_into(values.values, values.provenance, plan, "plan")
    config = resolved(values)
    steps: list[float] = []

    def observe(report: StepReport) -> None:
        if "time/step_s" in report.metrics:
            steps.append(report.metrics["time/step_s"])

    run = Run.create("measured", root=root, config_toml=dump_config(config))
    pilot = pilot_of(config, run)
    trace.configure(run.path, "driver")
    with run.running():
        WORKFLOWS.load(config.workflow)(config, run, [observe]).run(pilot)
    trace.shutdown()
    return steps, run


def real_run(values: RecipeValues, plan: Plan, root: Path) -> Real:
    steps, run = run_under(values, plan, root)
    calls = whole_calls(read_history(run.path))
    later = steps_of(read_trace(run.path))[SKIP:]
    worked = [work_of_step(calls, step, FOLDED) for step in later]
    groups = {group for one in worked for group in one}
    busy = {g: statistics.median(one[g].busy_s for one in worked if g in one) for g in sorted(groups)}
    counted = steps[min(SKIP, len(steps) - 2) :]
    step_s = statistics.median(counted)
    typical = min(later, key=lambda step: abs(step.ended_s - step.began_s - step_s))
    return Real(counted, busy, real_lanes(run, plan, typical))


def start(config: RLConfig, run: Run, pilot: Pilot) -> None:
    WORKFLOWS.load(config.workflow)(config, run, ()).run(pilot=pilot)


def report(name: str, label: str, plan: Plan, predicted_s: float, real_s: float, **also: object) -> None:
    line = {
        "benchmark": "plan_prediction", "workload": name, "mode": label, "plan": plan.structure,
        "devices": {worker: placed.devices for worker, placed in plan.workers.items()},
        "predicted_s": round(predicted_s, 4), "real_s": round(real_s, 4),
        "error": round(predicted_s / real_s - 1, 4), **also,
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def one_plan(name: str, args: argparse.Namespace) -> None:
    """Predicted by the model, real by the trial of the only plan, in one launch."""
    config = resolved(workload(name, args))
    devices = devices_of(config)
    profile = measure(config, {}, devices, start=start, num_rounds=args.rounds, tries_one=True)
    problem = problem_of(config, {}, profile, devices)
    plan, _ = choose(problem)
    report(name, "auto", plan, plan.step_s, profile.tried[plan.signature])


class Contest:
    """The modes of a workload: profiled and run by turns."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args
        self.configs = {lag: resolved(workload(name, args, lag)) for _, lag in MODES}
        self.devices = devices_of(self.configs[0])
        self.profiles: dict[int, list[Profile]] = {lag: [] for lag in self.configs}
        self.plans: dict[str, tuple[int, Plan]] = {}
        """By mode, with its lag: those that the first profile makes the best."""
        self.runs: dict[str, list[Real]] = {}

    def turn(self) -> None:
        config = self.configs[0]
        profile = measure(config, {}, self.devices, start=start, num_rounds=self.args.rounds)
        print(json.dumps({"workload": self.name, "profile": profile.dumps()}), flush=True)
        for lag, ahead in self.configs.items():
            with suppress(PlanError):
                measured = try_ahead(ahead, {}, profile, self.devices, start=start) if lag else profile
                self.profiles[lag].append(measured)
        if not self.plans:
            self._search()
        for label, (lag, plan) in self.plans.items():
            with tempfile.TemporaryDirectory() as root:
                run = real_run(workload(self.name, self.args, lag), plan, Path(root))
            self.runs.setdefault(label, []).append(run)

    def _search(self) -> None:
        for mode, lag in MODES:
            label = "asynchronous" if lag else mode
            try:
                problem = problem_of(self.configs[lag], {}, self.profiles[lag][0], self.devices)
                plan, _ = choose(problem, Mode(mode), tried=self.profiles[lag][0].tried)
            except (PlanError, IndexError) as error:
                print(
                    json.dumps({"workload": self.name, "mode": label, "impossible": str(error)}), flush=True
                )
                continue
            if plan.signature not in {known.signature for _, known in self.plans.values()}:
                self.plans[label] = lag, plan

    def told(self, label: str) -> Picture:
        """What of a mode is predicted by all profiles together, and real in all runs."""
        (lag, plan), runs = self.plans[label], self.runs[label]
        profiles = self.profiles[lag]
        problem = problem_of(self.configs[lag], {}, merge_all(profiles), self.devices)
        priced = price(problem, plan.tree(problem.graph))
        tried = [profile.tried[plan.signature] for profile in profiles if plan.signature in profile.tried]
        predicted_s = statistics.median(tried) if tried else priced.step_s
        real_s = statistics.median(step_s for run in runs for step_s in run.steps_s)
        medians = [run.step_s for run in runs]
        stages = {stage.nodes[0]: stage_seconds(problem, stage) for stage in priced.tree.stages()}
        busy = {
            w: statistics.median(run.busy_s[w] for run in runs if w in run.busy_s) for w in runs[0].busy_s
        }
        report(
            self.name, label, plan, predicted_s, real_s,
            repeats=round(max(medians) / min(medians), 3),
            by_the_model_s=round(priced.step_s, 4),
            simulated_s=round(simulate(problem, priced.tree, steps=5).mean_step_s, 4),
            workers={w: [round(stages.get(w, 0.0), 4), round(seconds, 4)] for w, seconds in busy.items()},
        )  # fmt: skip
        found = Found(step_s=predicted_s, tree=priced.tree)
        lanes = predicted_lanes(problem, found, plan)
        predicted = [Lane(int(x["lane"].split()[1]), x["name"], x["start_s"], x["end_s"]) for x in lanes]
        return Picture(self.name, label, predicted_s, real_s, predicted, runs[-1].lanes)


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
    parser.add_argument("--turns", type=int, default=2, help="times that it is profiled and run")
    parser.add_argument("--svg", type=Path, help="where to draw the steps")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # for longtail
    pictures: list[Picture] = []
    for name in args.workloads.split(","):
        if name == "h200":
            one_plan(name, args)
            continue
        contest = Contest(name, args)
        for _ in range(args.turns):
            contest.turn()
        rows = {label: contest.told(label) for label in contest.plans}
        pictures += rows.values()
        if args.svg:
            args.svg.write_text(draw(pictures))
        errors = [abs(one.predicted_s / one.real_s - 1) for one in rows.values()]
        others = {one.mode: one.real_s for one in rows.values() if one.mode != "asynchronous"}
        by_prediction = sorted(others, key=lambda label: rows[label].predicted_s)
        auto_s = others[by_prediction[0]]
        summary = {
            "benchmark": "plan_prediction", "workload": name, "limit": 0.05,
            "median_error": round(statistics.median(errors), 4),
            "order_holds": by_prediction == sorted(others, key=others.__getitem__),
            "auto_over_best": round(auto_s / min(others.values()), 3),
            "worst_over_auto": round(max(others.values()) / auto_s, 3),
        }  # fmt: skip
        print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
