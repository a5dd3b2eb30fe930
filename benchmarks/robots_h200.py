"""The cycle of simulators, policy and trainer: stages, placements, and simulators against the bare ones, in one run.

    python benchmarks/robots_h200.py [--simulator arm_mjx --envs 1024 --episodes 2048 --rows 512] [--small]
                                     [--only simulators,stages,modes,plan] [--modes shared,hybrid]
                                     [--width 1024 --depth 8]
                                     [--field-steps 10]   a flow policy, as π0: so many evaluations for a decision, and
                                                          one in training; unset: a transformer of action tokens
                                     [--env-workers 8]    --envs are of each; simulators on CPUs need several

    simulators   every core busy with simulators of its own (`bare`), and behind processes as an env worker plays them,
                 in two stages, a worker for every core: steps/s of all together, by turns, in the median of nine
                 rounds: at least 90 %. On a device (arm_mjx): steps/s by the number of scenes, and the seconds until it
                 is compiled
    stages       seconds that a step waits for its episodes, with one stage and with two, and the share of it that goes
                 into simulating: 1.3 × where both sides take similar time
    modes        actions/s end to end, and `ratio`: to the first mode. temporal: simulators, policy and trainer take
                 turns, each moved out when its own is over; shared (the default of a recipe): simulators and policy one
                 after the other (one stage), both in memory, the trainer by turns with them; resident: the same, but
                 all stay in memory; hybrid: all stay, one half of the scenes is simulated while the policy decides for
                 the other; ahead: hybrid, one version ahead of training. Split needs two devices: --modes split
    plan         what `--plan auto` chooses for the same work, from what it measures: who is where, who stays in memory
                 (hybrid above), and the predicted step

A policy decides for --rows scenes at a time, whatever the number that ask: half of --envs, so that a stage fills them.
Prints JSON lines. Uses the first GPU where there is one. Needs idle cores; the packages are torch, transformers,
pydantic, pyzmq, msgspec, psutil, safetensors, rich, typer and mujoco; jax and mujoco-mjx for arm_mjx.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from report import report

from rill.config import PartConfig
from rill.envs.robots.bank import Begin, Scenes, open_scenes, uses_device
from rill.envs.robots.base import SIMULATORS
from rill.envs.robots.process import SimulatorProcess
from rill.planning.pilot import Pilot
from rill.planning.plan import choose
from rill.planning.price import price
from rill.planning.profiler import measure
from rill.planning.recipe import devices_of, problem_of
from rill.telemetry.run import Run
from rill.types import InitialState
from rill.workflows.embodied import Embodied
from rill.workflows.loop import StepReport

CHUNK = 4
ROUNDS = 9
STAY = {"devices": 1, "colocate": True}
MODES: dict[str, dict[str, Any]] = {
    "temporal": {"stages": 1, "swapped": True},
    "shared": {"stages": 1},
    "resident": {"stages": 1, "cluster": STAY},
    "hybrid": {"cluster": STAY},
    "ahead": {"cluster": STAY, "loop": {"max_lag": 1}},
    "split": {"cluster": {"devices": 2}, "placement": {"env": "0", "rollout": "1", "actor": "1"}},
}
SMALL = {"envs": 8, "episodes": 16, "steps": 2, "width": 32, "depth": 1, "seconds": 0.2}
TOLD = {
    "actions_per_s": "throughput/actions_per_s",
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_wait_s",
    "train_s": "time/train_s",
    "simulating": "rollout/simulating",
}


class Swapped(Embodied.Config):
    """Whoever has had its turn on the device gives its memory back, the policy too."""

    @property
    def together(self) -> tuple[str, ...]:
        return ()


def recipe(wanted: argparse.Namespace, **mode: Any) -> Embodied.Config:
    size = {"chunk": CHUNK, "width": wanted.width, "depth": wanted.depth}
    policy = {"type": "tokens", "body": "transformer", "rows": wanted.rows, **size}
    if wanted.field_steps:
        policy = {"type": "flow", "num_steps": wanted.field_steps, "rows": wanted.rows, **size}
    tables: dict[str, Any] = {
        "workflow": "embodied",
        "simulator": {"type": wanted.simulator, "image_size": wanted.image_size},
        "policy": policy,
        "data": {"type": "initial_states", "tasks": ["red", "blue"], "num_states": 100_000},
        "rollout": {
            "num_envs": wanted.envs,
            "stages": mode.get("stages", 2),
            "films": 0,
            "timeout_s": 300.0,
        },
        "trainer": {"num_epochs": 1, "num_mini_batches": 4},
        "loop": {"steps": wanted.steps, "prompts_per_step": wanted.episodes, **mode.get("loop", {})},
        "eval": {"num_prompts": 0},
        "cluster": mode.get("cluster", {"devices": 1}),
        "placement": mode.get("placement", {"env": f"0:0-{wanted.env_workers - 1}"}),
    }
    return (Swapped if mode.get("swapped") else Embodied.Config)(**tables)


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


def steps_per_s(simulators: Scenes | SimulatorProcess, size: int, seconds: float) -> float:
    """Of simulators that stand still, reset when their episode is over."""
    still = np.zeros((CHUNK, 3), np.float32)
    begins = {slot: Begin(InitialState("arm", "red", slot)) for slot in range(size)}
    simulators.reset(begins)
    began_s, num_steps = time.perf_counter(), 0
    while time.perf_counter() < began_s + seconds:
        played = simulators.play(dict.fromkeys(range(size), still))
        num_steps += sum(int(each.executed_J.sum()) for each in played.values())
        over = {slot: begins[slot] for slot, each in played.items() if each.is_over}
        if over:
            simulators.reset(over)
    return num_steps / (time.perf_counter() - began_s)


def one_core(config: PartConfig, size: int, orders: Connection) -> None:
    """A process: simulators of its own, and the same number in two stages behind processes of theirs."""
    bare = open_scenes(config, size)
    stages = [SimulatorProcess(config, size // 2, timeout_s=300.0) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        while seconds := orders.recv():
            if seconds > 0:
                rates = [steps_per_s(bare, size, seconds)]
            else:
                rates = list(threads.map(lambda stage: steps_per_s(stage, size // 2, -seconds), stages))
            orders.send(sum(rates))
    for stage in stages:
        stage.close()


def mean(rows: list[dict[str, float]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def simulators(wanted: argparse.Namespace) -> None:
    kind = SIMULATORS.load(wanted.simulator)
    config = kind.Config(type=wanted.simulator, image_size=wanted.image_size)
    if uses_device(config):
        for size in [wanted.envs * factor for factor in (1, 4, 16)]:
            began_s = time.perf_counter()
            scenes = open_scenes(config, size)
            steps_per_s(scenes, size, 0.1)
            opened_s = time.perf_counter() - began_s
            rate = steps_per_s(scenes, size, wanted.seconds)
            scenes.close()
            tell("simulators", wanted, scenes=size, steps_per_s=rate, opened_s=opened_s)
        return
    spawn, num_cores = get_context("spawn"), len(os.sched_getaffinity(0))
    ends = [spawn.Pipe() for _ in range(num_cores)]
    cores = [spawn.Process(target=one_core, args=(config, wanted.envs, theirs)) for _, theirs in ends]
    for core in cores:
        core.start()

    def rate_of(order: float) -> float:
        for orders, _ in ends:
            orders.send(order)
        return float(sum(orders.recv() for orders, _ in ends))

    turns = (wanted.seconds, -wanted.seconds)  # below 0: behind processes
    rates = np.array([[rate_of(turn) for turn in turns] for _ in range(1 + ROUNDS)][1:])
    for (orders, _), core in zip(ends, cores, strict=True):
        orders.send(0.0)
        core.join()
    shares = np.sort(rates[:, 1] / rates[:, 0])
    bare, behind = np.median(rates, axis=0)
    told = {
        "bare": bare,
        "behind": behind,
        "share": shares[ROUNDS // 2],
        "low": shares[0],
        "high": shares[-1],
    }
    tell("simulators", wanted, cores=num_cores, **{name: float(value) for name, value in told.items()})


def stages(wanted: argparse.Namespace) -> None:
    rows = {n: figures_of(recipe(wanted, stages=n)) for n in (1, 2)}
    waits = {n: mean(of, "time/rollout_wait_s") for n, of in rows.items()}
    simulating = mean(rows[1], "rollout/simulating")
    tell("stages", wanted, one_s=waits[1], two_s=waits[2], simulating=simulating, ratio=waits[1] / waits[2])


def modes(wanted: argparse.Namespace) -> None:
    first = 0.0
    for name in wanted.modes.split(","):
        rows = figures_of(recipe(wanted, **MODES[name]))
        told = {short: mean(rows, metric) for short, metric in TOLD.items()}
        first = first or told["actions_per_s"]
        tell("modes", wanted, mode=name, ratio=told["actions_per_s"] / first, **told)


def plan(wanted: argparse.Namespace) -> None:
    config = recipe(wanted)
    devices = devices_of(config)

    def start(short: Any, run: Run, pilot: Pilot) -> None:
        Embodied(short, run, ()).run(pilot=pilot)

    began_s = time.perf_counter()
    profile = measure(config, {}, devices, start=start)
    seconds = time.perf_counter() - began_s
    problem = problem_of(config, {}, profile, devices)
    made, found = choose(problem, tried=profile.tried)
    held = {name: round(placed.memory, 3) for name, placed in made.workers.items()}
    tell("plan", wanted, structure=made.structure, predicted_s=price(problem, found.tree).step_s,
         tried_s=made.step_s, memory=held, measuring_s=seconds)  # fmt: skip


def tell(claim: str, wanted: argparse.Namespace, **told: Any) -> None:
    run = {"simulator": wanted.simulator, "envs": wanted.envs, "width": wanted.width, "depth": wanted.depth}
    report(claim=claim, **run, **told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("envs", 64),
        ("episodes", 256),
        ("steps", 5),
        ("width", 64),
        ("depth", 1),
        ("rows", 32),
        ("image-size", 0),
        ("field-steps", 0),
        ("env-workers", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=2.0, help="of every round of simulators")
    parser.add_argument("--simulator", default="arm", choices=("arm", "arm_mjx"))
    parser.add_argument("--modes", default="shared,resident,hybrid,ahead")
    parser.add_argument("--only", default="simulators,stages,modes")
    parser.add_argument("--small", action="store_true", help="seconds, on a CPU: whether it runs")
    wanted = parser.parse_args()
    if wanted.small:
        vars(wanted).update(SMALL)
    for claim in (simulators, stages, modes, plan):
        if claim.__name__ in wanted.only.split(","):
            claim(wanted)


if __name__ == "__main__":
    main()
