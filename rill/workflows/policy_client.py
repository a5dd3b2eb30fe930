"""An engine as one worker's environments see it: awaitable, seeded, and submitted to in whole chunks.

Environments are coroutines on one event loop. All the requests that they make in one turn of the loop reach the
engine in one submit(), so that a chunk of groups is scheduled as a unit: its prefixes are shared, and at lag 0 the
batch an engine sees does not depend on timing.

An episode can be stopped (`put_back`) and taken up again later, by any worker: it keeps every answer it was given, by
request id. Taken up again it runs from its start; what was answered is answered at once and in the same words, and
what was cut off goes on behind the tokens it has (see `continued`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from rill.errors import RequestError, UnsupportedError
from rill.inference.base import Completion, Engine, Request
from rill.telemetry import trace
from rill.types import SamplingParams, StopReason, TokenIds
from rill.workflows.partial_answers import Decode, continued, joined, nothing_said

Asked = tuple[Request, "asyncio.Future[Completion]"]


class PolicyClient:
    """Shared by all episodes of a worker; `episode(id)` gives the view of one."""

    def __init__(self, engine: Engine, *, seed: int, decode: Decode) -> None:
        """`decode` finds stop strings that lie across the place where an answer was cut."""
        self._engine = engine
        self._seed = seed
        self.decode = decode
        self._pending: list[Asked] = []
        self._unanswered: set[str] = set()
        self._busy = trace.span("sampling", lane="engine")
        self.is_stopped = False

    def episode(self, trajectory_id: str, answers: dict[str, Completion] | None = None) -> EpisodePolicy:
        """`answers` holds what the episode was told before, and gets what it is told now."""
        return EpisodePolicy(self, trajectory_id, {} if answers is None else answers)

    def put_back(self) -> list[str]:
        """On the event loop: answer nothing more. Returns the requests that the engine must abort; their episodes end
        as cancelled when it has."""
        self.is_stopped = True
        return list(self._unanswered)

    def seed_of(self, request_id: str) -> int:
        """The same run seed and request give the same tokens, on whichever engine they are made."""
        digest = hashlib.blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    async def complete(self, request: Request) -> Completion:
        if self.is_stopped:
            return nothing_said(request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((request, answer))
        if not self._unanswered:
            self._busy = trace.span("sampling", lane="engine")  # while anything is asked of the engine
            self._busy.__enter__()
        self._unanswered.add(request.id)
        try:
            return await answer
        finally:
            self._unanswered.discard(request.id)
            if not self._unanswered:
                self._busy.__exit__(None, None, None)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if self.is_stopped:
            for request, answer in pending:
                answer.set_result(nothing_said(request))
            return
        try:
            self._submit(pending)
        except RequestError:  # nothing was taken: whoever asks for the impossible is told so, and nobody else
            for one in pending:
                try:
                    self._submit([one])
                except Exception as error:  # noqa: BLE001  boundary, as below
                    one[1].set_exception(error)
        except Exception as error:  # noqa: BLE001  boundary: the event loop would log it, and the episodes wait for ever
            for _, answer in pending:
                answer.set_exception(error)

    def _submit(self, asked: Sequence[Asked]) -> None:
        futures = self._engine.submit([request for request, _ in asked])
        loop = asyncio.get_running_loop()
        for (_, answer), future in zip(asked, futures, strict=True):
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
    """rill.envs.base.Policy for one episode: names its requests and seeds them. An answer from before is found by the
    name, which stands for the tokens that it continues."""

    def __init__(self, client: PolicyClient, trajectory_id: str, answers: dict[str, Completion]) -> None:
        self._client = client
        self._trajectory_id = trajectory_id
        self._answers = answers

    async def generate(
        self, token_ids: TokenIds, sampling: SamplingParams, *, name: str, model: str | None = None
    ) -> Completion:
        """Raises CancelledError where the episode is put back."""
        if model is not None:
            raise UnsupportedError(f"this run has one model: an agent cannot use {model!r}")
        request_id = f"{self._trajectory_id}#{name}"
        before = self._answers.get(request_id)
        if before is not None and before.stop_reason is not StopReason.ABORTED:
            return before
        completion = await self._ask(request_id, token_ids, sampling, before)
        is_cut_off = completion.stop_reason is StopReason.ABORTED and self._client.is_stopped
        if is_cut_off and len(completion.token_ids) >= sampling.max_new_tokens:
            # Stopped with its last token, as it happened.
            completion = replace(completion, stop_reason=StopReason.LENGTH)
        elif is_cut_off:
            if len(completion.token_ids):
                self._answers[request_id] = completion
            raise asyncio.CancelledError(f"{request_id} was put back")
        self._answers[request_id] = completion
        return completion

    async def _ask(
        self, request_id: str, token_ids: TokenIds, sampling: SamplingParams, before: Completion | None
    ) -> Completion:
        # A part of its own seed: an engine may count its draws from the start of a request.
        part = request_id if before is None else f"{request_id}+{len(before.token_ids)}"
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=self._client.seed_of(part))
        if before is None:
            return await self._client.complete(Request(id=request_id, token_ids=token_ids, sampling=sampling))
        request = continued(before, token_ids, sampling)
        return joined(before, await self._client.complete(request), sampling.stop, self._client.decode)
