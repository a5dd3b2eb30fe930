"""The policy as environments see it: awaitable, seeded, asked in whole chunks, and resumable.

    episode ── generate ──▶ EpisodePolicy ──▶ PolicyClient ──▶ Asked: an EngineGate here, or engines elsewhere
                                └ answers by request id                 (rill.workers.env_worker)

Environments are coroutines on one event loop. All requests that they make in one turn of the loop reach the engine in
one submit(), so that a chunk of groups is scheduled as a unit: its prefixes are shared, and at lag 0 the batch that an
engine sees does not depend on timing.

One resumable generation: an engine that is told to stop (EngineGate.stop) answers everything of that epoch as ABORTED,
with the tokens so far. The episode is then cancelled and keeps what it was told, by request id; taken up again, by any
worker, it runs from its start: what was answered is answered at once and in the same words, and what was cut off goes
on behind the tokens it has (continued.py). A request id is made from the episode and the prompt's tokens, so an answer
is only ever found again for the same prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from rill.errors import RequestError
from rill.inference.base import Completion, Delta, Engine, Feature, Request
from rill.inference.continued import Decode, Flight, hashed, joined, reseeded, rest_of
from rill.telemetry import trace
from rill.types import Picture, SamplingParams, StopReason, TokenIds

T = TypeVar("T")


class Asked(Protocol):
    """Whoever answers: never blocks."""

    def submit(self, requests: Sequence[Request], epoch: int) -> list[Future[Completion]]: ...


class PolicyClient:
    """Shared by all episodes of a worker; `episode` gives the view of one."""

    def __init__(self, asked: Asked, *, seed: int, decode: Decode) -> None:
        """`decode` finds stop strings that lie across the place where an answer was cut."""
        self._asked = asked
        self._seed = seed
        self.decode = decode
        self._pending: dict[int, list[tuple[Request, asyncio.Future[Completion]]]] = {}
        """By epoch."""

    def episode(self, episode_id: str, answers: dict[str, Completion], epoch: int = 0) -> EpisodePolicy:
        """`answers` holds what the episode was told before, and gets what it is told now."""
        return EpisodePolicy(self, episode_id, answers, epoch)

    def seed_of(self, request_id: str) -> int:
        """The same run seed and request give the same tokens, on whichever engine they are made."""
        return hashed(f"{self._seed}:{request_id}")

    async def complete(self, request: Request, epoch: int) -> Completion:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.setdefault(epoch, []).append((request, answer))
        return await answer

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for epoch, asked in sorted(pending.items()):
            if wanted := [one for one in asked if not one[1].cancelled()]:
                self._submit(wanted, epoch)

    def _submit(self, asked: Sequence[tuple[Request, asyncio.Future[Completion]]], epoch: int) -> None:
        try:
            futures = self._asked.submit([request for request, _ in asked], epoch)
        except Exception as error:  # noqa: BLE001  boundary: the loop would log it, and the episodes wait for ever
            if isinstance(error, RequestError) and len(asked) > 1:
                for one in asked:  # nothing was taken: only who asks for the impossible is told so
                    self._submit([one], epoch)
                return
            for _, answer in asked:
                answer.set_exception(error)
            return
        loop = asyncio.get_running_loop()
        for (_, answer), future in zip(asked, futures, strict=True):
            future.add_done_callback(partial(_settle_from_thread, loop, answer))


class EpisodePolicy:
    """rill.envs.base.Policy for one episode."""

    def __init__(
        self, client: PolicyClient, episode_id: str, answers: dict[str, Completion], epoch: int
    ) -> None:
        self._client = client
        self._episode_id = episode_id
        self._answers = answers
        self._epoch = epoch

    async def generate(
        self,
        token_ids: TokenIds,
        sampling: SamplingParams,
        *,
        name: str,
        model: str | None = None,
        pictures: tuple[Picture, ...] = (),
    ) -> Completion:
        """Raises CancelledError where the engine was stopped: the episode ends here and can be taken up again."""
        request_id = f"{self._episode_id}#{name}"
        before = self._answers.get(request_id)
        if before is not None and before.stop_reason is not StopReason.ABORTED:
            return before
        asked = Request(
            id=request_id, token_ids=token_ids, sampling=sampling, adapter=model, pictures=pictures
        )
        completion = await self._ask(asked, before)
        if completion.stop_reason is StopReason.ABORTED:
            if len(completion.token_ids) < sampling.max_new_tokens:
                if len(completion.token_ids):
                    self._answers[request_id] = completion
                raise asyncio.CancelledError(f"{request_id} was stopped")
            completion = replace(completion, stop_reason=StopReason.LENGTH)  # stopped with its last token
        self._answers[request_id] = completion
        return completion

    async def _ask(self, request: Request, before: Completion | None) -> Completion:
        sampling = request.sampling
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=self._client.seed_of(request.id))
            request = replace(request, sampling=sampling)
        if before is None:
            return await self._client.complete(request, self._epoch)
        after = await self._client.complete(rest_of(request, before.token_ids), self._epoch)
        return joined(before, after, sampling.stop, self._client.decode)


def _settle_from_thread(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Completion], future: Future[Completion]
) -> None:
    """Runs in the engine's thread. A loop that ended early (an episode failed) no longer wants its answers."""

    def settle() -> None:
        if answer.cancelled():
            return
        if (error := future.exception()) is not None:
            answer.set_exception(error)
        else:
            answer.set_result(future.result())

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)


class EngineGate:
    """An engine that can be told to stop: what runs is aborted, and what is asked later for that epoch is not begun.
    How rollout workers see theirs. What is stopped is answered as ABORTED with its tokens so far: it can be continued.

    `submit` and `stop` are called by different threads.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._stopped_through = -1
        self._running: dict[str, int] = {}
        """Request id -> epoch."""
        self._busy: trace.Span | None = None
        """Open while anything is asked of the engine."""
        self._marking = threading.Lock()

    def submit(
        self, requests: Sequence[Request], epoch: int, on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        with self._lock:
            if epoch <= self._stopped_through:
                return [answered(Flight(request, None).aborted()) for request in requests]
            if Feature.SEEDED_BY_POSITION not in self._engine.features:
                requests = [reseeded(request) for request in requests]
            begun = {request.id: epoch for request in requests if request.id not in self._running}
            self._running |= begun  # before any of them can end
            self._mark()
            try:
                futures = self._engine.submit(requests, on_delta)
            except BaseException:
                for name in begun:
                    del self._running[name]
                self._mark()
                raise
        for request, future in zip(requests, futures, strict=True):
            future.add_done_callback(partial(self._forget, request.id))
        return futures

    def stop(self, epoch: int) -> None:
        """Everything of this epoch and those before it."""
        with self._lock:
            self._stopped_through = max(self._stopped_through, epoch)
            stopped = [name for name, begun in self._running.copy().items() if begun <= epoch]
        if stopped:
            self._engine.abort(stopped)  # outside: it waits for the engine's thread, which calls `_forget`

    def reopen(self) -> None:
        """Epochs are counted from 0 again."""
        with self._lock:
            self._stopped_through = -1

    def _forget(self, name: str, _: Future[Completion]) -> None:
        """By the engine's thread, which waits for nobody here."""
        self._running.pop(name, None)
        if not self._running:
            self._mark()

    def _mark(self) -> None:
        """In the trace, once it begins to run or has ended."""
        with self._marking:
            if self._running and self._busy is None:
                self._busy = trace.span("sampling", lane="engine").__enter__()
            elif not self._running and self._busy is not None:
                self._busy.__exit__(None, None, None)
                self._busy = None


def answered(answer: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(answer)
    return future
