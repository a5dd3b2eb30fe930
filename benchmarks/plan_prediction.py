"""Claim: what a plan predicts is what the run takes: within 5 % (median), with the modes in the right order.

    python benchmarks/plan_prediction.py [--steps 12] [--devices 3] [--workloads grpo,ppo,tail] [--rounds 2]

GRPO (engine, reference, actor), PPO (engine, reference, critic, actor) and GRPO with a long-tailed task (the tail of
benchmarks/longtail.py), each on so many slots of one thread: the recipe is profiled, every mode is searched for, and
the plan found runs for some steps. `asynchronous` is the split plan one step ahead. One JSON line a run: seconds of a
step, predicted (synchronous plans were tried with the profile), by the model alone, simulated, and real (the median,
without the first steps); then one a workload: the median error, whether the modes come in the right order, and how auto
compares with the best and the worst. Needs a quiet machine with as many free cores as slots.

    python benchmarks/plan_prediction.py --workloads h200 --steps 4 --rounds 1

predicts the step of benchmarks/grpo_step_h200.py (a 1.5B model, 32 prompts × 16 samples) on one GPU that engine and
trainer share. On one device there is one plan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from rill.config.files import RecipeValues, with_overrides
from rill.config.resolve import dump_config, resolve
from rill.errors import PlanError
from rill.planning.pilot import Pilot
from rill.planning.plan import Plan, choose
from rill.planning.price import price
from rill.planning.profiler import measure
from rill.planning.recipe import devices_of, problem_of, put_into
from rill.planning.search import Mode
from rill.planning.simulator import simulate
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


def one_gpu(args: argparse.Namespace) -> RecipeValues:
    """The recipe of benchmarks/grpo_step_h200.py, an eighth of its batch; every step has the long tail."""
    from grpo_step_h200 import SHAPE, SMALL, recipe, save_random_model

    is_cuda = torch.cuda.is_available()
    model = Path(tempfile.gettempdir()) / "plan-prediction-model"
    if not model.exists():
        save_random_model(model, SHAPE if is_cuda else SMALL, "cuda" if is_cuda else "cpu")
    settings = argparse.Namespace(
        sequences=512, max_tokens=1024 if is_cuda else 64, median=384 if is_cuda else 16, sigma=0.7, micro=8192,
        tree_packing=False, no_compile=False, group_size=16, groups=32, steps=args.steps - 1, timeout=230.0,
        resident=True,
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
            "sampling": {"max_new_tokens": 200 if name == "tail" else 40},
            "env": TAIL if name == "tail" else env,
        },
        "algorithm": {
            "type": "ppo" if is_ppo else "grpo",
            "kl": {"coefficient": 0.02},
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


def real_step_s(values: RecipeValues, plan: Plan, root: Path) -> float:
    put_into(values.values, values.provenance, plan, "plan")
    config = resolved(values)
    steps: list[float] = []

    def observe(report: StepReport) -> None:
        if "time/step_s" in report.metrics:
            steps.append(report.metrics["time/step_s"])

    run = Run.create("measured", root=root, config_toml=dump_config(config))
    with run.running():
        WORKFLOWS.load(config.workflow)(config, run, [observe]).run()
    return statistics.median(steps[min(SKIP, len(steps) - 2) :])


def start(config: RLConfig, run: Run, pilot: Pilot) -> None:
    WORKFLOWS.load(config.workflow)(config, run, ()).run(pilot=pilot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--workloads", default="grpo,ppo,tail")
    parser.add_argument("--rounds", type=int, default=2, help="times that every size is profiled")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # for longtail
    for name in args.workloads.split(","):
        values = workload(name, args)
        config = resolved(values)
        devices = devices_of(config)
        profile = measure(config, {}, devices, start=start, num_rounds=args.rounds)
        rows: dict[str, tuple[float, float]] = {}
        for mode, lag in MODES if name != "h200" else (("auto", 0),):
            values = workload(name, args, lag)
            problem = problem_of(resolved(values), {}, profile, devices)
            label = "asynchronous" if lag else mode
            try:
                plan, found = choose(problem, Mode(mode), tried=profile.tried)
            except PlanError as error:
                print(json.dumps({"workload": name, "mode": label, "impossible": str(error)}), flush=True)
                continue
            model_s = price(problem, found.tree).step_s
            simulated_s = simulate(problem, found.tree, steps=5).mean_step_s
            with tempfile.TemporaryDirectory() as root:
                real_s = real_step_s(values, plan, Path(root))
            rows[label] = (plan.step_s, real_s)
            line = {
                "benchmark": "plan_prediction", "workload": name, "mode": label, "plan": plan.structure,
                "devices": {worker: placed.devices for worker, placed in plan.workers.items()},
                "predicted_s": round(plan.step_s, 4), "by_the_model_s": round(model_s, 4),
                "simulated_s": round(simulated_s, 4),
                "real_s": round(real_s, 4), "error": round(plan.step_s / real_s - 1, 4),
            }  # fmt: skip
            print(json.dumps(line), flush=True)
        if name == "h200":
            continue
        errors = [abs(predicted / real - 1) for predicted, real in rows.values()]
        auto_s = rows["auto"][1]
        others = {label: real for label, (_, real) in rows.items() if label not in ("auto", "asynchronous")}
        by_prediction = sorted(others, key=lambda label: rows[label][0])
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
