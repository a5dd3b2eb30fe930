"""Workers that are trained: the critic here, the actors in their own files. What they have in common.

A learner loops over its edge: it adds the gradient of every chunk as it comes, and takes its optimizer step when the
batch is through. Where the algorithm's advantages need more than a group (a critic's values, a KL penalty in the
reward, statistics of the batch) they are computed here, once, by `Advantages`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rill.algorithms import Algorithm, AlgorithmConfig, Scope
from rill.data.loader import PromptSource
from rill.errors import CheckpointError
from rill.runtime.channel import Channel
from rill.runtime.context import current
from rill.runtime.worker import Worker, concurrent
from rill.telemetry.run import write_atomically
from rill.training.parallel import World
from rill.training.trainer import Trainer
from rill.training.value import ValueTrainer
from rill.types import PolicyVersion, Sample
from rill.weights import CanaryProof, SealedManifest, open_publisher, take_part
from rill.weights.publishing import PublishingWorker
from rill.workers.config import SyncConfig
from rill.workers.edges import Edge, num_shares, put_all
from rill.workers.scorers import rendezvous_of, with_column

if TYPE_CHECKING:
    from rill.training.robots import RobotTrainer

ALGORITHM_FILE, LOADER_FILE = "algorithm.json", "loader.json"


class LearningWorker(Worker):
    """One rank of a trainer. Every rank takes part in every call, because parameters are sharded over them."""

    trainer: Trainer | RobotTrainer
    algorithm: Algorithm | None = None
    """One that learns something by itself (the KL coefficient) is part of a checkpoint."""

    def onload(self) -> None:
        self.trainer.onload()

    def offload(self) -> None:
        self.trainer.offload()

    @concurrent
    def num_shares(self) -> int:
        return num_shares(self.world_size, self.trainer.world)

    def save(self, folder: str) -> None:
        """Returns when training may go on; the files follow (`wait_saved`). One that has left its devices to others
        does not ask for them."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        with nullcontext() if self.trainer.rests_on_host else self.device_lock():
            self.trainer.save(folder)
        if self.rank == 0 and self.algorithm is not None:  # it is the same on every rank
            write_atomically(Path(folder) / ALGORITHM_FILE, json.dumps(self.algorithm.state_dict()))

    @concurrent
    def wait_saved(self, timeout_s: float) -> None:
        self.trainer.wait_saved(timeout_s)

    def load(self, folder: str) -> None:
        with self.device_lock():
            self.trainer.load(folder)
        if self.algorithm is None:
            return
        path = Path(folder) / ALGORITHM_FILE
        try:
            self.algorithm.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def save_place(folder: str, source: PromptSource, world: World) -> None:
    """Where each data rank stands in what it reads."""
    if world.leads:
        write_atomically(Path(folder) / f"{world.data_rank}-{LOADER_FILE}", json.dumps(source.state()))


def load_place(folder: str, world: World) -> dict[str, Any] | None:
    """None: nothing was being read when this was saved."""
    paths = [Path(folder) / f"{rank}-{LOADER_FILE}" for rank in (world.data_rank, 0)]
    # Where fewer ranks wrote it all stood at the same place, so the first one's will do.
    path = next((each for each in paths if each.exists()), None)
    if path is None:
        return None
    try:
        place: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return place
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class PolicyLearner(PublishingWorker, LearningWorker):
    """One that learns the policy: its first rank publishes the weights, with what engines must answer to a canary."""

    def _open_publisher(self, sync: SyncConfig) -> None:
        self.sync = sync
        self.publisher = open_publisher(sync.transport, host=current().site.host) if self.rank == 0 else None

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.trainer.close()

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        """By the names that engines know. A collective."""

    @abstractmethod
    def _proof(self, dtype: str) -> CanaryProof:
        """What this trainer computes for the canary. A collective."""

    def _gather(self, version: PolicyVersion) -> SealedManifest | None:
        if self.publisher is None:
            take_part(self._weights())
            if self.sync.canary:
                self._proof("float32")  # of no use here but for the ranks beside it
            return None
        manifest = self.publisher.publish(self._weights(), version)
        return manifest.seal(self._proof(manifest.tensors[0].dtype) if self.sync.canary else None)


class Advantages:
    """Advantages that could not be computed where the group was made; what needs the whole batch waits for it."""

    def __init__(self, algorithm: Algorithm, trainer: Trainer) -> None:
        self._algorithm = algorithm
        self._trainer = trainer
        self._waiting: list[Sample] = []
        self._num_tokens = 0.0
        self.metrics: dict[str, float] = {}
        """Of the batch so far: a chunk counts by its trained tokens."""

    def add(self, samples: list[Sample], *, is_last: bool) -> list[Sample] | None:
        """The samples that can be trained on now; None while they wait for the rest of the batch. A collective."""
        if self._algorithm.scope is Scope.BATCH:
            self._waiting += samples
            if not is_last:
                return None
            samples, self._waiting = self._waiting, []
        reduce = self._trainer.world.sum_over_data
        judged, found = self._algorithm.advantages(samples, reduce, self._trainer.keeps)
        if found:
            num_own = sum(int(sample.trajectory.loss_mask.sum()) for sample in judged)
            num_new = float(reduce(torch.tensor(num_own, dtype=torch.float64)))
            self._num_tokens += num_new
            share = num_new / max(1.0, self._num_tokens)
            self.metrics = {n: (1 - share) * self.metrics.get(n, 0.0) + share * v for n, v in found.items()}
        return list(judged)


class CriticWorker(LearningWorker):
    """The value function: adds its values and the advantages that follow from them to every sample on its way to the
    actor, and learns from the same samples."""

    trainer: ValueTrainer
    algorithm: Algorithm

    def __init__(self, *, config: ValueTrainer.Config, algorithm: AlgorithmConfig) -> None:
        self.algorithm = Algorithm(algorithm)
        self.trainer = ValueTrainer(
            config, self.algorithm, rendezvous=rendezvous_of(self), device=self.device
        )

    def train(self, source: Edge, target: Channel) -> Mapping[str, float]:
        """One batch. Values are those of the weights before the step, which is taken when all of it is through."""
        advantages = Advantages(self.algorithm, self.trainer)
        keys: list[str] = []
        num_samples = 0
        world, cost = self.trainer.world, self.trainer.cost_model
        with ExitStack() as turn:
            for part in source.parts(self, world, whole_groups=True, cost=cost, turn=turn):
                if part.is_first:
                    self.trainer.begin()
                num_samples += len(part.chunk.lengths_S)
                samples = part.samples()
                samples = with_column(samples, "values", self.trainer.values(samples))
                keys += part.keys
                judged = advantages.add(samples, is_last=part.chunk.is_last)
                if judged is None:
                    continue
                if world.leads:
                    put_all(target, keys, judged)
                keys = []
                self.trainer.accumulate(judged)
            metrics = self.trainer.finish()
            self.algorithm.observe(advantages.metrics, num_samples)  # a KL in the reward is taken here
        named = {f"critic/{name.removeprefix('value/')}": value for name, value in metrics.items()}
        return {**advantages.metrics, **named}
