"""Claim: an engine keeps 95 % of its rate while 512 episodes are scored by 20 ms of plain Python each.

    python benchmarks/env_workers_h200.py [--groups 32] [--workers 8] [--reward-ms 20] [--steps 6] [--small]

The rollout of benchmarks/grpo_step_h200.py (512 episodes of log-normal length, one GPU), three ways in one run: rewards
that cost nothing, the same in environment workers with the reward, and the reward inside the engine's process, which is
what a user gets without workers. JSON lines: tokens a second from the engine's first request of a step to its last
answer, in the median of the steps after the first two, and the ratios. Scoring what ended last is not the engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from grpo_step_h200 import EnoughError, recipe, save_random_model
from report import report
from shapes import QWEN_1_5B, SMALL

from rill.telemetry import trace
from rill.telemetry.run import Run
from rill.workflows.grpo import GRPO
from rill.workflows.loop import StepReport


def rate(values: dict[str, Any], folder: Path, name: str) -> float:
    """Tokens a second from the first request of a step to its last answer; the first two steps warm up."""
    tokens: list[float] = []

    def observe(step: StepReport) -> None:
        if step.step:
            tokens.append(step.metrics["trained_tokens"])
        if step.step == values["loop"]["steps"]:
            raise EnoughError

    run = Run.create(name, root=folder)
    trace.configure(run.path, "driver")
    with contextlib.suppress(EnoughError):
        GRPO(GRPO.Config.model_validate(values), run, [observe]).run()
    trace.flush()
    spans = [e for e in trace.read_trace(run.path) if e.kind == "span"]
    steps = sorted((e for e in spans if (e.name, e.lane) == ("step", "loop")), key=lambda e: e.at_ns)
    rates = []
    for count, step in list(zip(tokens, steps, strict=False))[2:]:
        asked = [e for e in spans if e.name == "sampling" and 0 <= e.at_ns - step.at_ns < step.duration_ns]
        last_ns = max(e.at_ns + e.duration_ns for e in asked)
        rates.append(count / (last_ns - min(e.at_ns for e in asked)) * 1e9)
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--reward-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=6, help="after the warm-up step, at least 3")
    parser.add_argument("--small", action="store_true", help="a smoke test on any machine")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # for longtail, in workers too
    settings = argparse.Namespace(
        sequences=512, max_tokens=64 if args.small else 1024, median=16 if args.small else 384, sigma=0.7, micro=16384,
        tree_packing=False, no_compile=True, group_size=16, groups=args.groups, steps=args.steps, timeout=300.0,
        resident=False, checkpoint_every=0,
    )  # fmt: skip
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_random_model(
            folder / "model",
            SMALL if args.small else QWEN_1_5B,
            "cuda" if torch.cuda.is_available() else "cpu",
        )
        for name, workers, reward_ms in (
            ("no reward", args.workers, 0.0),
            ("environment workers", args.workers, args.reward_ms),
            ("inside the engine's process", 0, args.reward_ms),
        ):
            values = recipe(settings, folder / "model")
            values["rollout"]["env_workers"] = workers
            values["rollout"]["env"]["reward_s"] = reward_ms / 1e3
            found[name] = rate(values, folder, name.replace(" ", "-").replace("'", ""))
            ratio = found[name] / found["no reward"]
            report(what=name, tokens_per_s=found[name], ratio=ratio, goal=0.95)


if __name__ == "__main__":
    main()
