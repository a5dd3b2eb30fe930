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
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Protocol

from rill.errors import RequestError
from rill.inference.base import Completion, Request
from rill.inference.continued import Decode, joined, rest_of
from rill.types import Picture, SamplingParams, StopReason, TokenIds


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
        self._pending: list[tuple[Request, int, asyncio.Future[Completion]]] = []

    def episode(self, episode_id: str, answers: dict[str, Completion], epoch: int = 0) -> EpisodePolicy:
        """`answers` holds what the episode was told before, and gets what it is told now."""
        return EpisodePolicy(self, episode_id, answers, epoch)

    def seed_of(self, request_id: str) -> int:
        """The same run seed and request give the same tokens, on whichever engine they are made."""
        digest = hashlib.blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    async def complete(self, request: Request, epoch: int) -> Completion:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((request, epoch, answer))
        return await answer

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for epoch in sorted({epoch for _, epoch, _ in pending}):
            self._submit([(request, answer) for request, of, answer in pending if of == epoch], epoch)

    def _submit(self, asked: Sequence[tuple[Request, asyncio.Future[Completion]]], epoch: int) -> None:
        try:
            futures = self._asked.submit([request for request, _ in asked], epoch)
        except Exception as error:  # noqa: BLE001  boundary: the loop would log it, and the episodes wait for ever
            if isinstance(error, RequestError) and len(asked) > 1:
                for (
                    one
                ) in asked:  # nothing was taken: whoever asks for the impossible is told so, and nobody else
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
