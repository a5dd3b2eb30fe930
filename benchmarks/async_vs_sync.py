"""Asynchronous against synchronous training on split devices with a long-tailed task: throughput, busy share, score.

    python benchmarks/async_vs_sync.py [--steps 30] [--lags 0,1] [--rounds 1] [--warmup 400] [--small]

Two device slots of one thread each: the engine on one, the trainer on the other. The task is two-digit addition after a
supervised warm-up; behind every answer follows a tail of tokens of log-normal length (benchmarks/longtail.py), which is
sampled and trained through like the rest but stays out of the loss. Every lag starts from the same seed and runs the
same steps. Prints JSON lines:

    result    samples and tokens per second over the steps after --skip, without the last two: nothing is sampled for a
              step that does not come. busy: share of that time in which the engine had something to sample (the trainer
              trained), from the trace; accuracy on held-out problems at the end
    ratio     throughput at each lag over lag 0; the goal is 1.5 at lag 1, with the engine busy 90 % of the time
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rill.config.files import load_recipe
from rill.telemetry import trace
from rill.telemetry.run import Run
from rill.workflows.loop import StepReport
from rill.workflows.reasoning import ReasoningWorkflow

TINY = Path(__file__).resolve().parents[1] / "recipes" / "parts" / "tiny_model.toml"
MAX_CONTEXT = 512


def report(**fields: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def recipe(args: argparse.Namespace, lag: int) -> dict[str, Any]:
    model = load_recipe(TINY).values["model"]
    model["shape"] = {**model["shape"], "max_position_embeddings": MAX_CONTEXT}
    return {
        "workflow": "reasoning",
        "seed": args.seed,
        "model": model,
        "data": {"type": "arithmetic", "digits": [2, 2], "worked": 0.5},
        "warmup": {"steps": args.warmup, "lr": 2e-3},
        "rollout": {
            "group_size": 8,
            "sampling": {"max_new_tokens": 256, "temperature": 1.0},
            "env": {
                "type": "longtail:LongTail",
                "answer_tokens": 32,
                "median_tokens": args.median,
                "sigma": 1.0,
                "max_tokens": 256,
            },
        },
        "algorithm": {"type": "grpo"},
        "trainer": {"optimizer": {"learning_rate": 3e-4}},
        "loop": {"steps": args.steps, "groups_per_step": args.groups, "max_lag": lag},
        "eval": {"every": 0, "num_prompts": 256, "max_new_tokens": 32},
        "placement": {"rollout": "0", "actor": "1"},
        "cluster": {"devices": 2, "threads": 1},
    }


def run(args: argparse.Namespace, lag: int, root: Path) -> dict[str, float]:
    config = ReasoningWorkflow.Config.model_validate(recipe(args, lag))
    folder = Run.create(f"lag{lag}", root=root)
    trace.configure(folder.path, "driver")
    reports: list[StepReport] = []
    ReasoningWorkflow(config, folder, [reports.append]).run()
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
        "seconds": seconds,
        "samples_per_s": len(timed) * args.groups * 8 / seconds,
        "tokens_per_s": sum(r.metrics["length/total"] for r in steps) * args.groups * 8 / seconds,
        "rollout_busy": busy(spans, "sampling", start, end),
        "actor_busy": busy(spans, "actor.train", start, end),
        "lag_mean": sum(r.metrics["lag/mean"] for r in steps) / len(steps),
        "accuracy_before": reports_of(reports)[0],
        "accuracy_after": reports_of(reports)[-1],
    }


def reports_of(reports: list[StepReport]) -> list[float]:
    return [r.metrics["eval/accuracy"] for r in reports if "eval/accuracy" in r.metrics]


def busy(spans: list[Any], name: str, start: int, end: int) -> float:
    """Share of the time that spans of this name cover together, whatever overlaps."""
    pieces = sorted(
        (max(start, e.at_ns), min(end, e.at_ns + e.duration_ns))
        for e in spans
        if e.name == name and e.at_ns < end and e.at_ns + e.duration_ns > start
    )
    covered, reached = 0, start
    for low, high in pieces:
        covered += max(0, high - max(low, reached))
        reached = max(reached, high)
    return covered / (end - start)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=5, help="steps that do not count")
    parser.add_argument("--lags", default="0,1")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--median", type=int, default=48, help="tokens of the median tail")
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    if args.small:
        args.steps, args.skip, args.groups, args.warmup = 5, 1, 4, 4
    results: dict[int, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as root:
        for _ in range(args.rounds):
            for lag in map(int, args.lags.split(",")):
                figures = run(args, lag, Path(root))
                report(result="run", **figures)
                results.setdefault(lag, []).append(figures)
    means = {
        lag: {key: sum(r[key] for r in runs) / len(runs) for key in runs[0]} for lag, runs in results.items()
    }
    for lag, figures in means.items():
        if lag and 0 in means:
            report(
                result="ratio",
                lag=lag,
                throughput=figures["tokens_per_s"] / means[0]["tokens_per_s"],
                rollout_busy=figures["rollout_busy"],
                accuracy=figures["accuracy_after"],
                accuracy_sync=means[0]["accuracy_after"],
                goal=1.5,
            )


if __name__ == "__main__":
    main()
