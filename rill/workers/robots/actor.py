"""The actor of an embodied run: trains the policy, lets it imitate an expert first, and publishes its weights.

Calls, in order: `warm_up` until the warm start is done, `publish` before the first step, then `train` once a step and
`publish`, and `save` now and then. Batches are trained on whole: PPO passes over them several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rill.data.base import Split, open_indexed
from rill.data.initial_states import start_of
from rill.envs.robots.process import SimulatorProcess
from rill.envs.robots.recording import Shown, demonstrate, shown_of
from rill.errors import DataError
from rill.policies.probe import CANARY_LENGTH, probe
from rill.training.robots import ROBOT_TRAINERS, Demonstration, RobotTrainer
from rill.types import EmbodiedTrajectory, PolicyVersion
from rill.weights import Canary, CanaryProof
from rill.workers.config import SyncConfig
from rill.workers.edges import Edge
from rill.workers.learners import PolicyLearner
from rill.workers.robots.config import RobotSettings
from rill.workers.robots.policy import PolicySource
from rill.workers.scorers import rendezvous_of

DEMO_SIMULATORS = 16
DEMO_TIMEOUT_S = 300.0


class RobotActor(PolicyLearner):
    trainer: RobotTrainer

    def __init__(self, *, settings: RobotSettings, source: PolicySource, sync: SyncConfig) -> None:
        self.settings = settings
        self.trainer = ROBOT_TRAINERS.load(settings.trainer.type)(
            settings.trainer,
            settings.algorithm,
            source.open(),
            rendezvous=rendezvous_of(self),
            device=self.device,
            seed=settings.seed,
        )
        self._open_publisher(sync)
        self._shown: Demonstration | None = None
        self._seen: dict[str, float] = {}

    # --- training -----------------------------------------------------------------------------------------

    def warm_up(self, num_done: int, num_steps: int) -> dict[str, float]:
        """So many supervised steps on what an expert does (behaviour cloning); the metrics of the last."""
        how = self.settings.imitation
        shown = self._shown = self._shown or self._watch()
        with self.device_lock():
            metrics = self.trainer.imitate(shown, num_steps, how.batch_size, how.learning_rate)
        if num_done + num_steps == how.steps:
            self.trainer.end_imitation()
            self._shown = None
        return {**self._seen, **metrics}

    def _watch(self) -> Demonstration:
        """See an expert play, or what was recorded of one; every rank sees the same."""
        policy, imitation = self.trainer.policy, self.settings.imitation
        if imitation.dataset:
            episodes = imitation.recorded(policy.spec).episodes(imitation.demos)
            shown = shown_of(episodes, policy.config.chunk)
        else:
            shown = self._played()
        inputs = policy.seen(shown.observations)
        actions_BJA, mask_BJ = torch.from_numpy(shown.actions_BJA), torch.from_numpy(shown.mask_BJ)
        policy.set_normaliser(inputs.states_BS, actions_BJA[mask_BJ])
        self._seen["bc/chunks"] = float(len(inputs))
        return Demonstration(inputs=inputs, actions_BJA=actions_BJA, mask_BJ=mask_BJ)

    def _played(self) -> Shown:
        simulator, least = self.settings.simulator, self.settings.imitation.min_success
        states = open_indexed(self.settings.data, Split.TRAIN)
        # From the end: RL begins with the first ones, in the loader's order.
        last = range(len(states) - 1, -1, -1)[: self.settings.imitation.demos]
        starts = [start_of(states[n]) for n in last]
        simulators = SimulatorProcess(simulator, DEMO_SIMULATORS, timeout_s=DEMO_TIMEOUT_S)
        try:
            shown = demonstrate(simulators, DEMO_SIMULATORS, starts, self.trainer.policy.config.chunk)
        finally:
            simulators.close()
        success = self._seen["bc/expert_success"] = shown.num_episodes / len(starts)
        if success < least or not shown.observations:
            raise DataError(
                f"the scripted expert of {simulator.type!r} succeeds in {success:.0%} of {len(starts)} episodes, below "
                f"imitation.min_success = {least:.0%}: it is not worth imitating here"
            )
        return shown

    def _train(self, source: Edge, version: PolicyVersion) -> Mapping[str, float]:
        """One batch, whole; `publish` follows."""
        episodes: list[EmbodiedTrajectory] = []
        with ExitStack() as turn:
            world, cost = self.trainer.world, self.trainer.cost_model
            for part in source.parts(self, world, whole_groups=True, cost=cost, turn=turn):
                episodes += part.samples()  # type: ignore[arg-type]
            with self.timer("update"):
                return self.trainer.update(episodes)

    # --- weights and files --------------------------------------------------------------------------------

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        return list(self.trainer.policy.trained().items())

    def _proof(self, dtype: str) -> CanaryProof:
        canary = Canary([np.zeros(CANARY_LENGTH, np.int32)])
        return CanaryProof(canary=canary, expected=probe(self.trainer.policy, canary.sequences))

    def export(self, folder: str) -> None:
        """The policy, as `policy_path` of another run takes it."""
        if self.rank == 0:
            with self.device_lock():
                self.trainer.policy.save(Path(folder))
