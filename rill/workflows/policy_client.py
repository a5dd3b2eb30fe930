"""An engine as one worker's environments see it: awaitable, seeded, and submitted to in whole chunks.

Environments are coroutines on one event loop. All the requests that they make in one turn of the loop reach the
engine in one submit(), so that a chunk of groups is scheduled as a unit: its prefixes are shared, and at lag 0 the
batch an engine sees does not depend on timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from rill.errors import RillError
from rill.inference.base import Completion, Engine, Request
from rill.telemetry import trace
from rill.types import SamplingParams, TokenIds


class PolicyClient:
    """Shared by all episodes of a worker; `episode(id)` gives the view of one."""

    def __init__(self, engine: Engine, *, seed: int) -> None:
        self._engine = engine
        self._seed = seed
        self._pending: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._num_unanswered = 0
        self._busy = trace.span("sampling", lane="engine")

    def episode(self, trajectory_id: str) -> EpisodePolicy:
        return EpisodePolicy(self, trajectory_id)

    def seed_of(self, request_id: str) -> int:
        """The same run seed and request give the same tokens, on whichever engine they are made."""
        digest = hashlib.blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    async def complete(self, request: Request) -> Completion:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((request, answer))
        if self._num_unanswered == 0:
            self._busy = trace.span("sampling", lane="engine")  # while anything is asked of the engine
            self._busy.__enter__()
        self._num_unanswered += 1
        try:
            return await answer
        finally:
            self._num_unanswered -= 1
            if self._num_unanswered == 0:
                self._busy.__exit__(None, None, None)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        try:
            futures = self._engine.submit([request for request, _ in pending])
        except RillError as error:
            for _, answer in pending:
                answer.set_exception(error)
            return
        loop = asyncio.get_running_loop()
        for (_, answer), future in zip(pending, futures, strict=True):
            future.add_done_callback(partial(_settle_from_thread, loop, answer))


def _settle_from_thread(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Completion], future: Future[Completion]
) -> None:
    """Runs in the engine's thread. A loop that ended early (an episode failed) no longer wants its answers."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, answer, future)


def _settle(answer: asyncio.Future[Completion], future: Future[Completion]) -> None:
    if answer.cancelled():
        return
    error = future.exception()
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(future.result())


class EpisodePolicy:
    """rill.envs.base.Policy for one trajectory: numbers its turns and seeds them."""

    def __init__(self, client: PolicyClient, trajectory_id: str) -> None:
        self._client = client
        self._trajectory_id = trajectory_id
        self._num_calls = 0

    async def generate(self, token_ids: TokenIds, sampling: SamplingParams) -> Completion:
        request_id = f"{self._trajectory_id}#{self._num_calls}"
        self._num_calls += 1
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=self._client.seed_of(request_id))
        return await self._client.complete(Request(id=request_id, token_ids=token_ids, sampling=sampling))
