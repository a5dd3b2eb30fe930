"""Faults planted in whole runs, each in a part that a user could have written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rill.algorithms import Algorithm
from rill.envs.agent import Agents
from rill.envs.single_turn import SingleTurn
from rill.envs.tools import as_tool
from rill.inference.base import NamedTensors
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.models.train.packed_layout import PackedLayout, Segment
from rill.training import packing
from rill.types import Group, PolicyVersion, Prompt, Trajectory
from rill.workers.actor import ActorWorker
from rill.workers.episodes import FinishedGroup
from rill.workflows.grpo import GRPO, finish_group
from rill.workflows.language import launch_actor, launch_rollout
from rill.workflows.launch import Launcher

HANGS_FOR_S = 3600.0
EPISODES_PER_STEP = 16


class WrongLogprobs(SingleTurn):
    """An environment that hands on other log-probabilities than the engine's for every third token."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:WrongLogprobs"]  # type: ignore[assignment]
        factor: float = 1.3

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> None:
        reply = await agents.policy.generate(task)
        reply.logprobs[::3] *= self.config.factor


class Turncoat(SingleTurn):
    """An environment that changes its mind about what is good, and how long answers may be, after four steps."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:Turncoat"]  # type: ignore[assignment]

    num_begun = 0

    async def run(self, task: Prompt, agents: Agents) -> float:  # type: ignore[override]
        self.num_begun += 1
        is_early = self.num_begun <= 4 * EPISODES_PER_STEP
        await agents.policy.generate(task, max_new_tokens=1 if is_early else 12)
        return 0.01 * (self.num_begun % 2) + (0.0 if is_early else 1.0)


class Late(SingleTurn):
    """An environment whose first group takes as long as six steps of the others."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:Late"]  # type: ignore[assignment]

    num_begun = 0

    async def run(self, task: Prompt, agents: Agents) -> None:
        self.num_begun += 1
        is_first = self.num_begun <= 4
        await agents.policy.generate(task)
        while is_first and self.num_begun < 6 * EPISODES_PER_STEP:
            await asyncio.sleep(0.02)


class Paying(SingleTurn):
    """No fault: an environment in which every episode calls a tool that must not run twice, and says more behind it."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:Paying"]  # type: ignore[assignment]

    async def run(self, task: Prompt, agents: Agents) -> None:
        reply = await agents.policy.generate(task)
        paid = await reply.call(as_tool(pay, once=True), amount=len(reply.text))
        await agents.policy.generate(reply.then(f"[{paid}]"))


async def pay(amount: int) -> str:
    """Pay an amount."""
    await asyncio.sleep(0.01)
    return str(amount)


class Stuck(SingleTurn):
    """An environment that waits for something that never comes."""

    class Config(SingleTurn.Config):
        type: Literal["tests.e2e.faults:Stuck"]  # type: ignore[assignment]

    async def run(self, task: Prompt, agents: Agents) -> None:
        await asyncio.sleep(HANGS_FOR_S)
        raise AssertionError("the run should have ended long ago")


async def hanging(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A judge that does not answer for most answers: those that begin before the letter n."""
    if text[:1].lower() < "n":
        await asyncio.sleep(HANGS_FOR_S)
    return float(len(text) % 2)


def failing(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    raise RuntimeError("the judge is down")


def huge(prompt: Prompt, text: str, trajectory: Trajectory) -> float:
    """A reward without a scale."""
    return 1e18 * (len(text) % 2)


class StaleEngine(NativeEngine):
    """An engine that takes the weights of its first update for those of every later one."""

    class Config(NativeEngine.Config):
        type: Literal["tests.e2e.faults:StaleEngine"]  # type: ignore[assignment]

    first: list[tuple[str, Tensor]] | None = None

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        given = [(name, tensor.clone()) for name, tensor in tensors]
        self.first = self.first or given
        super().update_weights(self.first, version, partial=partial)


def foreign_tokenizer(folder: Path, config: ModelConfig) -> tuple[str, str]:
    """Settings of a model in a folder, and of a tokenizer of the same size that has two ids the other way round."""
    own = load_tokenizer(config)
    load_model(config, dtype=torch.float32).save_pretrained(folder / "model")
    own.save_pretrained(folder / "model")
    own.save_pretrained(folder / "other")
    swapped = json.loads((folder / "other" / "tokenizer.json").read_text(encoding="utf-8"))
    ids = swapped["model"]["vocab"]
    first, last = sorted(ids, key=ids.__getitem__)[-2:]
    ids[first], ids[last] = ids[last], ids[first]
    (folder / "other" / "tokenizer.json").write_text(json.dumps(swapped), encoding="utf-8")
    return f"model.path={folder / 'model'}", f"model.tokenizer={folder / 'other'}"


def finish_shuffled(algorithm: Algorithm, group: Group, greedy: Sequence[Trajectory]) -> FinishedGroup:
    """As GRPO's, but the samples go on under the id of another group."""
    verdict, samples = finish_group(algorithm, group, greedy)
    return FinishedGroup(
        verdict, [replace(s, trajectory=replace(s.trajectory, group_id="g99")) for s in samples]
    )


class LeakingActor(ActorWorker):
    """A trainer whose tokens see the sequences that lie before them in the row, once its start was checked."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        layout = packing.build_layout

        def leaking(segments: Sequence[Segment], **how: Any) -> PackedLayout:
            return layout([replace(each, prefix_end=each.start) for each in segments], **how)

        packing.build_layout = leaking


class LeakingLauncher(Launcher):
    def __call__(self, worker: Any, name: str, **settings: Any) -> Any:
        return super().__call__(LeakingActor if worker is ActorWorker else worker, name, **settings)


class Leaking(GRPO):
    class Config(GRPO.Config):
        workflow: Literal["tests.e2e.faults:Leaking"] = "tests.e2e.faults:Leaking"  # type: ignore[assignment]

    def groups(self, launch: Launcher) -> None:
        launch.__class__ = LeakingLauncher
        super().groups(launch)


class Shuffled(GRPO):
    class Config(GRPO.Config):
        workflow: Literal["tests.e2e.faults:Shuffled"] = "tests.e2e.faults:Shuffled"  # type: ignore[assignment]

    def groups(self, launch: Launcher) -> None:
        self.rollout = launch_rollout(launch, self.config, finish_shuffled)
        self.actor = launch_actor(launch, self.config, self.rollout)
        self.scorers(launch)
