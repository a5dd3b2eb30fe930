"""The rollout engines as the loop sees them: generate, take new weights, evaluate; and who among them is in service.

Weights go from the actor to the engines without passing the driver: only the manifest does. After each sync every
engine answers a canary: its log-probabilities of fixed tokens are compared with the trainer's own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rill.runtime.channel import Channel
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.types import PolicyVersion, Prompt
from rill.workflows.actor import ActorWorker
from rill.workflows.canary import Publication
from rill.workflows.rollout import RolloutWorker, SyncReport
from rill.workflows.sections import EvalConfig, SyncConfig


class Fleet:
    def __init__(
        self,
        rollout: WorkerGroup[RolloutWorker],
        actor: WorkerGroup[ActorWorker],
        config: SyncConfig,
        *,
        interrupt: bool,
    ) -> None:
        self._rollout = rollout
        self._actor = actor
        self._config = config
        self._interrupt = interrupt
        self.version = PolicyVersion(0)

    def generate(self, jobs: Channel, rollouts: Channel, outcomes: Channel) -> Handle:
        return self._rollout.generate(jobs, rollouts, outcomes)

    def publish(self, version: PolicyVersion) -> dict[str, float]:
        """Bring every engine to the actor's weights. Raises StaleWeightsError where the canary disagrees."""
        began = time.monotonic()
        publication: Publication = self._actor.publish(version).wait(timeout_s=self._config.timeout_s)[0]
        published = time.monotonic()
        reports: list[SyncReport] = self._rollout.update(publication, self._interrupt).wait(
            timeout_s=self._config.timeout_s
        )
        self.version = version
        figures = {
            "sync/publish_s": published - began,
            "sync/update_s": time.monotonic() - published,
            "sync/bytes": float(publication.manifest.num_bytes),
        }
        differences = [report.canary_difference for report in reports if report.canary_difference is not None]
        if differences:
            figures["sync/canary"] = max(differences)
        return figures

    def evaluate(self, prompts: Sequence[Prompt], config: EvalConfig, timeout_s: float) -> list[list[float]]:
        """Rewards of each prompt's samples, in the order of the prompts. Each engine answers its share."""
        shares = self._rollout.evaluate(list(prompts), config).wait(timeout_s=timeout_s)
        rewards: dict[str, list[float]] = {}
        for share in shares:
            rewards.update(share)
        return [rewards[prompt.id] for prompt in prompts]
