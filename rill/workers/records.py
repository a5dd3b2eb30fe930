"""The small records that pass between the controller and the workers around it, and the channels that they pass.

    controller ── Task ──▶ episodes ── Outcome ──▶ controller ── Chunk ──▶ every stage, every rank
                              └───── Sample ── (samples channel, by key) ──────▲

A task and an outcome are one group each; a chunk is a part of a batch. None of them holds a finished sample, and none
reaches the driver.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from rill.errors import ChannelClosedError, RillError, RunError, in_words
from rill.inference.base import Completion
from rill.runtime.channel import Channel, Lease
from rill.training.balance import CostModel, partition
from rill.types import EmbodiedTrajectory, Ints, PolicyVersion, Prompt, Sample

A = TypeVar("A")
TRAIN = ""
"""No evaluation set can be called so."""
BY_TOKENS = CostModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What was said and done in a group that was stopped: it goes on from there, on any worker."""

    answers: Mapping[str, Completion] = field(default_factory=dict)
    """By request id. One with the stop reason ABORTED is to be continued."""
    events: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By episode: what tools answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt to be answered `num_samples` times."""

    index: int
    """Position in the order of admission; decides the order inside a batch."""
    prompt: Prompt
    num_samples: int
    purpose: str = TRAIN
    """TRAIN, or the name of an evaluation set."""
    epoch: int = 0
    """Of the tasks channel: what `stop` of that epoch stops."""
    progress: Progress = Progress()
    """From an earlier attempt that was stopped."""
    num_resumes: int = 0
    """How often it was stopped."""

    @property
    def id(self) -> str:
        return group_id(self.index) if self.purpose == TRAIN else f"{self.purpose}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a task: kept, dropped by a filter, or stopped unfinished."""

    index: int
    purpose: str = TRAIN
    lengths: tuple[int, ...] = ()
    """Tokens of each sample that lies in the samples channel; empty unless it is kept."""
    dropped: str | None = None
    """Why a filter dropped it; None: not dropped."""
    stopped: Progress | None = None
    """How far it came when it was stopped; None: it was finished."""
    rewards: tuple[float, ...] = ()
    """Of each episode, the first agent's; not a number where it failed. Empty where it was stopped."""
    error: str | None = None
    """Of an evaluation: why one of the episodes failed."""
    oldest_version: PolicyVersion | None = None
    """With a token in it; None where nothing was sampled."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        return self.dropped is None and self.stopped is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some groups of a batch, as columns: every rank of a stage derives the same shares from it.

    Axes: G group, by admission; S sample, group by group.
    """

    step: int
    number: int
    is_last: bool
    """Of its batch."""
    indices_G: Ints
    sizes_G: Ints
    """Samples of each group."""
    lengths_S: Ints
    """Tokens of each sample."""

    @staticmethod
    def of(outcomes: Sequence[Outcome], *, step: int, number: int, is_last: bool) -> Chunk:
        """By admission, so that a chunk does not depend on which of its groups happened to finish first."""
        ordered = sorted(outcomes, key=lambda outcome: outcome.index)
        return Chunk(
            step=step,
            number=number,
            is_last=is_last,
            indices_G=np.array([outcome.index for outcome in ordered], np.int32),
            sizes_G=np.array([len(outcome.lengths) for outcome in ordered], np.int32),
            lengths_S=np.array([n for outcome in ordered for n in outcome.lengths], np.int32),
        )

    @property
    def keys_S(self) -> list[str]:
        """Where the samples lie."""
        rows = zip(self.indices_G.tolist(), self.sizes_G.tolist(), strict=True)
        return [sample_key(group_id(index), i) for index, size in rows for i in range(size)]

    def share(self, rank: int, num_ranks: int, *, whole_groups: bool, cost: CostModel) -> list[str]:
        """The sample keys of one rank: balanced by cost, in batch order. `whole_groups` keeps siblings together."""
        keys_S = self.keys_S
        if num_ranks == 1:
            return keys_S
        costs_S = cost(self.lengths_S.astype(np.int64))
        if not whole_groups:
            return [keys_S[s] for s in sorted(partition(costs_S, num_ranks)[rank])]
        ends_G = np.cumsum(self.sizes_G)
        starts_G = ends_G - self.sizes_G
        part = partition(np.add.reduceat(costs_S, starts_G), num_ranks)[rank]
        return [key for g in sorted(part) for key in keys_S[starts_G[g] : ends_G[g]]]


class Answers(Generic[A]):
    """What others answer, as futures by the name of what was asked. One thread reads the channel for as long as the
    process lives. `read` makes the answer of what came, or raises."""

    def __init__(self, channel: Channel, read: Callable[[Any], A] = lambda answer: answer) -> None:
        self.name = channel.name
        self._channel = channel
        self._read_one = read
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[A]] = {}
        self._failure: RunError | None = None
        """Why no more answers come."""
        threading.Thread(target=self._read, name="answers", daemon=True).start()

    def expect(self, request_id: str) -> Future[A]:
        """Before it is asked."""
        future: Future[A] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waiting[request_id] = future
        return future

    def _read(self) -> None:
        try:
            while True:
                answer = self._channel.take()
                with self._lock:
                    future = self._waiting.pop(answer.request_id, None)
                # Answered twice: somebody died between the answer and the receipt. Or nobody wants it any more.
                if future is None or future.cancelled():
                    continue
                try:
                    future.set_result(self._read_one(answer))
                except RillError as error:
                    future.set_exception(error)
        except ChannelClosedError:  # the run is over
            return
        except Exception as error:  # noqa: BLE001  boundary: else all who wait would do so for as long as a step may last
            with self._lock:
                self._failure = RunError(f"{self.name}: no answer can be read any more: {in_words(error)}")
            for future in self._waiting.values():
                if not future.cancelled():
                    future.set_exception(self._failure)


class Flows(NamedTuple):
    """The channels of generation."""

    tasks: Channel
    samples: Channel
    outcomes: Channel

    async def finish(
        self, lease: Lease, outcome: Outcome, samples: Sequence[Sample | EmbodiedTrajectory]
    ) -> None:
        """What came of a task, together with the end of its lease: all of it, or nothing, and then somebody else does
        it again."""
        async with lease:
            for number, sample in enumerate(samples):
                key = sample_key(lease.value.id, number)
                await self.samples.put_async(sample, weight=float(sample.num_tokens), key=key)
            await self.outcomes.put_async(outcome)


def group_id(index: int) -> str:
    """The name of a group, in logs, sample keys and seeds."""
    return f"g{index:08d}"


def sample_key(group: str, sample: int) -> str:
    """Where a sample lies in a channel."""
    return f"{group}/{sample}"
