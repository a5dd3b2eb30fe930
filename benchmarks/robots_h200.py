"""The cycle of simulators, policy and trainer: stages, placements, and simulators against the bare ones, in one run.

    python benchmarks/robots_h200.py [--width 1024 --depth 8 --envs 256 --image-size 64] [--modes shared,ahead]

    simulators   steps/s of simulators behind a process against the same ones in this process: at least 90 %
    stages       seconds that a step waits for its episodes, with one stage and with two: 1.3 × where both sides take
                 similar time
    modes        actions/s end to end. shared: policy and trainer take turns, memory moved out and in; colocated: both
                 stay (the paper's hybrid on one GPU); ahead: colocated, acting one version ahead of training

Prints JSON lines. Uses the first GPU where there is one. Needs idle cores; the packages are torch, transformers,
pydantic, pyzmq, msgspec, psutil, safetensors, rich, typer and mujoco.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rill.envs.robots.arm import ArmSimulator
from rill.envs.robots.bank import Bank, Begin
from rill.envs.robots.process import SimulatorProcess
from rill.telemetry.run import Run
from rill.types import InitialState
from rill.workflows.embodied import Embodied
from rill.workflows.loop import StepReport

CHUNK = 4
MODES: dict[str, dict[str, Any]] = {
    "shared": {},
    "colocated": {"cluster": {"devices": 1, "colocate": True}},
    "ahead": {"cluster": {"devices": 1, "colocate": True}, "max_lag": 1},
}
TOLD = {
    "actions_per_s": "throughput/actions_per_s",
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_wait_s",
    "train_s": "time/train_s",
    "simulating": "rollout/simulating",
}


def recipe(wanted: argparse.Namespace, *, stages: int = 2, **mode: Any) -> Embodied.Config:
    body = {"body": "transformer", "width": wanted.width, "depth": wanted.depth}
    loop = {"steps": wanted.steps, "prompts_per_step": wanted.episodes, "max_lag": mode.get("max_lag", 0)}
    tables: dict[str, Any] = {
        "workflow": "embodied",
        "simulator": {"type": "arm", "image_size": wanted.image_size},
        "policy": {"type": "tokens", "chunk": CHUNK, **body},
        "data": {"type": "initial_states", "tasks": ["red", "blue"]},
        "rollout": {"num_envs": wanted.envs, "stages": stages, "films": 0},
        "trainer": {"num_epochs": 1, "num_mini_batches": 4},
        "loop": loop,
        "eval": {"num_prompts": 0},
        "cluster": mode.get("cluster", {"devices": 1}),
    }
    return Embodied.Config(**tables)


def figures_of(config: Embodied.Config) -> list[dict[str, float]]:
    """Of every step but the first."""
    found: list[dict[str, float]] = []

    def observe(report: StepReport) -> None:
        if "time/step_s" in report.metrics:
            found.append(dict(report.metrics))

    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("robots", root=Path(folder), config_toml="")
        with run.running():
            Embodied(config, run, [observe]).run()
    return found[1:]


def steps_per_s(simulators: Bank | SimulatorProcess, size: int, num_chunks: int) -> float:
    """Of simulators that stand still, reset when their episode is over."""
    still = np.zeros((CHUNK, 3), np.float32)
    begins = {slot: Begin(InitialState("arm", "red", slot)) for slot in range(size)}
    simulators.reset(begins)
    began_s, num_steps = time.perf_counter(), 0
    for _ in range(num_chunks):
        played = simulators.play(dict.fromkeys(range(size), still))
        num_steps += sum(int(each.executed_J.sum()) for each in played.values())
        over = {slot: begins[slot] for slot, each in played.items() if each.is_over}
        if over:
            simulators.reset(over)
    return num_steps / (time.perf_counter() - began_s)


def mean(rows: list[dict[str, float]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("envs", 32),
        ("episodes", 128),
        ("steps", 5),
        ("width", 128),
        ("depth", 4),
        ("image-size", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--modes", default=",".join(MODES))
    wanted = parser.parse_args()
    config = ArmSimulator.Config(image_size=wanted.image_size)
    bare = steps_per_s(Bank(config, wanted.envs), wanted.envs, 50)
    process = SimulatorProcess(config, wanted.envs, timeout_s=300.0)
    behind = steps_per_s(process, wanted.envs, 50)
    process.close()
    print(
        json.dumps({"claim": "simulators", "bare": bare, "process": behind, "share": behind / bare}),
        flush=True,
    )
    waits = {n: mean(figures_of(recipe(wanted, stages=n)), "time/rollout_wait_s") for n in (1, 2)}
    told = {"one_s": waits[1], "two_s": waits[2], "ratio": waits[1] / waits[2]}
    print(json.dumps({"claim": "stages", **told}), flush=True)
    for name in wanted.modes.split(","):
        rows = figures_of(recipe(wanted, **MODES[name]))
        told = {short: mean(rows, metric) for short, metric in TOLD.items()}
        print(json.dumps({"claim": "modes", "mode": name, **told}), flush=True)


if __name__ == "__main__":
    main()
