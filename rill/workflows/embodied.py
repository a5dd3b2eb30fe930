"""Embodied RL: a robot acts in simulators, a policy decides, a trainer makes the policy better.

    env ── observations ──▶ rollout        every chunk of actions, two stages of simulators by turns
     ▲                        │
     └──── actions ───────────┘            the cycle
     │
     └── whole episodes ──▶ actor ── version + 1 ──▶ rollout

The file is the algorithm. Whether simulators, policy and trainer share devices (all take turns), have their own (split)
or something between (hybrid: simulators and policy beside each other, the trainer on all), how many stages overlap and
how far acting runs ahead of training is the recipe's business; nothing here changes with it. PPO and GRPO differ in
`algorithm.estimator`; synchronous is `loop.max_lag = 0`.
"""

from __future__ import annotations

from typing import Literal

from rill.workflows.flow import Flow
from rill.workflows.robot_config import RobotConfig
from rill.workflows.robot_launch import RobotLauncher, RobotWorkflow


class Embodied(RobotWorkflow):
    class Config(RobotConfig):
        workflow: Literal["embodied"] = "embodied"

    def groups(self, launch: RobotLauncher) -> None:
        self.env = launch.env()  # simulators, in processes of their own
        self.rollout = launch.policy()  # what decides
        self.actor = launch.actor(self.rollout.size)  # what learns

    def step(self, flow: Flow) -> None:
        episodes = flow.sample(self.engines)  # initial states, as far ahead as the lag allows; env ⇄ policy
        batch = flow.select(episodes)  # whole groups, those that say something, until the batch is full
        flow.update(self.actor, batch)  # PPO or GRPO on the chunks; the policy comes to version + 1
