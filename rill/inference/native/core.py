"""The engine's inside: sequences, scheduler, batch builder and runner, driven one turn at a time.

Owned by one thread, the engine's; nothing here is locked. Callers reach it through the command queue, and see its
tokens through the `Outlet`. A turn is one step of the model, or several of pure generation; a step that looks at drafts
(speculation.py) gives each sequence as many tokens as came true, and one. Between two turns it is told to pause, to
give memory back, to take weights and adapters. It computes unless it

    is paused       started requests end (FINISH), or are computed again later from their tokens (INTERRUPT)
    is released     its memory is given back, up to a level
    is unavailable  an update failed half-way: its weights are no version's until a whole one succeeds
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from rill.errors import EngineError, WeightSyncError
from rill.inference.base import Delta, EngineStats, MemoryLevel, NamedTensors, PauseMode
from rill.inference.native.batch import BatchBuilder, StepBatch
from rill.inference.native.block_manager import BlockManager
from rill.inference.native.draft_model import DraftModel
from rill.inference.native.model_runner import ModelRunner, PendingTurn, TurnResult
from rill.inference.native.scheduler import Chunk, NeedsResults, Scheduler, Work
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.inference.native.speculation import Speculator
from rill.inference.requests import check_ids, further
from rill.inference.tally import Tally
from rill.models.decode.low_rank import AdapterTensors
from rill.models.routing import UNKNOWN
from rill.types import Floats, PolicyVersion, StopReason

if TYPE_CHECKING:
    from rill.inference.native.engine import NativeEngine

logger = logging.getLogger(__name__)

Taken = tuple[list[int], list[float], int]
"""What a sequence is given of a turn: tokens, their log-probabilities, and how many were in flight for it."""
Launched = tuple[Work, list[StepBatch], PendingTurn]
News = tuple[Sequence, StopReason | None]
"""A sequence with tokens that were not yet delivered; with a reason, one that has ended."""


class EngineCore:
    def __init__(
        self,
        runner: ModelRunner,
        config: NativeEngine.Config,
        num_blocks: int,
        max_context: int,
        draft_model: DraftModel | None = None,
    ) -> None:
        max_num_seqs, max_batched_tokens = runner.max_num_seqs, config.max_batched_tokens
        blocks = BlockManager(num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache)
        self.runner = runner
        self._draft_model = draft_model
        self._runners = [runner] if draft_model is None else [runner, draft_model.runner]
        self.outlet = Outlet()
        self.version = PolicyVersion(0)
        self.live: dict[str, Sequence] = {}
        """Everything that was added and has not ended."""
        # A turn takes at most one block of each.
        num_drafted = min(config.num_speculative_tokens, blocks.block_size - 1)
        num_rows = min(runner.num_verified_rows, max_num_seqs, max_batched_tokens)
        self._num_drafting = num_rows // 2
        self._speculator = Speculator(num_drafted, num_rows, draft_model) if num_drafted else None
        self.scheduler = Scheduler(
            blocks,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            root_key=self._root_key,
            # Starting prompts breaks out of the captured decode step and costs as much for one as for many.
            num_gathered=max_num_seqs // 20 if runner.uses_graphs else 0,
            num_steps=config.num_scheduler_steps if runner.is_overlapped else 1,
            speculator=self._speculator,
        )
        self.builder = BatchBuilder(max_num_seqs, -(-max_context // blocks.block_size), blocks.block_size)
        self._pending: Launched | None = None
        self._news: list[News] = []
        """What was read and is not delivered."""
        self._tally = Tally()
        self._num_steps = 0
        self._targets = runner.weight_targets()
        self.released: MemoryLevel | None = None
        self.unavailable: str | None = None
        """Why no request can be served, in words."""
        self._drained: list[Future[None]] = []
        """Of pauses that wait for the last started request."""

    @property
    def can_step(self) -> bool:
        has_work = self.scheduler.has_work or self._pending is not None
        return self.unavailable is None and self.released is None and has_work

    @property
    def _generates(self) -> bool:
        """Texts that are scored wait for nobody and are waited for by nobody."""
        return any(not seq.is_scored for seq in self.scheduler.running)

    @property
    def _are_weights_out(self) -> bool:
        return self.released not in (None, MemoryLevel.KV)

    def describe(self) -> str:
        """Any thread: the engine's state in words, for error messages."""
        scheduler = self.scheduler
        paused = f", paused ({scheduler.paused})" if scheduler.paused else ""
        released = f", memory released ({self.released})" if self.released else ""
        return f"{len(scheduler.running)} running, {scheduler.num_waiting} waiting{paused}{released}"

    def prepare(self) -> None:
        """Before the first step."""
        self.runner.prepare()
        if self._draft_model is not None:
            drafting = self._draft_model.runner
            with drafting.active():
                drafting.prepare(self._num_drafting)

    def add(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self.live[seq.id] = seq
            self.scheduler.add(seq)
            if self._speculator is not None and not seq.is_scored:
                self._speculator.add(seq)
            if seq.request.adapter is not None and seq.request.adapter not in self.runner.adapters.names:
                self.abort([seq.id])  # it was unloaded between submit() and here

    def abort(self, ids: list[str] | None) -> None:
        """End these, or all; ids that are not under way are ignored."""
        self.drain()
        wanted = self.live if ids is None else self.live.keys() & ids
        for seq in [seq for i, seq in self.live.items() if i in wanted]:
            self._end(seq)
            self.outlet.abort(seq, "scoring was aborted")

    def step(self) -> None:
        """schedule -> run -> postprocess. The device has its next turn before anybody hears of the last one."""
        if self._needs_results_first():
            self._read()
        try:
            work = self.scheduler.schedule()
        except NeedsResults:
            self._read()
            work = self.scheduler.schedule()
        launched = self._launch(work)
        is_read = self._read()
        if is_read and launched is None:  # those that it ended held what others wait for
            launched = self._launch(self.scheduler.schedule())
        self._pending = launched
        self._deliver()
        if not self.runner.is_overlapped:
            self.drain()

    def _launch(self, work: Work) -> Launched | None:
        if not work:
            return None
        if work.drafts and self._speculator is not None:
            self._speculator.complete(work.decodes, work.drafts)
        self.builder.has_adapters = self.runner.adapters.num_changes > 0
        steps = self.builder.build(work)
        self._num_steps += len(steps)
        return work, steps, self.runner.launch(steps)

    def drain(self) -> None:
        """Read the turn in flight, if there is one."""
        self._read()
        self._deliver()

    def close(self, failure: BaseException | None) -> None:
        """End everything without another step, and give the cache back."""
        self._deliver()
        self._pending = None
        for seq in self.live.values():
            if failure is None:
                self.outlet.abort(seq, "the engine closed")
            else:
                self.outlet.fail(seq, failure)
        self.live.clear()
        for waiter in self._drained:
            waiter.set_exception(failure or EngineError("the engine closed before its last request ended"))
        self._drained.clear()
        for runner in self._runners:
            runner.free_cache()
            runner.free_graphs()

    def leave_thread(self) -> None:
        for runner in self._runners:
            runner.leave_thread()

    def stats(self) -> EngineStats:
        """Any thread: each number is right, though not all of one instant."""
        scheduler = self.scheduler
        return self._tally.stats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_preempted=scheduler.num_preempted,
            num_kv_blocks=scheduler.blocks.num_usable,
            num_free_kv_blocks=scheduler.blocks.num_free,
            version=self.version,
            extra={"num_steps": float(self._num_steps)},
        )

    # --- between two turns --------------------------------------------------------------------------------

    def set_pause(self, mode: PauseMode | None) -> Future[None]:
        """The future is done once nothing more will run that the mode forbids."""
        self.scheduler.paused = mode
        self.drain()
        if mode is PauseMode.INTERRUPT:
            # What they had in the cache is found there again, but for their last block.
            self._preempt(seq for seq in self.scheduler.running if not seq.is_scored)
        drained: Future[None] = Future()
        if mode is PauseMode.FINISH:
            self._drained.append(drained)
            self.report_drained()
        else:
            drained.set_result(None)
        return drained

    def report_drained(self) -> None:
        """After every step and round of commands: has the last started request ended?"""
        if not self._drained:
            return
        scheduler = self.scheduler
        has_started = self._generates or any(seq.num_preempted for seq in scheduler.waiting)
        if scheduler.paused is not PauseMode.FINISH or not has_started:
            for future in self._drained:
                future.set_result(None)
            self._drained.clear()

    def release(self, level: MemoryLevel) -> None:
        scheduler = self.scheduler
        self.drain()
        runs = self._generates if scheduler.paused else scheduler.running or scheduler.num_waiting
        if runs:  # paused by INTERRUPT, nothing does
            raise EngineError(
                f"release({level}) while requests run ({self.describe()}): pause() first, or wait until idle"
            )
        self._preempt(scheduler.running)
        scheduler.blocks.flush()
        for runner in self._runners:
            runner.free_cache()
            if level is not MemoryLevel.KV and not self._are_weights_out:
                runner.offload_weights()
            if level is MemoryLevel.GRAPHS:
                runner.free_graphs()
        self.released = further(level, self.released)

    def restore(self) -> None:
        if self.released is None:
            return
        for runner in self._runners:
            if self._are_weights_out:
                runner.reload_weights()
            runner.allocate_cache(self.scheduler.blocks.num_blocks)
        self.builder.forget()
        if self._draft_model is not None:
            self._draft_model.forget()
        self.released = None

    def update(
        self, tensors: NamedTensors, version: PolicyVersion, partial: bool, fence: Callable[[], None]
    ) -> None:
        """`fence`: lets the device wait until the tensors are whole."""
        if version <= self.version:  # nothing was touched: what is in service stays so
            raise WeightSyncError(
                f"the engine has version {self.version} and was given {version}: versions only grow"
            )
        self.drain()
        self._preempt(self.scheduler.running)
        self.scheduler.blocks.flush()
        fence()
        try:
            if self._are_weights_out:
                self.runner.reload_weights()
            self._targets.copy(tensors, partial=partial)
            if self._are_weights_out:
                self.runner.offload_weights()
            self.runner.finish_update()
        except BaseException:
            # Only now: a request that arrives while an update goes well waits for it like any other command.
            self.unavailable = f"the update to version {version} failed"
            raise
        self.version = version
        if not partial:
            self.unavailable = None

    def load_adapter(self, name: str, tensors: AdapterTensors) -> None:
        self.drain()
        # What they have in the cache came from the adapter's old weights.
        self._preempt(seq for seq in self.scheduler.running if seq.request.adapter == name)
        self.runner.adapters.load(name, tensors)

    def unload_adapter(self, name: str) -> None:
        self.abort([i for i, seq in self.live.items() if seq.request.adapter == name])
        self.runner.adapters.unload(name)

    def _preempt(self, sequences: Iterable[Sequence]) -> None:
        """They hold no blocks any more, and are computed again, tokens kept. Only after drain()."""
        for seq in list(sequences):
            self.scheduler.preempt(seq)

    # --- inside a turn ------------------------------------------------------------------------------------

    def _needs_results_first(self) -> bool:
        """Penalties and grammars read the newest token on the host, so such sequences cannot run one step ahead; nor is
        it known how far drafts went."""
        if self._pending is None:
            return False
        if self._pending[0].drafts:
            return True
        if not self.scheduler.num_special:
            return False
        return any(seq.edits is not None and seq.edits.need_history for seq in self._pending[1][0].sampled)

    def _read(self) -> bool:
        """The turn in flight, into the sequences and the news; whether there was one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        work, steps, turn = pending
        result, first = turn(), steps[0]
        if work.drafts:
            taken = self._verify(work, result)
        else:
            counts = work.counts + [1] * (len(first.sampled) - len(work.counts))
            numbers = zip(result.tokens_KS.T.tolist(), result.logprobs_KS.T.tolist(), strict=True)
            taken = [(t[:count], p[:count], count) for (t, p), count in zip(numbers, counts, strict=True)]
        self._append(work.decodes if work.drafts else first.sampled, taken, result)
        if self._speculator is not None and (pace := self._speculator.pace) is not None:
            if work.chunks:
                pace.pause()
            else:
                num_tokens = sum(len(tokens) for tokens, *_ in taken)
                pace.note(len(taken), num_tokens, time.monotonic(), is_drafted=bool(work.drafts))
        for (chunk, _), values in zip(first.scored, result.scores, strict=True):
            self._keep_scores(chunk, values)
        return True

    def _deliver(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self.outlet.deliver(news)

    def _verify(self, work: Work, result: TurnResult) -> list[Taken]:
        """Of each sequence's rows, those whose draft came true and the next; what came after was not computed."""
        assert self._speculator is not None
        tokens, logprobs = result.tokens_KS[0].tolist(), result.logprobs_KS[0].tolist()
        taken: list[Taken] = []
        at = 0
        for seq, draft in zip(work.decodes, work.drafts, strict=True):
            num_rows, num_true = 1 + len(draft), 0
            while num_true < len(draft) and draft[num_true] == tokens[at + num_true]:
                num_true += 1
            end = at + num_true + 1
            taken.append((tokens[at:end], logprobs[at:end], num_rows))
            seq.num_computed -= num_rows - (num_true + 1)
            self._speculator.learn(seq, len(draft), num_true)
            self._tally.add(num_draft_tokens=len(draft), num_accepted_tokens=num_true)
            at += num_rows
        return taken

    def _append(self, sampled: list[Sequence], taken: list[Taken], result: TurnResult) -> None:
        """Each sequence takes its tokens of the turn."""
        version, blocks = int(self.version), self.scheduler.blocks
        size, num_taken = blocks.block_size, 0
        has_nan = bool(np.isnan(result.logprobs_KS).any())  # rows that left the turn may have some too
        for row, (seq, (tokens, logprobs, num_rows)) in enumerate(zip(sampled, taken, strict=True)):
            seq.num_in_flight -= num_rows
            if seq.is_finished:
                continue  # it ended a turn earlier; these tokens were computed before that was known
            before = len(seq.tokens)
            if has_nan and any(map(math.isnan, logprobs)):  # and the token is whatever was there
                self._end(seq)
                where = f"request {seq.id}: after {seq.num_generated} tokens the logits of version {version}"
                why = "its weights hold NaN or infinite values, or every token is forbidden by logit_bias"
                self.outlet.fail(seq, EngineError(f"{where} are not numbers: {why}"))
                continue
            if (count := seq.request.num_top_logprobs) and result.top is not None:
                likely, values = result.top
                seq.top.append((likely[row, :count].tolist(), values[row, :count].tolist()))
            reason = seq.extend(tokens, logprobs, version)
            if reason is not None:
                self._end(seq)
            elif min(seq.num_computed, len(seq.tokens)) // size > seq.num_published:
                blocks.publish(seq)
            num_taken += len(seq.tokens) - before
            self._news.append((seq, reason))
        self._tally.add(num_generated_tokens=num_taken)

    def _keep_scores(self, chunk: Chunk, values: Floats) -> None:
        seq = chunk.seq
        assert isinstance(seq, ScoredSequence)
        if seq.is_embedding:
            seq.scores = values
        else:
            start = chunk.start + 1
            seq.scores[start : start + len(values)] = values
        if chunk.is_last and not seq.is_finished:
            self._end(seq)
            self.outlet.score(seq)

    def _end(self, seq: Sequence) -> None:
        """Out of the scheduler and of the books; its result is the outlet's to deliver."""
        self.scheduler.blocks.publish(seq)  # the next turn of a conversation begins with all of this one
        if self.runner.routing is not None and not seq.is_scored:
            seq.routed_experts = self._routed_experts(seq)
        self.scheduler.finish(seq)
        del self.live[seq.id]
        if self._speculator is not None:
            self._speculator.drop(seq)
        if not seq.is_scored:
            self._tally.end(num_prompt=seq.num_prompt, num_cached=seq.num_cached)

    def _routed_experts(self, seq: Sequence) -> Any:
        """Of every token that was computed; the last one sampled never was."""
        size = self.scheduler.blocks.block_size
        count = min(len(seq.tokens) - 1, seq.num_computed, len(seq.block_ids) * size)
        known = self.runner.routed_experts(seq.block_ids, count)
        if known is None:
            return None
        whole = np.full((len(seq.tokens), *known.shape[1:]), UNKNOWN, dtype=np.int16)
        whole[:count] = known
        return whole

    def _root_key(self, seq: Sequence) -> bytes:
        adapter = self.runner.adapters.identity(seq.request.adapter)
        return BlockManager.root_key(self.version, adapter, seq.request.cache_salt)


