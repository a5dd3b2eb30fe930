"""What an embodied workflow has beside its step: the policy of its recipe, and how success is watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rill.envs.robots.base import check_task
from rill.envs.robots.process import SimulatorProcess
from rill.types import InitialState
from rill.workers.robots.config import RobotSettings
from rill.workers.robots.policy import PolicySource
from rill.workflows.loop import Observer, StepReport
from rill.workflows.robot_config import RobotConfig

WINDOW = 30
"""Steps that the gain of success is counted over."""
SETTLED = 0.9
"""Where every step has succeeded so often, nothing need be gained."""


def policy_of(config: RobotConfig) -> PolicySource:
    """For the robot of the recipe, whose shapes are asked of a simulator in a process of its own. A simulator that
    cannot be opened, a task that it has not and a policy that does not fit are told of here, in one line."""
    simulators = SimulatorProcess(config.simulator, 1, timeout_s=config.rollout.timeout_s)
    try:
        spec = simulators.spec()
    finally:
        simulators.close()
    for task in config.data.tasks:
        check_task(InitialState(config.simulator.type, task, 0), spec)
    source = PolicySource(config.policy, spec, config.policy_path, config.seed)
    source.check()
    if config.imitation.dataset:
        config.imitation.recorded(spec)
    return source


def settings_of(config: RobotConfig) -> RobotSettings:
    sets = config.eval.all_sets(config.data)
    return RobotSettings(
        simulator=config.simulator,
        data=config.data,
        rollout=config.rollout,
        algorithm=config.algorithm,
        trainer=config.trainer,
        imitation=config.imitation,
        greedy=frozenset(name for name, chosen in sets.items() if chosen.temperature == 0),
        seed=config.seed,
    )


class SuccessWatch:
    """An observer before the others: adds how far success has come, for those who watch whether it does, and counts
    in actions what the flow counts in tokens."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers
        self._successes: list[float] = []

    def __call__(self, report: StepReport) -> None:
        metrics = dict(report.metrics)
        if "throughput/tokens_per_s" in metrics:
            metrics["throughput/actions_per_s"] = metrics.pop("throughput/tokens_per_s")
        if "success/mean" in metrics:
            self._successes.append(metrics["success/mean"])
            recent = self._successes[-2 * WINDOW :]
            if len(recent) == 2 * WINDOW and min(recent[WINDOW:]) < SETTLED:
                metrics["success/gain"] = (sum(recent[WINDOW:]) - sum(recent[:WINDOW])) / WINDOW
        replace(report, metrics=metrics).tell(self._observers)
