"""The policy's side of the cycle: observations in, chunks of actions out, under the newest weights.

    env ── Question ──▶ requests ──▶ any policy worker ── Answer ──▶ answers[rank] ──▶ env

A question is leased: a worker that dies leaves it to another. New weights come in between two questions; every answer
carries the version that made it. After each sync the worker proves, on fixed observations, that it computes what the
trainer computes.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch

from rill.config import PartConfig
from rill.policies.base import POLICIES, Policy, load_policy, open_policy, read_saved
from rill.policies.probe import probe
from rill.runtime.channel import Channel
from rill.runtime.worker import Worker, concurrent
from rill.training.offload import Shelf
from rill.training.parallel import copy_weights
from rill.types import Decision, Observation, Observations, PolicyVersion, RobotSpec
from rill.weights import Pulled, SealedManifest, open_receiver, seated
from rill.workers.config import SyncConfig
from rill.workers.records import Answers


class PolicySource(NamedTuple):
    """Where the policy comes from, the same in every worker."""

    config: PartConfig
    spec: RobotSpec
    path: str
    seed: int

    def open(self) -> Policy:
        if self.path:
            return load_policy(Path(self.path), self.spec)
        return open_policy(self.config, self.spec, seed=self.seed)

    def check(self) -> None:
        """Whether it fits the robot, from the small files where it is large. UserError: it does not."""
        if self.path:
            read_saved(Path(self.path), self.spec)
        else:
            POLICIES.load(self.config.type).check(self.config, self.spec)


class Question(NamedTuple):
    """What one stage of simulators sees."""

    id: str
    asker: int
    observations: Observations
    seeds: tuple[int, ...]
    greedy: bool


class Answer(NamedTuple):
    request_id: str
    decision: Decision
    version: PolicyVersion


class RobotPolicyWorker(Worker):
    def __init__(self, *, source: PolicySource, sync: SyncConfig) -> None:
        self.policy = source.open().to(self.device).eval()
        self.version = PolicyVersion(0)
        self.sync = sync
        self.receiver = open_receiver(
            seated(sync.transport, rank=self.rank + 1, num_receivers=self.world_size)
        )
        self._updating = threading.Lock()
        self._shelf = Shelf()

    def close(self) -> None:
        self.receiver.close()

    def onload(self) -> None:
        self._shelf.take_all()

    def offload(self) -> None:
        if self.device != "cpu":
            self._shelf.put([*self.policy.parameters(), *self.policy.buffers()])
            torch.cuda.empty_cache()

    def serve(self, requests: Channel, answers: tuple[Channel, ...], epoch: int) -> int:
        """Until this epoch of the requests ends; returns how many there were."""
        count = 0
        with self.device_lock(requests, *answers):
            for question in requests.of_epoch(epoch):
                with self._updating, self.timer("decide"):
                    decision = self.policy.act(question.observations, question.seeds, greedy=question.greedy)
                    version = self.version
                answers[question.asker].put(Answer(question.id, decision, version))
                count += 1
        return count

    @concurrent
    def stop(self, epoch: int) -> None:
        """An episode of a robot is not stopped in the middle."""

    @concurrent
    def update(self, manifest: SealedManifest, interrupt: bool) -> Pulled:
        """Take new weights between two questions."""
        opened = manifest.open()
        with self.device_lock(), self._updating:
            copy_weights(self.policy.trained(), self.receiver.pull(opened))
            self.version = manifest.version
            name = f"{self.group_name}[{self.rank}]"
            return Pulled.proven(
                name, manifest, self.version, lambda sequences: probe(self.policy, sequences)
            )


class RemotePolicy(NamedTuple):
    """The policy as an environment worker sees it."""

    requests: Channel
    answers: Answers[Answer]
    rank: int

    def ask(
        self, observations: Sequence[Observation], seeds: Sequence[int], *, greedy: bool
    ) -> Future[Answer]:
        name = uuid.uuid4().hex
        future = self.answers.expect(name)
        question = Question(name, self.rank, Observations.of(observations), tuple(seeds), greedy)
        self.requests.put(question, weight=float(len(observations)))
        return future
