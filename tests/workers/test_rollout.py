"""How an engine's worker answers, without a process or an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rill.errors import EngineDiedError, JournalError, RillError
from rill.inference.base import Completion, Request
from rill.workers.env_worker import Question
from rill.workers.rollout import RolloutWorker


class Broken:
    """An engine that takes no request, or answers each with an error."""

    def __init__(self, error: RillError, *, at_once: bool) -> None:
        self._error, self._at_once = error, at_once

    def submit(self, requests: Sequence[Request], epoch: int) -> list[Future[Completion]]:
        if self._at_once:
            raise self._error
        futures: list[Future[Completion]] = [Future() for _ in requests]
        for future in futures:
            future.set_exception(self._error)
        return futures


class Lease:
    def __init__(self, value: Question) -> None:
        self.value = value

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class Asking:
    """A channel of one question, until it is answered."""

    def __init__(self, question: Question) -> None:
        self._question = question

    async def leases(self) -> AsyncIterator[Lease]:
        yield Lease(self._question)
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "at_once"), [(JournalError("make room"), True), (EngineDiedError("it is gone"), False)], ids=str
)
async def test_what_ends_an_engines_answers_is_told_as_it_is(error: RillError, at_once: bool) -> None:
    """Not as a group of errors, with the cause that it had."""
    error.__cause__ = OSError("the disk")
    worker: Any = RolloutWorker.__new__(RolloutWorker)
    worker.max_concurrent, worker.logged = 4, Broken(error, at_once=at_once)
    asking: Any = Asking(Question((Request(id="r", token_ids=np.array([1], np.int32)),), epoch=0, asker=0))
    answers: Any = (SimpleNamespace(put_async=None),)
    with pytest.raises(type(error)) as caught:
        await worker._serve(asking, answers)
    assert caught.value is error and isinstance(error.__cause__, OSError)
