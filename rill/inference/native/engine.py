"""The built-in rollout engine: Hugging Face modules, paged KV cache, continuous batching, on CPU and CUDA.

One thread owns everything that a step touches. Callers' threads leave commands; the engine takes them between
two steps, so no lock is held while the model runs and every control method sees a consistent engine.

    callers                         engine thread
    ───────                         ─────────────
    submit, abort, pause,   ──►  commands ─► run all that wait
    update_weights, score, …              │
                                          ▼
                             schedule ─► launch step n ─► read step n-1 (n, where nothing overlaps)
                                 ▲                             │ append tokens, finish, deltas
                                 └─────────────────────────────┘
    futures, on_delta       ◄──  completed between two steps

It sleeps on the command queue when there is nothing to do: idle, paused, released or unavailable.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field

from rill.config import PartConfig
from rill.errors import EngineError, ModelError, RequestError, StuckError, UnsupportedError, WeightSyncError
from rill.inference.base import (
    Completion,
    Delta,
    EngineStats,
    Feature,
    MemoryLevel,
    NamedTensors,
    PauseMode,
    Request,
)
from rill.inference.native.adapters import read_adapter
from rill.inference.native.admission import Admission
from rill.inference.native.batch import BatchBuilder, StepBatch
from rill.inference.native.block_manager import BlockManager
from rill.inference.native.model_runner import ModelRunner, PendingStep
from rill.inference.native.runners import build_runner
from rill.inference.native.scheduler import NeedsResults, Scheduler
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.inference.native.weight_update import copy_weights
from rill.models.loading import ModelConfig, load_tokenizer
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTROL_TIMEOUT_S = 120.0
"""For control methods without a deadline of their own: far above the length of any step."""


@dataclass(slots=True, eq=False)
class _Command:
    name: str
    run: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


class NativeEngine:
    """See rill.inference.base.Engine for what each method promises."""

    class Config(PartConfig):
        type: Literal["native"] = "native"
        model: ModelConfig
        """What to load. Ignored, apart from the tokenizer, when a loaded module is passed to the engine."""
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
        """auto: float32 on CPU, bfloat16 on CUDA."""
        device: str = "auto"
        """auto: cuda when there is one, else cpu."""
        block_size: int = Field(default=16, ge=1, le=256)
        """Tokens per KV block."""
        num_kv_blocks: int | None = Field(default=None, ge=2)
        """Size of the KV cache in blocks. Unset: from kv_memory_fraction."""
        kv_memory_fraction: float = Field(default=0.6, gt=0, lt=1)
        """Share of the memory that is free after loading which the KV cache may take."""
        max_num_seqs: int = Field(default=256, ge=1)
        """Sequences that run at one time; others wait."""
        max_batched_tokens: int = Field(default=8192, ge=1)
        """Tokens computed in one step, prompts and generation together."""
        max_context: int | None = Field(default=None, ge=2)
        """Prompt and completion together, in tokens. Unset: the model's own limit."""
        enable_prefix_cache: bool = True
        batch_invariant: bool = False
        """The same tokens give bit-identical logprobs whatever else is in the batch."""
        fast_path: bool = True
        """Run known architectures through fused weights and kernels instead of the modules' forward methods."""
        cuda_graphs: bool = True
        """Capture the decode step at a few batch sizes. CUDA only."""
        seed: int = 0
        """Seeds the requests that bring no seed of their own."""
        check_every_step: bool = False
        """Recount all blocks after every step. For tests: it costs a pass over the cache's bookkeeping."""

    def __init__(
        self,
        config: Config,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """`model`: an already loaded module whose parameters are used in place, e.g. the trainer's."""
        self.config = config
        if tokenizer is None and (config.model.tokenizer or config.model.path):
            tokenizer = load_tokenizer(config.model)
        self.tokenizer = tokenizer
        self._runner: ModelRunner = build_runner(config, model)
        self._version = PolicyVersion(0)
        self._pause: PauseMode | None = None
        self._released: MemoryLevel | None = None
        self._unavailable: str | None = None
        self._closed = False
        self._pending: tuple[StepBatch, PendingStep] | None = None
        self._live: dict[str, Sequence] = {}
        self._ids: set[str] = set()
        """Of requests from submit() until they end; guarded by _wake, since callers' threads check it."""
        self._finished = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._steps = self._sampled_tokens = 0

        limit = _context_limit(self._runner, config.max_context)
        self._num_blocks = _num_blocks(self._runner, config, limit)
        self._max_context = min(limit, (self._num_blocks - 1) * config.block_size)
        self._builder = BatchBuilder(
            config.max_num_seqs, -(-self._max_context // config.block_size), config.block_size
        )
        self._scheduler = self._new_scheduler()
        self._runner.allocate_cache(self._num_blocks)
        self._runner.prepare()
        self._admission = Admission(self._runner.model, tokenizer, self._max_context, config.seed)

        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition(threading.RLock())
        self._drained: list[Future[None]] = []
        self._thread = threading.Thread(target=self._loop, name="rill-native-engine", daemon=True)
        self._thread.start()

    # --- what it is --------------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[Feature]:
        found = {
            Feature.STREAM,
            Feature.SCORE,
            Feature.PARTIAL_ROLLOUT,
            Feature.UPDATE_WEIGHTS,
            Feature.RELEASE_MEMORY,
            Feature.SEEDED,
        }
        found.add(Feature.BATCH_INVARIANT if self.config.batch_invariant else Feature.LORA)
        return frozenset(found)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence_[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        self._check_available()
        sequences = [self._admission.sequence(request, on_delta) for request in requests]
        ids = {request.id for request in requests}
        with self._wake:
            if len(ids) != len(requests) or not ids.isdisjoint(self._ids):
                raise RequestError("two requests under way have the same id: give each its own")
            self._post(_Command("submit", lambda: self._add(sequences)))
            self._ids |= ids
        return [seq.future for seq in sequences]

    def generate(self, requests: Sequence_[Request], timeout_s: float = 600.0) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        futures = self.submit(requests)
        try:
            return [future.result(timeout=max(0.0, deadline - time.monotonic())) for future in futures]
        except FutureTimeoutError:
            num_left, state = sum(not f.done() for f in futures), self._state()
            self.abort([request.id for request in requests])
            raise StuckError(
                f"generate: {num_left} of {len(futures)} requests had not ended after {timeout_s} s ({state})"
            ) from None

    def score(
        self, sequences: Sequence_[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        self._check_available()
        if self._released is not None:
            raise EngineError(
                f"the engine's memory is released ({self._released}): call restore() before score()"
            )
        deadline = time.monotonic() + timeout_s
        scored = [self._admission.scored_sequence(tokens, temperature) for tokens in sequences]
        self._post(_Command("score", lambda: self._add(scored)))
        try:
            return [seq.scored.result(timeout=max(0.0, deadline - time.monotonic())) for seq in scored]
        except FutureTimeoutError:
            self.abort([seq.id for seq in scored])
            raise StuckError(f"score: not done after {timeout_s} s ({self._state()})") from None

    def abort(self, request_ids: Sequence_[str] | None = None) -> None:
        ids = None if request_ids is None else list(request_ids)
        command = _Command("abort", lambda: self._abort(ids))
        self._post(command)
        if threading.current_thread() is not self._thread:  # from on_delta it takes effect after this step
            self._await(command, CONTROL_TIMEOUT_S)

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        drained: Future[None] = self._call("pause", lambda: self._set_pause(mode), timeout_s)
        try:
            drained.result(timeout=max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise StuckError(
                f"pause({mode}): requests still run after {timeout_s} s ({self._state()})"
            ) from None

    def resume(self) -> None:
        self._call("resume", lambda: self._set_pause(None))

    def release(self, level: MemoryLevel) -> None:
        self._call("release", lambda: self._release(level))

    def restore(self) -> None:
        self._call("restore", self._restore)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        fence = self._runner.record_caller()
        self._call("update_weights", lambda: self._update(tensors, version, partial, fence))
        self._runner.wait_in_caller()

    def load_adapter(
        self, name: str, source: str | Path | Mapping[str, torch.Tensor], *, scale: float | None = None
    ) -> None:
        """Serve a LoRA adapter, in place of one of the same name: a PEFT folder, or a state dict and its scale."""
        if self.config.batch_invariant:
            raise UnsupportedError(
                "adapters run outside of the batch-invariant path: set batch_invariant=false"
            )
        if isinstance(source, str | Path):
            tensors, own_scale = read_adapter(source)
            scale = own_scale if scale is None else scale
        else:
            tensors = dict(source)
        if scale is None:
            raise ModelError(f"adapter {name!r} comes as tensors, so give its scale: alpha / rank")
        self._call("load_adapter", lambda: self._set_adapter(name, tensors, scale))

    def unload_adapter(self, name: str) -> None:
        """Requests that still use it are aborted."""
        self._call("unload_adapter", lambda: self._unload_adapter(name))

    def flush(self) -> None:
        self._call("flush", self._scheduler.blocks.flush)

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished=self._finished,
            num_preempted=scheduler.num_preempted,
            num_prompt_tokens=self._prompt_tokens,
            num_cached_tokens=self._cached_tokens,
            num_generated_tokens=self._generated_tokens,
            num_kv_blocks=scheduler.blocks.num_usable,
            num_free_kv_blocks=scheduler.blocks.num_free,
            version=self._version,
            extra={"num_steps": float(self._steps), "num_sampled_tokens": float(self._sampled_tokens)},
        )

    def close(self) -> None:
        """Abort what runs, end the thread, give all memory back. May be called twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=CONTROL_TIMEOUT_S)
        if self._thread.is_alive():
            raise StuckError(f"close: the engine's thread did not end within {CONTROL_TIMEOUT_S} s")

    # --- the engine's thread -----------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._runner.enter_thread()
            while not self._closed:
                self._run_commands()
                if self._can_step:
                    self.step()
        except BaseException as error:  # boundary: a dead thread must not leave its callers waiting
            self._fail_all(error)
            if not isinstance(error, EngineError):
                raise
        finally:
            self._shut_down()

    @property
    def _can_step(self) -> bool:
        if self._unavailable is not None or self._released is not None:
            return False
        return self._scheduler.has_work or self._pending is not None

    def step(self) -> None:
        """schedule -> run -> postprocess; called by the engine's thread only."""
        try:
            if self._needs_results_first():
                self._drain()
            chunks = self._scheduler.schedule()
        except NeedsResults:
            self._drain()
            chunks = self._scheduler.schedule()
        launched = None
        if chunks:
            batch = self._builder.build(chunks)
            launched = (batch, self._runner.launch(batch))
            self._steps += 1
        previous, self._pending = self._pending, launched
        if previous is not None:
            self._postprocess(*previous)
        if not self._runner.is_overlapped:
            self._drain()
        if self.config.check_every_step:
            self._drain()
            self._scheduler.check()
        self._report_drained()

    def _needs_results_first(self) -> bool:
        """Penalties read the newest token on the host, so such sequences cannot run one step ahead."""
        return self._pending is not None and any(seq.needs_history for seq in self._pending[0].sampled)

    def _drain(self) -> None:
        """Read the step in flight, if there is one."""
        previous, self._pending = self._pending, None
        if previous is not None:
            self._postprocess(*previous)

    def _postprocess(self, batch: StepBatch, step: PendingStep) -> None:
        result = step.result()
        version = int(self._version)
        self._sampled_tokens += len(result.tokens_S)
        for seq, token, logprob in zip(batch.sampled, result.tokens_S, result.logprobs_S, strict=True):
            seq.num_in_flight -= 1
            if seq.is_finished:
                continue  # it ended one step earlier; this token was computed before that was known
            reason = seq.append(token, logprob, version)
            if reason is not None:
                self._finish(seq, reason)
                continue
            if len(seq.tokens) % self.config.block_size < 2:  # a block has just become known, or computed
                self._scheduler.blocks.publish(seq)
            if seq.on_delta is not None:
                self._tell(seq, seq.take_delta())
        for scored, values in zip(batch.scored, result.scores, strict=True):
            seq = scored.chunk.seq
            assert isinstance(seq, ScoredSequence)
            start = scored.chunk.start + 1
            seq.scores[start : start + len(values)] = values
            if scored.chunk.is_last and not seq.is_finished:
                self._scheduler.finish(seq)
                del self._live[seq.id]
                seq.scored.set_result(seq.scores)

    def _finish(self, seq: Sequence, reason: StopReason) -> None:
        self._scheduler.blocks.publish(seq)  # the next turn of a conversation begins with all of this one
        self._scheduler.finish(seq)
        del self._live[seq.id]
        self._finished += 1
        self._prompt_tokens += seq.num_prompt
        self._cached_tokens += seq.num_cached
        self._generated_tokens += seq.num_generated
        if seq.on_delta is not None:
            self._tell(seq, seq.take_delta(reason))
        with self._wake:
            self._ids.discard(seq.id)
        if seq.future.set_running_or_notify_cancel():
            seq.future.set_result(seq.completion(reason))

    def _tell(self, seq: Sequence, delta: Delta) -> None:
        assert seq.on_delta is not None
        try:
            seq.on_delta(delta)
        except Exception:
            logger.exception("on_delta of request %s failed and will not be called again", seq.id)
            seq.on_delta = None

    # --- commands, run by the engine's thread -------------------------------------------------------------

    def _run_commands(self) -> None:
        with self._wake:
            while not self._commands and not self._closed and not self._can_step:
                self._wake.wait(timeout=1.0)
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            try:
                command.done.set_result(command.run())
            except Exception as error:  # noqa: BLE001 boundary: what a command raises belongs to its caller
                command.done.set_exception(error)

    def _add(self, sequences: Sequence_[Sequence]) -> None:
        for seq in sequences:
            self._live[seq.id] = seq
            self._scheduler.add(seq)
            if seq.request.adapter is not None and seq.request.adapter not in self._runner.adapters.names:
                self._finish(seq, StopReason.ABORTED)  # it was unloaded between submit() and here

    def _abort(self, ids: list[str] | None) -> None:
        self._drain()
        wanted = list(self._live) if ids is None else [i for i in ids if i in self._live]
        for seq in [self._live[i] for i in wanted]:
            if isinstance(seq, ScoredSequence):
                self._scheduler.finish(seq)
                del self._live[seq.id]
                seq.scored.set_exception(EngineError("scoring was aborted"))
            else:
                self._finish(seq, StopReason.ABORTED)
        self._report_drained()

    def _set_pause(self, mode: PauseMode | None) -> Future[None]:
        self._pause = mode
        self._scheduler.admits_new = mode is None
        self._scheduler.is_frozen = mode is PauseMode.INTERRUPT
        self._drain()
        drained: Future[None] = Future()
        if mode is PauseMode.FINISH:
            self._drained.append(drained)
            self._report_drained()
        else:
            drained.set_result(None)
        return drained

    def _report_drained(self) -> None:
        started = self._scheduler.running or any(seq.num_preempted for seq in self._scheduler.waiting)
        if self._drained and (self._pause is not PauseMode.FINISH or not started):
            for future in self._drained:
                future.set_result(None)
            self._drained.clear()

    def _release(self, level: MemoryLevel) -> None:
        self._drain()
        is_idle = not self._scheduler.running and not self._scheduler.waiting
        if (self._pause is not PauseMode.INTERRUPT and self._scheduler.running) or not (
            is_idle or self._pause
        ):
            raise EngineError(
                f"release({level}) while requests run ({self._state()}): pause() first, or wait until idle"
            )
        self._preempt_all()
        self._scheduler.blocks.flush()
        self._runner.free_cache()
        if level in (MemoryLevel.WEIGHTS, MemoryLevel.GRAPHS):
            self._runner.drop_graphs()  # graphs hold the addresses of both; they are captured again on restore
            self._runner.offload_weights()
        self._released = level

    def _restore(self) -> None:
        if self._released is None:
            return
        if self._released is not MemoryLevel.KV:
            self._runner.reload_weights()
        self._runner.allocate_cache(self._num_blocks)
        self._builder.forget()
        self._runner.prepare()
        self._released = None

    def _update(self, tensors: NamedTensors, version: PolicyVersion, partial: bool, fence: Any) -> None:
        self._drain()
        self._preempt_all()
        self._scheduler.blocks.flush()
        self._runner.wait_for(fence)
        try:
            self._take_weights(tensors, version, partial=partial)
        except BaseException:
            # Only now: a request that arrives while an update goes well waits for it like any other command.
            self._unavailable = f"the update to version {version} failed"
            raise
        self._version = version
        if not partial:
            self._unavailable = None

    def _take_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool) -> None:
        if version <= self._version:
            raise WeightSyncError(
                f"the engine has version {self._version} and was given {version}: versions only grow"
            )
        if self._released not in (None, MemoryLevel.KV):
            self._runner.reload_weights()
            copy_weights(self._runner, tensors, partial=partial)
            self._runner.offload_weights()
        else:
            copy_weights(self._runner, tensors, partial=partial)
        self._runner.finish_update()

    def _set_adapter(self, name: str, tensors: Mapping[str, torch.Tensor], scale: float) -> None:
        self._drain()
        for seq in [s for s in self._scheduler.running if s.request.adapter == name]:
            self._scheduler.preempt(seq)  # what it has in the cache came from the adapter's old weights
        self._runner.adapters.load(name, tensors, scale)
        self._admission.adapters = self._runner.adapters.names

    def _unload_adapter(self, name: str) -> None:
        self._abort([i for i, seq in self._live.items() if seq.request.adapter == name])
        self._runner.adapters.unload(name)
        self._admission.adapters = self._runner.adapters.names

    def _preempt_all(self) -> None:
        for seq in list(self._scheduler.running):
            self._scheduler.preempt(seq)

    # --- inside ------------------------------------------------------------------------------------------

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        blocks = BlockManager(
            self._num_blocks, config.block_size, enable_prefix_cache=config.enable_prefix_cache
        )
        return Scheduler(
            blocks,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            root_key=self._root_key,
            # Starting a prompt breaks out of the captured decode step, so starts are gathered.
            num_gathered=config.max_num_seqs // 16 if self._runner.uses_graphs else 0,
        )

    def _root_key(self, seq: Sequence) -> bytes:
        adapter = self._runner.adapters.identity(seq.request.adapter)
        return BlockManager.root_key(self._version, adapter, seq.request.cache_salt)

    def _call(self, name: str, run: Callable[[], T], timeout_s: float = CONTROL_TIMEOUT_S) -> T:
        if threading.current_thread() is self._thread:
            raise EngineError(
                f"{name}() was called from on_delta, which must not block: call it from another thread"
            )
        command = _Command(name, run)
        self._post(command)
        result: T = self._await(command, timeout_s)
        return result

    def _post(self, command: _Command) -> None:
        with self._wake:
            if self._closed:
                raise EngineError(f"{command.name}() on a closed engine")
            self._commands.append(command)
            self._wake.notify()

    def _await(self, command: _Command, timeout_s: float) -> Any:
        try:
            return command.done.result(timeout=timeout_s)
        except FutureTimeoutError:
            raise StuckError(
                f"{command.name}: the engine's thread did not take the command within {timeout_s} s ({self._state()})"
            ) from None

    def _check_available(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if self._unavailable is not None:
            raise EngineError(
                f"{self._unavailable}: the engine waits for a whole update_weights() to succeed"
            )

    def _state(self) -> str:
        scheduler = self._scheduler
        pause = f", paused ({self._pause})" if self._pause else ""
        released = f", memory released ({self._released})" if self._released else ""
        return f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting{pause}{released}"

    def _fail_all(self, error: BaseException) -> None:
        failure = EngineError(f"the engine's thread died: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._closed = True
        for seq in self._live.values():
            future: Future[Any] = seq.scored if isinstance(seq, ScoredSequence) else seq.future
            if not future.done():
                future.set_exception(failure)
        for waiter in self._drained:
            waiter.set_exception(failure)
        self._live.clear()

    def _shut_down(self) -> None:
        with self._wake:
            self._closed = True
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:
            command.done.set_exception(EngineError(f"the engine closed before {command.name}() ran"))
        self._pending = None
        for seq in list(self._live.values()):
            if isinstance(seq, ScoredSequence):
                seq.scored.set_exception(EngineError("the engine closed"))
            elif seq.future.set_running_or_notify_cancel():
                seq.future.set_result(seq.completion(StopReason.ABORTED))
        self._live.clear()
        self._runner.free_cache()


def _context_limit(runner: ModelRunner, configured: int | None) -> int:
    own = int(runner.model.config.max_position_embeddings)
    return min(own, configured) if configured else own


def _num_blocks(runner: ModelRunner, config: NativeEngine.Config, max_context: int) -> int:
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    useful = config.max_num_seqs * -(-max_context // config.block_size) + 1
    affordable = int(runner.free_bytes() * config.kv_memory_fraction) // runner.cache_shape.block_bytes
    if affordable < 2:
        raise EngineError(
            f"{runner.free_bytes() >> 20} MiB are free, which at kv_memory_fraction={config.kv_memory_fraction} "
            "is not one KV block: raise it, or free memory"
        )
    return min(useful, affordable)
