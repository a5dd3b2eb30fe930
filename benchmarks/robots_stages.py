"""Two stages of simulators against one, and simulators through rill against the bare ones, in one run.

    python benchmarks/robots_stages.py [--envs 32] [--episodes 128] [--steps 4]

Claims: with two stages a run of the cycle takes at most 1/1.3 of one stage's time where simulation and policy take
similar time; simulators behind a process reach 90 % of their own steps per second. Prints JSON lines. Needs idle cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from rill.envs.robots.arm import ArmSimulator
from rill.envs.robots.bank import Bank, Begin
from rill.envs.robots.process import SimulatorProcess
from rill.telemetry.run import Run
from rill.types import InitialState
from rill.workflows.embodied import Embodied
from rill.workflows.loop import StepReport

CHUNK = 4


def cycle_s(stages: int, num_envs: int, episodes: int, steps: int) -> float:
    """Mean seconds that a step waits for its episodes, without the first."""
    config = Embodied.Config(
        workflow="embodied", simulator={"type": "arm"}, policy={"type": "tokens", "chunk": CHUNK, "body": "transformer", "width": 128, "depth": 4}, data={"type": "initial_states", "tasks": ["red", "blue"]}, rollout={"num_envs": num_envs, "stages": stages, "films": 0}, trainer={"num_epochs": 1, "num_mini_batches": 1}, loop={"steps": steps, "prompts_per_step": episodes}, eval={"num_prompts": 0}, cluster={"devices": 1}
    )
    waits: list[float] = []

    def observe(report: StepReport) -> None:
        if "time/rollout_wait_s" in report.metrics:
            waits.append(report.metrics["time/rollout_wait_s"])

    with tempfile.TemporaryDirectory() as folder:
        run = Run.create("stages", root=Path(folder), config_toml="")
        with run.running():
            Embodied(config, run, [observe]).run()
    return float(np.mean(waits[1:]))


def steps_per_s(simulators: Bank | SimulatorProcess, size: int, num_chunks: int) -> float:
    """Of simulators that stand still, reset when their episode is over."""
    still = np.zeros((CHUNK, 3), np.float32)
    begins = {slot: Begin(InitialState("arm", "red", slot)) for slot in range(size)}
    simulators.reset(begins)
    began_s, num_steps = time.perf_counter(), 0
    for _ in range(num_chunks):
        played = simulators.play({slot: still for slot in range(size)})
        num_steps += sum(int(each.executed_J.sum()) for each in played.values())
        over = {slot: begins[slot] for slot, each in played.items() if each.is_over}
        if over:
            simulators.reset(over)
    return num_steps / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    wanted = parser.parse_args()
    config = ArmSimulator.Config()
    bare = steps_per_s(Bank(config, wanted.envs), wanted.envs, 100)
    process = SimulatorProcess(config, wanted.envs, timeout_s=60.0)
    behind = steps_per_s(process, wanted.envs, 100)
    process.close()
    print(json.dumps({"claim": "simulators", "bare": bare, "process": behind, "share": behind / bare}))
    found = {s: cycle_s(s, wanted.envs, wanted.episodes, wanted.steps) for s in (1, 2)}
    print(json.dumps({"claim": "stages", "one_s": found[1], "two_s": found[2], "ratio": found[1] / found[2]}))


if __name__ == "__main__":
    main()
