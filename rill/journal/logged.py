"""An engine whose every token is in the token log before anybody uses it: the one place where sampling is logged.

    submit ──▶ known to the log?  finished ──▶ answered at once
                                  begun ─────▶ goes on behind the tokens it has: one prefill
                                  no ────────▶ begins
               engine ── tokens ──▶ log;  the end ──▶ log, written ──▶ the caller's future

A sequence is known by its request's id, whoever asks ("…@process" is the asker's own business). What it is continued
from is found in the files of processes that are gone, and of those that live where one of its group is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rill.inference.base import Completion, Delta, Request
from rill.inference.continued import Decode, joined, rest_of
from rill.inference.policy import EngineGate
from rill.journal.checkpoints import needed_now
from rill.journal.reader import LoggedSequence, LogReader, group_of
from rill.journal.records import Finished
from rill.journal.token_log import TokenLog
from rill.types import StopReason


class LoggedEngine:
    """rill.inference.policy.Asked."""

    def __init__(self, gate: EngineGate, log: TokenLog, *, decode: Decode) -> None:
        self._gate = gate
        self._log = log
        self._decode = decode
        run_dir = log.folder.parent
        self._reader = LogReader(run_dir, partial(needed_now, run_dir))
        self._running: dict[str, _Running] = {}
        """By request id."""

    def submit(self, requests: Sequence[Request], epoch: int) -> list[Future[Completion]]:
        known = self._known(requests)
        futures: list[Future[Completion]] = [Future() for _ in requests]
        asked: list[Request] = []
        before: dict[str, Completion] = {}
        for request, future in zip(requests, futures, strict=True):
            said = _said(request, known.get(request.id))
            if said is not None and said.stop_reason is not StopReason.ABORTED:
                future.set_result(said)
                continue
            if said is not None:
                before[request.id] = said
                request = rest_of(request, said.token_ids)
            asked.append(replace(request, delta_interval_s=self._log.collect_s(len(asked))))
        outer = {request.id: future for request, future in zip(requests, futures, strict=True)}
        for request in asked:
            began_s = known[request.id].began_s if request.id in known else 0.0
            self._begin(request, before.get(request.id), began_s, outer[request.id])
        try:
            begun = self._gate.submit(asked, epoch, on_delta=self._tokens)
        except BaseException:
            for request in asked:
                self._running.pop(request.id, None)
            raise
        for request, inner in zip(asked, begun, strict=True):
            inner.add_done_callback(partial(self._ended, request.id))
        return futures

    # --- inside -------------------------------------------------------------------------------------------

    def _known(self, requests: Sequence[Request]) -> dict[str, LoggedSequence]:
        """What the log has of them, by request id; nothing but a listing of a folder where no process has died."""
        lost = self._reader.left_of({group_of(request.id) for request in requests})
        if not lost:
            return {}
        self._reader.read_all()
        found = {
            request.id: self._reader.sequence(_key(request.id))
            for request in requests
            if group_of(request.id) in lost
        }
        return {name: sequence for name, sequence in found.items() if sequence is not None}

    def _begin(
        self, request: Request, before: Completion | None, after_s: float, future: Future[Completion]
    ) -> None:
        number = self._log.open(
            _key(request.id),
            num_prompt=len(request.token_ids) - request.num_generated,
            base=request.num_generated,
            pictures=request.pictures,
            after_s=after_s,
        )
        self._running[request.id] = _Running(request, number, before, future)

    def _tokens(self, delta: Delta) -> None:
        """By the engine's thread. The last ones are written together with the end."""
        running = self._running.get(delta.request_id)
        if running is not None and delta.stop_reason is None:
            running.num_logged += len(delta.token_ids)
            self._log.tokens(running.number, delta.token_ids, delta.logprobs, delta.versions)

    def _ended(self, request_id: str, inner: Future[Completion]) -> None:
        """By the engine's thread, or by that of whoever stopped it."""
        running = self._running.pop(request_id)
        if (error := inner.exception()) is not None:
            _settle(running.future, error)
            return
        rest, whole, before = inner.result(), inner.result(), running.before
        if before is not None:
            whole = joined(before, rest, running.request.sampling.stop, self._decode)
        start = running.num_logged
        finished = Finished(
            running.number,
            len(whole.token_ids) - (0 if before is None else len(before.token_ids)),
            whole.stop_reason,
            whole.stop_text,
            rest.token_ids[start:],
            rest.logprobs[start:],
            rest.versions[start:],
        )
        self._log.finish(finished, rest.routed_experts, lambda error: _settle(running.future, error or whole))


@dataclass(slots=True)
class _Running:
    """One request on its way."""

    request: Request
    number: int
    before: Completion | None
    """What the log had of the answer."""
    future: Future[Completion]
    num_logged: int = 0


def _settle(future: Future[Completion], outcome: Completion | BaseException) -> None:
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _key(request_id: str) -> str:
    return request_id.partition("@")[0]


def _said(request: Request, known: LoggedSequence | None) -> Completion | None:
    """What is known of the answer beyond what the request holds already, finished or to be continued."""
    given = request.num_generated
    if known is None or len(known.token_ids) < given:
        return None
    if not np.array_equal(known.token_ids[:given], request.token_ids[len(request.token_ids) - given :]):
        return None
    num_new = len(known.token_ids) - given
    reason = known.reason if known.is_finished else StopReason.ABORTED
    if not known.is_finished and num_new >= request.sampling.max_new_tokens:
        reason = StopReason.LENGTH
    if reason is StopReason.ABORTED and num_new == 0:
        return None
    assert reason is not None
    return Completion(
        request_id=request.id,
        token_ids=known.token_ids[given:],
        logprobs=known.logprobs[given:],
        versions=known.versions[given:],
        stop_reason=reason,
        stop_text=known.stop_text,
        routed_experts=known.experts_TLK,
    )