class Outlet:
    """The one door by which tokens leave the engine, to on_delta and the futures that submit() and score() wait for.
    Called by the engine's thread alone, once a step, after the sequences hold their new tokens and before anybody
    outside has seen one. Whatever must know of every token first (a write-ahead log, say) extends it.

    Request ids are taken here too, by the callers' threads: an id is in use from submit() until its end was delivered.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._lock = threading.Lock()

    def take_ids(self, ids: Iterable[str]) -> None:
        """Callers' threads. RequestError when two are the same or one is in use."""
        given = list(ids)
        with self._lock:
            check_ids(given, self._ids)
            self._ids.update(given)

    def deliver(self, news: Iterable[News]) -> None:
        """All that one step brought. seq.num_reported tells how many of a streamed sequence's tokens are out."""
        now = time.monotonic()
        for seq, reason in news:
            if seq.on_delta is not None and (reason is not None or now >= seq.next_delta_at):
                seq.next_delta_at = now + seq.request.delta_interval_s
                self._tell(seq, seq.take_delta(reason))
            if reason is not None:
                with self._lock:
                    self._ids.discard(seq.id)
                if seq.future.set_running_or_notify_cancel():
                    seq.future.set_result(seq.completion(reason))

    def score(self, seq: ScoredSequence) -> None:
        """All of its scores are known."""
        seq.future.set_result(seq.scores)

    def abort(self, seq: Sequence, reason: str) -> None:
        """It ends with the tokens so far; what was scored, without a result."""
        if seq.is_scored:
            self.fail(seq, EngineError(reason))
        else:
            self.deliver([(seq, StopReason.ABORTED)])

    def fail(self, seq: Sequence, error: BaseException) -> None:
        """It ends without a result."""
        with self._lock:
            self._ids.discard(seq.id)
        if not seq.future.done() and seq.future.set_running_or_notify_cancel():
            seq.future.set_exception(error)

    def _tell(self, seq: Sequence, delta: Delta) -> None:
        assert seq.on_delta is not None
        try:
            seq.on_delta(delta)
        except Exception:  # boundary: a caller's own code; neither its request nor the engine ends with it
            logger.exception("on_delta of request %s failed and will not be called again", seq.id)
            seq.on_delta = None
