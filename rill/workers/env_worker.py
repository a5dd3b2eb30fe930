"""The environment worker: episodes and rewards in processes of their own, against engines elsewhere.

    episodes ──▶ PolicyClient ──▶ RemoteEngines ── Question ──▶ requests ──▶ any rollout worker with room
                                        ▲                                              │
                                        └── Completion ── answers[rank] ◀──────────────┘

A question is leased: an engine that dies leaves it to another, and the episode only waits longer. Environments never
take an engine's time, nor the lock of its interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from rill.errors import RequestError
from rill.inference.base import Completion, Request
from rill.runtime.channel import Channel
from rill.runtime.context import current
from rill.runtime.worker import Worker
from rill.workers.episodes import Episodes, EpisodeSettings
from rill.workers.event_loop import EventLoop
from rill.workers.records import Answers, Flows


class Question(NamedTuple):
    """Requests of one group, made in one turn of the event loop: one engine answers them, and shares their prefix."""

    requests: tuple[Request, ...]
    epoch: int
    asker: int
    """The environment worker's rank."""
    is_training: bool = True


class Refused(NamedTuple):
    """The answer to a request that no engine can take."""

    request_id: str
    reason: str


class EnvWorker(Worker):
    def __init__(self, *, settings: EpisodeSettings) -> None:
        name = f"{self.group_name}-{self.rank}"
        self.journal = settings.open_journal(name)
        self.episodes = Episodes(settings, name, self.journal)
        self.loop = EventLoop()
        self._answers: Answers[Completion] | None = None

    def close(self) -> None:
        self.loop.close()
        self.episodes.close()
        if self.journal is not None:
            self.journal.close()

    def rest(self) -> None:
        """Between two sessions: as RolloutWorker.rest."""
        if self.journal is not None:
            self.journal.hand_over()

    def run(self, flows: Flows, requests: Channel, answers: tuple[Channel, ...], epoch: int) -> int:
        """Until this epoch of the tasks ends and everything taken is finished; returns the number of groups."""
        if self._answers is None or self._answers.name != answers[self.rank].name:  # other ones after a move
            self._answers = Answers(answers[self.rank], _under_own_name)
        training = RemoteEngines(requests, self._answers, self.rank, is_training=True)
        evaluation = RemoteEngines(requests, self._answers, self.rank, is_training=False)
        return self.loop.run(self.episodes.run(flows, training, evaluation, epoch))


class RemoteEngines(NamedTuple):
    """policy.Asked over channels."""

    requests: Channel
    answers: Answers[Completion]
    rank: int
    is_training: bool
    """The engine puts down every token (rill.journal)."""

    def submit(self, requests: Sequence[Request], epoch: int) -> list[Future[Completion]]:
        process = (
            current().address.identity
        )  # what one that died had asked may still be under way in an engine
        named = [replace(request, id=f"{request.id}@{process}") for request in requests]
        futures = [self.answers.expect(request.id) for request in named]
        questions = [
            Question(tuple(asked), epoch, self.rank, self.is_training)
            for _, asked in groupby(named, key=_group_of)
        ]
        self.requests.put_many(questions, [float(len(question.requests)) for question in questions])
        return futures


def _under_own_name(answer: Completion | Refused) -> Completion:
    if isinstance(answer, Refused):
        raise RequestError(answer.reason)
    return replace(answer, request_id=answer.request_id.rpartition("@")[0])


def _group_of(request: Request) -> str:
    return request.id.partition("/")[0]
