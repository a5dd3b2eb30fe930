"""Embodied PPO of rill and of RLinf 0.3.0, whole iterations, by turns in one run on the same work: environment steps/s.

    python benchmarks/robots_rlinf.py --rlinf-python rlinf/bin/python [--rounds 3 --iterations 8]
                                      [--id HalfCheetah-v5 --envs 64 --episode 100]
                                      [--stages 2]              rill's: one half plays while the policy decides
                                      [--rlinf-stages 1]        the same of RLinf: pipeline_stage_num
                                      [--rlinf-env-processes]   its environments in a process each, not in one
                                      [--rlinf-compile]         its policy through torch.compile; needs a C++ compiler
                                      [--small]                 seconds: whether it runs

RLinf is installed into an environment of its own; rill's needs what gymnasium's MuJoCo robots do:

    pip install gymnasium==1.4.0 mujoco==3.3.0 imageio
    python -m venv rlinf
    rlinf/bin/pip install torch 'ray[default]' numpy hydra-core omegaconf icmplib debugpy nvitop sortedcontainers einops
    rlinf/bin/pip install 'transformers<5' accelerate peft tensorboard psutil gymnasium==1.4.0 mujoco==3.3.0 imageio
    rlinf/bin/pip install --no-deps rlinf==0.3.0

Both: a gymnasium environment by its state, no device, one thread to a process; a policy and a critic of three tanh
layers of 256 each (RLinf's MLP has no other size), a learned spread; one action to a decision; an iteration plays one
whole episode in every environment (--envs × --episode steps, cut off there), GAE, one pass of PPO in four mini-batches,
and the new weights in the rollout before the next iteration. All stay in memory. Each turn is a fresh process
tree. Prints JSON lines: of every turn `env_steps_per_s` (the steps of an iteration / its time, mean over all iterations
but the first) and `cpu_s_per_1000` (processor seconds of all processes for 1000 steps, which neighbours on the cores
disturb less); then the medians, and the ratios rill / RLinf of the rounds. An environment whose episodes end early is
refused.

What differs: rill recomputes log-probabilities and values in the trainer before the first optimizer step, and draws
from the episode's own seed; RLinf takes what the rollout computed. rill's environments are in --stages processes beside
its env worker; RLinf's are in its env worker, one after the other, or in a process each. rill embeds an instruction
(empty here, 16 numbers). RLinf has AdamW, a clipped Huber loss for values, and writes TensorBoard files and a table;
rill has Adam and a squared error, and writes its run folder.

RLinf is written for accelerators. So that its own EmbodiedRunner, EnvWorker, MultiStepRolloutWorker and
EmbodiedFSDPActor run here, otherwise unchanged, robots_rlinf_side.py does this and no more:

    configuration   as maniskill_ppo_mlp.yaml of its v0.3, but: the work above; no CUDA graphs; torch.compile only if
                    asked for; `weight_syncer` is "bucket" on the CPU, since "patch" pins memory and needs streams
    gym, d4rl       modules of these names, gymnasium and an empty one: its D4RLEnv and its vector environment, which
                    fit any environment with a state, import them
    torch.cuda      RLinf has no torch platform without an accelerator: it gets one named "cpu", on which synchronize,
                    empty_cache, ipc_collect and set_device do nothing
    FSDP            (no_shard, one rank) gets device_id = cpu and sync_module_states = False: both mean a GPU otherwise
    time            an iteration ends where its runner has logged it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from report import report

from rill.envs.gymnasium import gymnasium_library
from rill.telemetry.run import Run
from rill.workflows.embodied import Embodied
from rill.workflows.loop import StepReport

HERE = Path(__file__).resolve().parent
WIDTH, DEPTH = 256, 3
MINI_BATCHES = 4
SMALL = {"envs": 8, "episode": 20, "iterations": 3, "rounds": 1}
FIGURES = ("env_steps_per_s", "cpu_s_per_1000")


def cpu_s() -> float:
    """Of this process and all that it has started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def recipe(task: dict[str, Any]) -> Embodied.Config:
    size = {"chunk": 1, "width": WIDTH, "depth": DEPTH}
    tables: dict[str, Any] = {
        "workflow": "embodied",
        "simulator": {"type": "gymnasium", "id": task["id"], "max_steps": task["episode"]},
        "policy": {"type": "gaussian", "rows": task["envs"] // task["stages"], **size},
        "data": {"type": "initial_states", "num_states": 100_000},
        "rollout": {
            "num_envs": task["envs"],
            "stages": task["stages"],
            "films": 0,
            "timeout_s": 300.0,
        },
        "trainer": {"num_epochs": 1, "num_mini_batches": MINI_BATCHES},
        "loop": {"steps": task["iterations"], "prompts_per_step": task["envs"]},
        "eval": {"num_prompts": 0},
        "cluster": {"devices": 1, "colocate": True},
    }
    return Embodied.Config(**tables)


def play_rill() -> None:
    """A turn of rill's, in a process of its own: the task is read, what was measured is written."""
    task = json.load(sys.stdin)
    ends_s: list[float] = []
    spent_s: list[float] = []

    def observe(report: StepReport) -> None:
        if "time/step_s" in report.metrics:
            played = report.metrics["throughput/actions_per_s"] * report.metrics["time/step_s"]
            assert round(played) == task["envs"] * task["episode"], "an episode ended early"
            ends_s.append(time.perf_counter())
            if len(ends_s) in (1, task["iterations"]):
                spent_s.append(cpu_s())

    run = Run.create("robots", root=Path(task["folder"]), config_toml="")
    with run.running(), contextlib.redirect_stdout(sys.stderr):
        Embodied(recipe(task), run, [observe]).run()
    print(json.dumps({"ends_s": ends_s, "cpu_s": spent_s}), flush=True)


def turn(side: str, wanted: argparse.Namespace, sizes: tuple[int, int]) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        task = {
            **{name: getattr(wanted, name) for name in ("id", "envs", "episode", "iterations")},
            "stages": wanted.stages if side == "rill" else wanted.rlinf_stages,
            "processes": wanted.rlinf_env_processes,
            "compile": wanted.rlinf_compile,
            "mini_batches": MINI_BATCHES,
            "state_size": sizes[0],
            "action_size": sizes[1],
            "folder": folder,
        }
        if side == "rill":
            command = [sys.executable, __file__, "--turn"]
        else:
            environment["PYTHONPATH"] = str(HERE)
            command = [wanted.rlinf_python, "-c", "import robots_rlinf_side; robots_rlinf_side.main()"]
        began_s = time.perf_counter()
        played = subprocess.run(
            command,
            input=json.dumps(task),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
        )
        if played.returncode:
            raise SystemExit(f"{side} ended with {played.returncode}:\n{played.stderr[-6000:]}")
        marks = json.loads(played.stdout.strip().splitlines()[-1])
    num_steps = wanted.envs * wanted.episode
    ends_s, (first_s, last_s) = marks["ends_s"], marks["cpu_s"]
    times_s = [end - begin for begin, end in zip(ends_s, ends_s[1:], strict=False)]
    return {
        "env_steps_per_s": num_steps * len(times_s) / sum(times_s),
        "cpu_s_per_1000": (last_s - first_s) / len(times_s) / num_steps * 1000.0,
        "best_env_steps_per_s": num_steps / min(times_s),
        "whole_s": time.perf_counter() - began_s,
    }


def sizes_of(name: str) -> tuple[int, int]:
    """Numbers of a state and of an action."""
    env = gymnasium_library().make(name)
    sizes = int(env.observation_space.shape[0]), int(env.action_space.shape[0])
    env.close()
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rlinf-python", default="", help="of an environment as above; without: rill alone")
    parser.add_argument("--id", default="HalfCheetah-v5")
    for name, default in (
        ("envs", 64),
        ("episode", 100),
        ("iterations", 8),
        ("rounds", 3),
        ("stages", 2),
        ("rlinf-stages", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("rlinf-env-processes", "rlinf-compile", "small"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.turn:
        play_rill()
        return
    if wanted.small:
        vars(wanted).update(SMALL)
    sizes = sizes_of(wanted.id)
    sides = ("rill", "RLinf") if wanted.rlinf_python else ("rill",)
    rows: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(wanted.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            rows[side].append(turn(side, wanted, sizes))
            report(round=number, side=side, load=os.getloadavg()[0], **rows[side][-1])
    medians = {side: {name: median(row[name] for row in of) for name in FIGURES} for side, of in rows.items()}
    for side, figures in medians.items():
        report(median_of=wanted.rounds, side=side, id=wanted.id, envs=wanted.envs, **figures)
    if len(sides) == 2:
        pairs = [*zip(*rows.values(), strict=True)]
        for name in FIGURES:
            ratios = sorted(ours[name] / theirs[name] for ours, theirs in pairs)
            report(ratio=f"rill / RLinf, {name}", median=median(ratios), low=ratios[0], high=ratios[-1])


if __name__ == "__main__":
    main()
