"""The actor of an embodied run: trains the policy, lets it imitate an expert first, and publishes its weights.

Calls, in order: `imitate` until the warm start is done, `publish` before the first step, then `train` once a step and
`publish`, and `save` now and then. Batches are trained on whole: PPO passes over them several times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rill.envs.robots.process import SimulatorProcess
from rill.envs.robots.recording import Shown, demonstrate, shown_of
from rill.errors import DataError
from rill.models.robots.probe import CANARY_LENGTH, probe
from rill.runtime.context import current
from rill.training.robots import ROBOT_TRAINERS, Demonstration, RobotTrainer
from rill.types import EmbodiedTrajectory, InitialState, PolicyVersion
from rill.weights import Canary, CanaryProof, open_publisher
from rill.workflows.config import SyncConfig
from rill.workflows.edges import Edge
from rill.workflows.learners import PolicyLearner
from rill.workflows.robots.config import RobotConfig
from rill.workflows.robots.policy import PolicySource
from rill.workflows.scorers import rendezvous_of

DEMO_SIMULATORS = 16
DEMO_TIMEOUT_S = 300.0


class RobotActor(PolicyLearner):
    trainer: RobotTrainer

    def __init__(self, *, config: RobotConfig, source: PolicySource, sync: SyncConfig) -> None:
        self.config = config
        self.trainer = ROBOT_TRAINERS.load(config.trainer.type)(
            config.trainer,
            config.algorithm,
            source.open(),
            rendezvous=rendezvous_of(self),
            device=self.device,
            seed=config.seed,
        )
        self.sync = sync
        self.publisher = open_publisher(sync.transport, host=current().site.host) if self.rank == 0 else None
        self._shown: Demonstration | None = None

    # --- training -----------------------------------------------------------------------------------------

    def watch(self, starts: Sequence[InitialState]) -> dict[str, float]:
        """See an expert play, or what was recorded of one; every rank sees the same."""
        policy, imitation = self.trainer.policy, self.config.imitation
        if imitation.dataset:
            episodes = imitation.recorded(policy.spec).episodes(imitation.demos)
            shown, told = shown_of(episodes, policy.config.chunk), {}
        else:
            shown = self._played(starts)
            told = {"bc/expert_success": shown.num_episodes / len(starts)}
        inputs = policy.seen(shown.observations)
        actions_BJA, mask_BJ = torch.from_numpy(shown.actions_BJA), torch.from_numpy(shown.mask_BJ)
        self._shown = Demonstration(inputs=inputs, actions_BJA=actions_BJA, mask_BJ=mask_BJ)
        policy.set_normaliser(inputs.states_BS, actions_BJA[mask_BJ])
        return told | {"bc/chunks": float(len(inputs))}

    def _played(self, starts: Sequence[InitialState]) -> Shown:
        simulator, least = self.config.simulator, self.config.imitation.min_success
        simulators = SimulatorProcess(simulator, DEMO_SIMULATORS, timeout_s=DEMO_TIMEOUT_S)
        try:
            shown = demonstrate(simulators, DEMO_SIMULATORS, starts, self.trainer.policy.config.chunk)
        finally:
            simulators.close()
        success = shown.num_episodes / len(starts)
        if success < least or not shown.observations:
            raise DataError(
                f"the scripted expert of {simulator.type!r} succeeds in {success:.0%} of {len(starts)} episodes, below "
                f"imitation.min_success = {least:.0%}: it is not worth imitating here"
            )
        return shown

    def imitate(self, num_steps: int) -> dict[str, float]:
        """The next supervised steps; the metrics of the last."""
        assert self._shown is not None, "it has watched first"
        how = self.config.imitation
        with self.device_lock():
            return self.trainer.imitate(self._shown, num_steps, how.batch_size, how.learning_rate)

    def end_imitation(self) -> None:
        self.trainer.end_imitation()
        self._shown = None

    def train(self, source: Edge, version: PolicyVersion) -> Mapping[str, float]:
        """One batch, whole; `publish` follows."""
        episodes: list[EmbodiedTrajectory] = []
        with ExitStack() as turn:
            for part in self._parts(source, turn, whole_groups=True):
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
