"""The actor of an embodied run: trains the policy, lets it imitate an expert first, and publishes its weights.

Calls, in order: `imitate` until the warm start is done, `publish` before the first step, then `train` once a step and
`publish`, and `save` now and then. Batches are trained on whole: PPO passes over them several times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.config import PartConfig
from rill.envs.robots.process import SimulatorProcess
from rill.envs.robots.recording import demonstrate
from rill.errors import DataError
from rill.models.robots.inputs import read
from rill.runtime.context import current
from rill.runtime.worker import concurrent
from rill.training.robots import ROBOT_TRAINERS, Demonstration, RobotTrainer
from rill.types import EmbodiedTrajectory, InitialState, PolicyVersion
from rill.weights import Canary, CanaryProof, SealedManifest, open_publisher, take_part
from rill.weights.publishing import PublishingWorker
from rill.workflows.config import SyncConfig
from rill.workflows.edges import Edge, num_shares
from rill.workflows.robot_config import ImitationConfig
from rill.workflows.robot_policy import CANARY_LENGTH, probe
from rill.workflows.robot_settings import PolicySource
from rill.workflows.scorers import rendezvous_of

DEMO_SIMULATORS = 16
DEMO_TIMEOUT_S = 300.0


class RobotActor(PublishingWorker):
    def __init__(
        self,
        *,
        config: PartConfig,
        algorithm: EmbodiedAlgorithmConfig,
        source: PolicySource,
        sync: SyncConfig,
        seed: int,
    ) -> None:
        self.trainer: RobotTrainer = ROBOT_TRAINERS.load(config.type)(
            config,
            algorithm,
            source.open(),
            rendezvous=rendezvous_of(self),
            device=self.device,
            seed=seed,
        )
        self.sync = sync
        self.publisher = open_publisher(sync.transport, host=current().site.host) if self.rank == 0 else None
        self._shown: Demonstration | None = None

    def onload(self) -> None:
        self.trainer.onload()

    def offload(self) -> None:
        if self.device != "cpu":
            self.trainer.offload()

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.trainer.close()

    # --- training -----------------------------------------------------------------------------------------

    def watch(
        self, simulator: PartConfig, config: ImitationConfig, starts: Sequence[InitialState]
    ) -> dict[str, float]:
        """See an expert play; every rank sees the same."""
        simulators = SimulatorProcess(simulator, DEMO_SIMULATORS, timeout_s=DEMO_TIMEOUT_S)
        try:
            shown = demonstrate(simulators, DEMO_SIMULATORS, starts, self.trainer.policy.config.chunk)
        finally:
            simulators.close()
        success = shown.num_successes / len(starts)
        if success < config.min_success or not shown.observations:
            raise DataError(
                f"the scripted expert of {simulator.type!r} succeeds in {success:.0%} of {len(starts)} episodes, below "
                f"imitation.min_success = {config.min_success:.0%}: it is not worth imitating here"
            )
        inputs = read(shown.observations, self.trainer.policy.spec)
        self._shown = Demonstration(
            inputs=inputs,
            actions_BJA=torch.from_numpy(shown.actions_BJA),
            mask_BJ=torch.from_numpy(shown.mask_BJ),
        )
        self.trainer.policy.set_normaliser(inputs.states_BS)
        return {"bc/expert_success": success, "bc/chunks": float(len(inputs))}

    def imitate(self, config: ImitationConfig, num_steps: int, is_last: bool) -> dict[str, float]:
        """The next supervised steps; the metrics of the last."""
        assert self._shown is not None, "it has watched first"
        with self.device_lock():
            metrics = self.trainer.imitate(self._shown, num_steps, config.batch_size, config.learning_rate)
            if is_last:
                self.trainer.end_imitation()
                self._shown = None
            return metrics

    def num_shares(self) -> int:
        return num_shares(self.world_size, self.trainer.world)

    def train(self, source: Edge, version: PolicyVersion) -> Mapping[str, float]:
        """One batch, whole; `publish` follows."""
        episodes: list[EmbodiedTrajectory] = []
        with ExitStack() as turn:
            for part in source.parts(
                self, self.trainer.world, whole_groups=True, cost=self.trainer.cost_model
            ):
                if part.is_first:
                    turn.enter_context(self.device_lock())
                episodes += part.samples()  # type: ignore[arg-type]
            with self.timer("update"):
                return self.trainer.update(episodes)

    # --- weights and files --------------------------------------------------------------------------------

    def _gather(self, version: PolicyVersion) -> SealedManifest | None:
        weights = list(self.trainer.policy.state_dict().items())
        if self.publisher is None:
            take_part(weights)
            return None
        manifest = self.publisher.publish(weights, version)
        if not self.sync.canary:
            return manifest.seal(None)
        canary = Canary([np.zeros(CANARY_LENGTH, np.int32)])
        return manifest.seal(
            CanaryProof(canary=canary, expected=probe(self.trainer.policy, canary.sequences))
        )

    def save(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.save(folder)

    @concurrent
    def wait_saved(self, timeout_s: float) -> None:
        """It is when `save` returns."""

    def load(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.load(folder)

    def export(self, folder: str) -> None:
        """The policy, as `policy_path` of another run takes it."""
        if self.rank == 0:
            with self.device_lock():
                self.trainer.policy.save(Path(folder))
