"""The environment worker: episodes and rewards in processes of their own, against engines elsewhere.

    episodes ──▶ PolicyClient ──▶ RemoteEngines ── Question ──▶ requests ──▶ any rollout worker with room
                                        ▲                                              │
                                        └── Completion ── answers[rank] ◀──────────────┘

A question is leased: an engine that dies leaves it to another, and the episode only waits longer. Environments never
take an engine's time, nor the lock of its interpreter.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from rill.errors import ChannelClosedError, RequestError
from rill.inference.base import Completion, Request
from rill.runtime.channel import Channel
from rill.runtime.context import current
from rill.runtime.worker import Worker
from rill.workflows.episodes import Episodes, EpisodeSettings, Flows
from rill.workflows.policy import PolicyClient


class Question(NamedTuple):
    """Requests of one group, made in one turn of the event loop: one engine answers them, and shares their prefix."""

    requests: tuple[Request, ...]
    epoch: int
    asker: int
    """The environment worker's rank."""
    is_training: bool = True
    """Then the engine puts down every token (rill.journal)."""


class Refused(NamedTuple):
    """The answer to a request that no engine can take."""

    request_id: str
    reason: str


class EnvWorker(Worker):
    def __init__(self, *, settings: EpisodeSettings) -> None:
        self.seed = settings.seed
        self.episodes = Episodes(settings, f"{self.group_name}-{self.rank}")
        self._engines: RemoteEngines | None = None

    def close(self) -> None:
        self.episodes.close()

    def run(self, flows: Flows, requests: Channel, answers: tuple[Channel, ...]) -> int:
        """Until the epoch of the tasks ends and everything taken is finished; returns the number of groups."""
        if self._engines is None:
            self._engines = RemoteEngines(requests, answers[self.rank], self.rank)
        decode = self.episodes.tokenizer.decode
        policies = {
            is_training: PolicyClient(asked, seed=self.seed + (not is_training), decode=decode)
            for is_training, asked in ((True, self._engines), (False, ForEvaluation(self._engines)))
        }
        return asyncio.run(self.episodes.run(flows, policies))


class RemoteEngines:
    """policy.Asked over channels. One thread reads the answers for as long as the process lives."""

    def __init__(self, requests: Channel, answers: Channel, rank: int) -> None:
        self._requests = requests
        self._answers = answers
        self._rank = rank
        self._process = current().address.identity
        """Part of the names that engines see: what a process that died had asked may still be under way there."""
        self._lock = threading.Lock()
        self._waiting: dict[str, Future[Completion]] = {}
        threading.Thread(target=self._read, name="answers", daemon=True).start()

    def submit(
        self, requests: Sequence[Request], epoch: int, *, is_training: bool = True
    ) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = [Future() for _ in requests]
        named = [replace(request, id=f"{request.id}@{self._process}") for request in requests]
        with self._lock:
            self._waiting.update((r.id, f) for r, f in zip(named, futures, strict=True))
        questions = [
            Question(tuple(asked), epoch, self._rank, is_training)
            for _, asked in groupby(named, key=_group_of)
        ]
        self._requests.put_many(questions, [float(len(question.requests)) for question in questions])
        return futures

    def _read(self) -> None:
        try:
            while True:
                self._settle(self._answers.take())
        except ChannelClosedError:  # the run is over
            return

    def _settle(self, answer: Completion | Refused) -> None:
        with self._lock:
            future = self._waiting.pop(answer.request_id, None)
        if future is None:  # answered twice, because an engine died between its answer and the receipt
            return
        if isinstance(answer, Refused):
            future.set_exception(RequestError(answer.reason))
        else:
            future.set_result(replace(answer, request_id=answer.request_id.rpartition("@")[0]))


class ForEvaluation:
    """policy.Asked for what is not trained on."""

    def __init__(self, engines: RemoteEngines) -> None:
        self._engines = engines

    def submit(self, requests: Sequence[Request], epoch: int) -> list[Future[Completion]]:
        return self._engines.submit(requests, epoch, is_training=False)


def _group_of(request: Request) -> str:
    return request.id.partition("/")[0]
