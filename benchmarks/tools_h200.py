"""Claim: an engine stays 90 % busy while 512 episodes are under way whose tools take 50 ms a call.

    python benchmarks/tools_h200.py [--episodes 512] [--tool-ms 50] [--workers 8] [--small]

A model of the shape of Qwen2.5-1.5B with random weights on one GPU, environments in workers of their own. An episode
has 32 turns of log-normal length (median 64 tokens), with a call of the tool after each but the last. All are played at
once, as an evaluation before the first step; what counts is the time in which none of them has ended, without its
first quarter, in which the engine captures its graphs. Once with tools that answer at once, once with slow ones:

    tokens_per_s     sampled, by the turns that ended in that time; `ratio`: against tools that answer at once
    turns_in_flight  how many of the episodes waited for the engine, on average
    asked            share of the time in which the engine was asked for anything
    gpu_busy         share of the time in which a kernel ran, as nvidia-smi samples it; null where there is none
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grpo_step_h200 import EnoughError, recipe, save_random_model
from longtail import number_of
from pydantic import Field
from report import report
from shapes import QWEN_1_5B, SMALL

from rill.envs.agent import Agents
from rill.envs.base import Environment
from rill.envs.reply import Context
from rill.telemetry.run import Run
from rill.types import Prompt
from rill.workflows.grpo import GRPO
from rill.workflows.loop import StepReport

SIGMA = 0.7
CACHE_TOKENS = 4096
"""Of an episode, on average, for which the engine has room; 2,800 are used."""
GOAL = 0.9


class ToolTurns(Environment):
    """Turns of set lengths with a slow tool between them. Puts down when each turn began and ended."""

    class Config(Environment.Config):
        type: str
        turns: int = Field(default=32, ge=1)
        median_tokens: int = Field(default=64, ge=1)
        max_tokens: int = Field(default=256, ge=1)
        tool_s: float = Field(default=0.05, ge=0)
        folder: str
        """Of the times, a file a process."""

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> float:
        async def wait() -> str:
            await asyncio.sleep(self.config.tool_s)
            return " and then "

        times: list[tuple[float, float, int]] = []
        asked: Prompt | Context = task
        for number in range(self.config.turns):
            length, began_s = self._length(f"{agents.episode_id}/{number}"), time.time()
            reply = await agents.policy.generate(asked, max_new_tokens=length, ignore_eos=True)
            times.append((began_s, time.time(), length))
            if number + 1 < self.config.turns:
                asked = reply.then(await reply.call(wait))
        with Path(self.config.folder, f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(times) + "\n")
        return 0.0

    def _length(self, name: str) -> int:
        normal = np.random.default_rng(number_of(name)).standard_normal()
        drawn = round(self.config.median_tokens * math.exp(SIGMA * normal))
        return max(1, min(self.config.max_tokens, drawn))


def settings_of(args: argparse.Namespace, model: Path, times: Path, tool_s: float) -> dict[str, Any]:
    turns, longest = (8, 16) if args.small else (32, 256)
    common = argparse.Namespace(
        sequences=args.episodes, max_tokens=longest, median=longest // 4, sigma=SIGMA, micro=8192, tree_packing=False,
        no_compile=True, group_size=8, groups=1, steps=0, timeout=300.0, resident=True, checkpoint_every=0,
    )  # fmt: skip
    values = recipe(common, model)
    values["rollout"]["env_workers"] = args.workers
    values["rollout"]["engine"] |= {
        "max_context": 2048 if args.small else 8192,
        "num_kv_blocks": args.episodes * CACHE_TOKENS // 16,
    }
    values["rollout"]["env"] = {
        "type": "tools_h200:ToolTurns",
        "turns": turns,
        "median_tokens": longest // 4,
        "max_tokens": longest,
        "tool_s": tool_s,
        "folder": str(times),
    }
    asked = {"name": "load", "data": values["data"], "num_prompts": args.episodes, "temperature": 1.0}
    values["eval"] = {"num_prompts": 0, "sets": [asked]}
    return values


@contextlib.contextmanager
def sampled_gpu() -> Iterator[list[tuple[float, float]]]:
    """(time, share) of the device's busy time while the block runs; nothing where nvidia-smi is missing."""
    found: list[tuple[float, float]] = []
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    with tempfile.TemporaryFile("w+") as output:
        began_s, sampling = time.time(), subprocess.Popen(query, stdout=output, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            sampling.terminate()
            sampling.wait(10)
            ended_s = time.time()
            output.seek(0)
            shares = [float(line) / 100 for line in output if line.strip().isdigit()]
            every_s = (ended_s - began_s) / max(1, len(shares))
            found += [(began_s + (n + 1) * every_s, share) for n, share in enumerate(shares)]


def figures(turns: list[list[tuple[float, float, int]]]) -> dict[str, float]:
    """Of the time in which none has ended, without its first quarter."""
    start_s, end_s = max(episode[0][0] for episode in turns), min(episode[-1][1] for episode in turns)
    start_s += (end_s - start_s) / 4
    spans = sorted((began, ended, length) for episode in turns for began, ended, length in episode)
    tokens = sum(length for _, ended, length in spans if start_s < ended <= end_s)
    waited_s, covered_s, reached_s = 0.0, 0.0, start_s
    for began, ended, _ in spans:
        low, high = max(began, start_s), min(ended, end_s)
        waited_s += max(0.0, high - low)
        covered_s += max(0.0, high - max(low, reached_s))
        reached_s = max(reached_s, high)
    seconds = end_s - start_s
    return {
        "start_s": start_s,
        "end_s": end_s,
        "tokens_per_s": tokens / seconds,
        "turns_in_flight": waited_s / seconds,
        "asked": covered_s / seconds,
    }


def measure(args: argparse.Namespace, folder: Path, tool_s: float) -> dict[str, Any]:
    name = f"tools-{tool_s * 1e3:.0f}ms"
    times = folder / f"{name}-times"
    times.mkdir()

    def observe(step: StepReport) -> None:
        raise EnoughError  # the evaluation before the first step is all that is wanted

    config = GRPO.Config.model_validate(settings_of(args, folder / "model", times, tool_s))
    with sampled_gpu() as shares, contextlib.suppress(EnoughError):
        GRPO(config, Run.create(name, root=folder), [observe]).run()
    turns = [json.loads(line) for file in times.glob("*.jsonl") for line in file.read_text().splitlines()]
    found = figures(turns)
    start_s, end_s = found.pop("start_s"), found.pop("end_s")
    inside = [share for at_s, share in shares if start_s <= at_s <= end_s]
    return {"seconds": end_s - start_s, **found, "gpu_busy": statistics.mean(inside) if inside else None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=512, help="at once")
    parser.add_argument("--tool-ms", type=float, default=50.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a smoke test on any machine")
    args = parser.parse_args()
    if args.small:
        args.episodes, args.workers = 16, 1
    elif not torch.cuda.is_available():
        report(skipped="needs a CUDA device; --small runs anywhere")
        return
    sys.path.insert(0, str(Path(__file__).parent))  # for the environment, in workers too
    with tempfile.TemporaryDirectory(prefix="tools-") as scratch:
        folder = Path(scratch)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        save_random_model(folder / "model", SMALL if args.small else QWEN_1_5B, device)
        instant = measure(args, folder, 0.0)
        report(tool_ms=0.0, episodes=args.episodes, **instant)
        slow = measure(args, folder, args.tool_ms / 1e3)
        ratio = slow["tokens_per_s"] / instant["tokens_per_s"]
        report(tool_ms=args.tool_ms, episodes=args.episodes, **slow, ratio=ratio, goal=GOAL)


if __name__ == "__main__":
    main()
