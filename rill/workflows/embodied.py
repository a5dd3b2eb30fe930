"""Embodied RL: a robot acts in simulators, a policy decides, a trainer makes the policy better.

    env ── observations ──▶ rollout        every chunk of actions, two stages of simulators by turns
     ▲                        │
     └──── actions ───────────┘            the cycle
     │
     └── whole episodes ──▶ actor ── version + 1 ──▶ rollout

The file is the algorithm. Who shares devices with whom, how many stages overlap and how far acting runs ahead of
training is the recipe's business; nothing here changes with it. PPO and GRPO differ in `algorithm.estimator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rill.telemetry.run import Run
from rill.workers.robots.actor import RobotActor
from rill.workers.robots.env import RobotEnvWorker
from rill.workers.robots.policy import RobotPolicyWorker
from rill.workflows.flow import Flow
from rill.workflows.launch import Launcher
from rill.workflows.loop import Observer
from rill.workflows.robot_config import RobotConfig
from rill.workflows.robots import SuccessWatch, policy_of, settings_of
from rill.workflows.workflow import Workflow


class Embodied(Workflow):
    class Config(RobotConfig):
        workflow: Literal["embodied"] = "embodied"

    config: RobotConfig
    preload = ("rill.workers.robots.actor", "rill.workers.robots.env", "rill.workflows.controller")

    def __init__(self, config: RobotConfig, run: Run, observers: Sequence[Observer]) -> None:
        super().__init__(config, run, [SuccessWatch(observers)])

    def groups(self, launch: Launcher) -> None:
        config = self.config
        policy = policy_of(config)  # one that does not fit the simulator ends the run here
        settings = settings_of(config)
        self.env = launch(RobotEnvWorker, "env", settings=settings, run_dir=launch.run_dir)  # simulators
        self.rollout = launch(RobotPolicyWorker, "rollout", source=policy, sync=launch.sync)  # what decides
        self.actor = launch.trainer(RobotActor, self.rollout, settings=settings, source=policy)  # what learns
        # To do as an expert does, played or recorded, before it learns from what it does itself.
        launch.warm_up(self.actor, config.imitation.steps)

    def step(self, flow: Flow) -> None:
        episodes = flow.sample(self.rollout)  # initial states, as far ahead as the lag allows; env ⇄ policy
        batch = flow.select(episodes)  # whole groups, those that say something, until the batch is full
        flow.update(self.actor, batch)  # PPO or GRPO on the chunks; the policy comes to version + 1
