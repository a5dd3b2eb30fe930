"""Overlap inside a synchronous step: streamed chunks against whole batches, on two device slots and a long-tailed task.

    python benchmarks/streaming.py [--steps 12] [--groups 16] [--granularity 1] [--timeline out.json]

One slot samples, the other trains, max_lag 0. The same recipe with flow.granularity = 0 (whole batches: one after the
other) and with chunks (the trainer works on the first groups while the slow ones are still sampled), turn about in one
run of this script. JSON lines: samples/s of each, their ratio (the goal is 1.25), and the share of a step in which both
slots were busy. --timeline keeps the spans of one streamed step, for docs/workflows.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from async_vs_sync import busy, pieces, recipe
from report import report

from rill.telemetry import trace
from rill.telemetry.run import Run
from rill.workflows.grpo import GRPO
from rill.workflows.loop import StepReport


def run(args: argparse.Namespace, granularity: int, number: int, root: Path) -> dict[str, Any]:
    values = {**recipe(args, 0, seed=number), "flow": {"granularity": granularity}}
    values["eval"] = {"num_prompts": 0}
    config = GRPO.Config.model_validate(values)
    folder = Run.create(f"chunk{granularity}-{number}", root=root)
    trace.configure(folder.path, "driver")
    reports: list[StepReport] = []
    GRPO(config, folder, [reports.append]).run()
    trace.shutdown()
    steps = [r for r in reports if r.phase == "step" and r.step > args.skip]
    spans = [e for e in trace.read_trace(folder.path) if e.kind in ("span", "open")]
    timed = [e for e in spans if e.name == "step" and e.lane == "loop" and e.attributes["step"] >= args.skip]
    start, end = min(e.at_ns for e in timed), max(e.at_ns + e.duration_ns for e in timed)
    if args.timeline and granularity:
        args.timeline.write_text(json.dumps(timeline(spans, timed[-1])))
    return {
        "granularity": granularity,
        "samples_per_s": args.groups * 8 / median(r.metrics["time/step_s"] for r in steps),
        "step_s": median(r.metrics["time/step_s"] for r in steps),
        "sampling": busy(spans, "sampling", start, end),
        "training": busy(spans, "actor.accumulate", start, end),
        "both": overlap(spans, start, end),
        "reward": steps[-1].metrics["reward/mean"],
    }


def overlap(spans: list[Any], start: int, end: int) -> float:
    """Share of the time in which the engine samples and the trainer adds gradients."""
    both = sum(
        max(0, min(b, d) - max(a, c))
        for a, b in pieces(spans, "sampling", start, end)
        for c, d in pieces(spans, "actor.accumulate", start, end)
    )
    return both / (end - start)


def timeline(spans: list[Any], step: Any) -> list[dict[str, Any]]:
    """The spans of one step: name, lane, begin and end in milliseconds."""
    inside = [e for e in spans if step.at_ns <= e.at_ns <= step.at_ns + step.duration_ns]
    return [
        {"name": e.name, "lane": e.lane, "at_ms": (e.at_ns - step.at_ns) / 1e6, "ms": e.duration_ns / 1e6}
        for e in sorted(inside, key=lambda e: e.at_ns)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--groups", type=int, default=16, help="prompts in a step, 8 samples each")
    parser.add_argument("--granularity", type=int, default=1, help="prompts to a chunk")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--median", type=int, default=96, help="tokens")
    parser.add_argument("--longest", type=int, default=512, help="tokens")
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--correction", default="none")
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--timeline", type=Path)
    args = parser.parse_args()
    rates: dict[int, list[float]] = {0: [], args.granularity: []}
    with tempfile.TemporaryDirectory(prefix="streaming-") as root:
        for number in range(args.rounds):
            for granularity in rates:
                row = run(args, granularity, number, Path(root))
                rates[granularity].append(row["samples_per_s"])
                report(result="synchronous step", **row)
    ratio = median(rates[args.granularity]) / median(rates[0])
    report(result="streamed over whole batches", ratio=ratio, goal=1.25)


if __name__ == "__main__":
    main()
