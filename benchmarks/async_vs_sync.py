"""Asynchronous against synchronous training on split devices with a long-tailed task: throughput, busy share, score.

    python benchmarks/async_vs_sync.py [--steps 30] [--lags 0,1] [--seeds 2] [--eval-every 0] [--small]

Two device slots of one thread each: the engine on one, the trainer on the other. The task is two-digit addition after a
supervised warm-up; behind every answer follows a tail of tokens of log-normal length (benchmarks/longtail.py), which is
sampled and trained through like the rest but stays out of the loss. Every lag starts from the same seed and runs the
same steps with the same recipe (truncated importance weights, which are 1 at lag 0). Prints JSON lines:

    run       samples and tokens per second over the steps after --skip, without the last two: nothing is sampled for a
              step that does not come. busy: share of that time in which the engine had something to sample (the trainer
              trained), from the trace; rollout_idle_in: in which part of a step it had nothing; accuracy on held-out
              problems before, after, and every --eval-every steps (which costs both sides time: leave it 0 for
              figures of throughput)
    ratio     throughput at each lag over lag 0; the goal is 1.5 at lag 1, with the engine busy 90 % of the time.
              train_slowdown: how much longer the trainer takes beside the engine than alone; far above 1 the machine
              did not give two cores of their own, and nothing can be learnt about the loop
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from report import report

from rill.config.files import load_recipe
from rill.telemetry import trace
from rill.telemetry.run import Run
from rill.workflows.grpo import GRPO
from rill.workflows.loop import StepReport

TINY = Path(__file__).resolve().parents[1] / "recipes" / "parts" / "tiny_model.toml"
MAX_CONTEXT = 640


def recipe(args: argparse.Namespace, lag: int, seed: int) -> dict[str, Any]:
    model = load_recipe(TINY).values["model"]
    model["shape"] = {**model["shape"], "max_position_embeddings": MAX_CONTEXT}
    return {
        "workflow": "grpo",
        "seed": seed,
        "model": model,
        "data": {"type": "arithmetic", "digits": [2, 2], "worked": 0.5},
        "sft": {"steps": args.warmup, "learning_rate": 2e-3},
        "rollout": {
            "group_size": 8,
            "sampling": {"max_new_tokens": args.longest, "temperature": 1.0},
            "env": {
                "type": "longtail:LongTail",
                "answer_tokens": 32,
                "median_tokens": args.median,
                "sigma": args.sigma,
                "max_tokens": args.longest,
            },
        },
        "algorithm": {"type": "grpo", "correction": {"type": args.correction}},
        "trainer": {"optimizer": {"learning_rate": args.rate}},
        "loop": {"steps": args.steps, "prompts_per_step": args.groups, "max_lag": lag},
        "eval": {"every": args.eval_every, "num_prompts": 256, "max_new_tokens": 32},
        "placement": {"rollout": "0", "actor": "1"},
        "cluster": {"devices": 2, "threads": 1},
    }


def run(args: argparse.Namespace, lag: int, seed: int, root: Path) -> dict[str, Any]:
    config = GRPO.Config.model_validate(recipe(args, lag, seed))
    folder = Run.create(f"lag{lag}-{seed}", root=root)
    trace.configure(folder.path, "driver")
    reports: list[StepReport] = []
    GRPO(config, folder, [reports.append]).run()
    trace.shutdown()
    last = args.steps - 2
    steps = [r for r in reports if r.phase == "step" and args.skip < r.step <= last]
    spans = [e for e in trace.read_trace(folder.path) if e.kind in ("span", "open")]
    timed = [
        e for e in spans if e.name == "step" and e.lane == "loop" and args.skip <= e.attributes["step"] < last
    ]
    start, end = min(e.at_ns for e in timed), max(e.at_ns + e.duration_ns for e in timed)
    seconds = (end - start) / 1e9
    return {
        "lag": lag,
        "seed": seed,
        "seconds": seconds,
        "samples_per_s": len(timed) * args.groups * 8 / seconds,
        "tokens_per_s": sum(r.metrics["length/total"] for r in steps) * args.groups * 8 / seconds,
        "rollout_busy": busy(spans, "sampling", start, end),
        "rollout_idle_in": {
            part: round(idle_during(spans, part, start, end), 4) for part in ("wait for rollouts", "train")
        },
        "actor_busy": busy(spans, "actor.accumulate", start, end) + busy(spans, "actor.finish", start, end),
        **{
            f"{part}_s": sum(r.metrics[f"time/{part}_s"] for r in steps) / len(steps)
            for part in ("rollout_wait", "train", "sync")
        },
        "lag_mean": sum(r.metrics["lag/mean"] for r in steps) / len(steps),
        "accuracy": [round(r.metrics["eval/accuracy"], 3) for r in reports if "eval/accuracy" in r.metrics],
    }


def busy(spans: list[Any], name: str, start: int, end: int) -> float:
    """Share of the time that spans of this name cover together, whatever overlaps."""
    return sum(high - low for low, high in pieces(spans, name, start, end)) / (end - start)


def idle_during(spans: list[Any], part: str, start: int, end: int) -> float:
    """Share of the time in which the loop was in this part of a step and nothing was asked of the engine."""
    covered = 0
    parts = pieces([e for e in spans if e.lane == "loop"], part, start, end)
    for low, high in parts:
        covered += high - low - sum(b - a for a, b in pieces(spans, "sampling", low, high))
    return covered / (end - start)


def pieces(spans: list[Any], name: str, start: int, end: int) -> list[tuple[int, int]]:
    """Where spans of this name lie between start and end, without their overlaps."""
    found: list[tuple[int, int]] = []
    reached = start
    for event in sorted((e for e in spans if e.name == name), key=lambda e: e.at_ns):
        low, high = max(reached, event.at_ns), min(end, event.at_ns + event.duration_ns)
        if low < high:
            found.append((low, high))
            reached = high
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=5, help="steps that do not count")
    parser.add_argument("--lags", default="0,1")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--median", type=int, default=48, help="tokens of the median tail")
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument(
        "--sigma", type=float, default=1.3, help="spread of the logarithm of the tail's length"
    )
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest tail")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--correction", default="tis", help="for tokens of older policies: none, tis, mis")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.steps, args.skip, args.groups, args.warmup = 5, 1, 4, 4
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as root:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for lag in map(int, args.lags.split(",")):
                runs.append(run(args, lag, seed, Path(root)))
                report(result="run", **runs[-1])
    sync = [each for each in runs if each["lag"] == 0]
    for lag in sorted({each["lag"] for each in runs} - {0}):
        ahead = [each for each in runs if each["lag"] == lag]
        if sync:
            report(
                result="ratio",
                lag=lag,
                throughput=mean(ahead, "tokens_per_s") / mean(sync, "tokens_per_s"),
                train_slowdown=mean(ahead, "train_s") / mean(sync, "train_s"),
                rollout_busy=mean(ahead, "rollout_busy"),
                accuracy=sum(each["accuracy"][-1] for each in ahead) / len(ahead),
                accuracy_sync=sum(each["accuracy"][-1] for each in sync) / len(sync),
                goal=1.5,
            )


def mean(runs: list[dict[str, Any]], name: str) -> float:
    return float(sum(each[name] for each in runs) / len(runs))


if __name__ == "__main__":
    main()
