"""The built-in rollout engine: Hugging Face modules, paged KV cache, continuous batching, on CPU and CUDA.

One thread owns everything that a step touches. Callers' threads leave commands; the engine takes them between
two steps, so no lock is held while the model runs and every control method sees a consistent engine.

    callers                         engine thread
    ───────                         ─────────────
    submit, abort, pause,   ──►  commands ─► run all that wait          (commands.py)
    update_weights, score, …              │
                                          ▼
                             schedule ─► launch step n ─► read step n-1 (core.py)
                                 ▲                             │ append tokens, end sequences
                                 └─────────────────────────────┤
    futures, on_delta       ◄──────────────────────────────────┘        (core.py)

It sleeps on the command queue when there is nothing to do: idle, paused, released or unavailable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from rill.config import PartConfig
from rill.errors import ConfigError, EngineDiedError, EngineError, StuckError, UnsupportedError
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
from rill.inference.commands import CONTROL_TIMEOUT_S, MOVE_TIMEOUT_S, CommandQueue
from rill.inference.native.adapters import read_adapter
from rill.inference.native.admission import Admission
from rill.inference.native.core import EngineCore
from rill.inference.native.draft_model import DraftModel
from rill.inference.native.followers import lead
from rill.inference.native.model_runner import ModelRunner
from rill.inference.native.runners import build_runner
from rill.inference.native.sequence import ScoredSequence, Sequence
from rill.inference.requests import are_known, wait_for_all
from rill.models.loading import ModelConfig, load_tokenizer
from rill.types import Floats, PolicyVersion, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PREPARE_TIMEOUT_S = 600.0
"""For what is done once before the first request: on a machine's first start that compiles every kernel."""

_FEATURES = {
    Feature.STREAM, Feature.SCORE, Feature.PARTIAL_ROLLOUT, Feature.UPDATE_WEIGHTS, Feature.RELEASE_MEMORY,
    Feature.SEEDED, Feature.SEEDED_BY_POSITION, Feature.GUIDED, Feature.TOP_LOGPROBS, Feature.EMBED,
}  # fmt: skip
"""On every device and for every model."""


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
        tensor_parallel_size: int = Field(default=1, ge=1)
        """Processes that hold one model together, each some heads and some of the MLP's columns; on CUDA each has a
        GPU, from `device` on."""
        quantization: Literal["fp8", "int4"] | None = None
        """fp8: the layers' weights are held in 8 bits, quantised as they arrive, and multiplied with activations of 8
        bits. From Hopper on that is faster; elsewhere numbers are only rounded so. int4: they are rounded to what
        groups of 4 bits hold, which is not faster; the trainer computes with the same ones. Dense models."""
        kv_cache_dtype: Literal["auto", "fp8"] = "auto"
        """fp8: keys and values have 8 bits, so twice as many fit, and attention reads half."""
        block_size: int = Field(default=16, ge=1, le=256)
        """Tokens per KV block."""
        num_kv_blocks: int | None = Field(default=None, ge=2)
        """Size of the KV cache in blocks. Unset: from kv_memory_fraction."""
        kv_memory_fraction: float = Field(default=0.6, gt=0, lt=1)
        """Share of the memory that is free after loading which the KV cache may take."""
        max_num_seqs: int | None = Field(default=None, ge=1)
        """Sequences that run at one time, the slots; others wait. Unset: 512 on CUDA, 256 on the CPU."""
        max_batched_tokens: int = Field(default=8192, ge=1)
        """Tokens computed in one step, prompts and generation together."""
        max_context: int | None = Field(default=None, ge=2)
        """Prompt and completion together, in tokens. Unset: the model's own limit."""
        enable_prefix_cache: bool = True
        batch_invariant: bool = False
        """The same tokens give bit-identical logprobs whatever else is in the batch."""
        routed_experts: bool = False
        """Report which experts every token was sent to (Completion.routed_experts), for routing replay in the trainer.
        Needs a model with experts."""
        fast_path: bool = True
        """Run known architectures through fused weights and kernels instead of the modules' forward methods."""
        num_scheduler_steps: int = Field(default=4, ge=1, le=16)
        """Steps of pure generation in one turn of the host; a sequence that ends meanwhile computes up to so many
        tokens for nothing. Used where a device works ahead of the host; the CPU's steps are taken one by one."""
        num_speculative_tokens: int = Field(default=0, ge=0, le=31)
        """Tokens of the longest draft, looked up in the sequence's own text and in other answers to its prompt, that
        one step checks where few sequences run. Changes no token and no distribution. 0: off."""
        draft_model: ModelConfig | None = None
        """A small model of the same vocabulary that drafts where the text says nothing, as long as that pays: its own
        weights and a cache of as many blocks. Unset: drafts come from the text alone."""
        cuda_graphs: bool = True
        """Capture the decode step at a few batch sizes. CUDA only."""
        seed: int = 0
        """Seeds the requests that bring no seed of their own."""

        @model_validator(mode="after")
        def _drafts_are_looked_at(self) -> NativeEngine.Config:
            if self.draft_model is not None and not self.num_speculative_tokens:
                raise ValueError("draft_model drafts nothing: set num_speculative_tokens, to 4 say")
            return self

        @model_validator(mode="after")
        def _can_be_spread(self) -> NativeEngine.Config:
            alone = {"batch_invariant": self.batch_invariant, "fast_path=false": not self.fast_path}
            wrong = next((name for name, is_on in alone.items() if is_on), None)
            spread = "tensor_parallel_size > 1" if self.tensor_parallel_size > 1 else None
            if spread and wrong:
                raise ValueError(f"{spread} does not go together with {wrong}: change one")
            if self.is_quantized and (spread or wrong):
                name = "kv_cache_dtype" if self.quantization is None else "quantization"
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} does not go together with {spread or wrong}: change one"
                )
            return self

        @property
        def is_quantized(self) -> bool:
            return self.quantization is not None or self.kv_cache_dtype == "fp8"

    def __init__(
        self, config: Config, *, model: PreTrainedModel | None = None, owns_model: bool = False
    ) -> None:
        """`model`: an already loaded module whose parameters are used in place, e.g. the trainer's.

        `owns_model`: nobody else holds its parameters, so they may be moved to lie together, which is faster.
        """
        self.config = config
        has_tokenizer = config.model.tokenizer or config.model.path
        self.tokenizer = load_tokenizer(config.model) if has_tokenizer else None
        self._commands = CommandQueue(lambda: self._core.describe())
        if config.tensor_parallel_size == 1:
            self._runner = build_runner(config, model, owns_model=owns_model)
        elif model is None:
            self._runner = lead(config, on_death=self._commands.close)
        else:
            raise ConfigError(
                "an engine over a loaded module runs in its process: set tensor_parallel_size to 1"
            )
        self._draft_model: DraftModel | None = None
        self._thread = threading.Thread(target=self._loop, name="rill-native-engine", daemon=True)
        try:
            self._assemble(config)
            self._thread.start()
            self._commands.call("prepare", self._core.prepare, PREPARE_TIMEOUT_S)
        except BaseException:
            self.close()  # nobody else will get hold of the thread, or of other processes
            raise

    def _assemble(self, config: Config) -> None:
        limit, runners = self._runner.max_len, [self._runner]
        if config.draft_model is not None:
            self._draft_model = DraftModel(config, self._runner, self.tokenizer)
            runners.append(self._draft_model.runner)
        num_blocks = _num_blocks(runners, config, limit)
        self.max_context = min(limit, (num_blocks - 1) * config.block_size)
        self._core = EngineCore(self._runner, config, num_blocks, self.max_context, self._draft_model)
        for runner in runners:
            runner.allocate_cache(num_blocks)
        self.vocab_size = self._runner.num_words
        self._admission = Admission(self, self._runner)

    # --- what it is --------------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[Feature]:
        found = set(_FEATURES)
        if self.config.batch_invariant:
            found.add(Feature.BATCH_INVARIANT)
        elif self.config.tensor_parallel_size == 1 and not self.config.is_quantized:
            found.add(Feature.LORA)
        if self._runner.vision is not None:
            found.add(Feature.PICTURES)
        return frozenset(found)

    @property
    def version(self) -> PolicyVersion:
        return self._core.version

    @property
    def adapters(self) -> frozenset[str]:
        return self._runner.adapters.names

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence_[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        return [seq.future for seq in self._submit(requests, on_delta)]

    def generate(self, requests: Sequence_[Request], timeout_s: float = 600.0) -> list[Completion]:
        return self._results("generate", self._submit(requests, None), timeout_s)

    def score(
        self,
        sequences: Sequence_[TokenIds],
        temperature: float = 1.0,
        timeout_s: float = 600.0,
        *,
        adapter: str | None = None,
    ) -> list[Floats]:
        scored = [self._admission.scored_sequence(ids, temperature, adapter) for ids in sequences]
        return self._read("score", scored, timeout_s)

    def embed(self, sequences: Sequence_[TokenIds], timeout_s: float = 600.0) -> list[Floats]:
        """The hidden state of each sequence's last token."""
        read = [self._admission.scored_sequence(ids, is_embedding=True) for ids in sequences]
        return self._read("embed", read, timeout_s)

    def abort(self, request_ids: Sequence_[str] | None = None) -> None:
        ids = None if request_ids is None else list(request_ids)
        command = self._commands.post("abort", lambda: self._core.abort(ids))
        if not self._commands.is_runner:  # from on_delta it takes effect after this step
            self._commands.wait(command)

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        drained = self._commands.call("pause", lambda: self._core.set_pause(mode), timeout_s)
        try:
            drained.result(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise StuckError(
                f"pause({mode}): requests still run after {timeout_s} s ({self._core.describe()})"
            ) from None

    def resume(self) -> None:
        self._commands.call("resume", lambda: self._core.set_pause(None))

    def release(self, level: MemoryLevel) -> None:
        self._commands.call("release", lambda: self._core.release(level), MOVE_TIMEOUT_S)

    def restore(self) -> None:
        self._commands.call("restore", self._core.restore, MOVE_TIMEOUT_S)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        fence = self._runner.fence()
        self._commands.call(
            "update_weights", lambda: self._core.update(tensors, version, partial, fence), MOVE_TIMEOUT_S
        )

    def rewind(self) -> None:
        def rewind() -> None:
            self._core.version = PolicyVersion(0)

        self._commands.call("rewind", rewind)

    def load_adapter(self, name: str, source: str | Path) -> None:
        if Feature.LORA not in self.features:
            raise UnsupportedError(
                "adapters run outside of the batch-invariant path, on one rank and beside weights that are not "
                "quantised: set batch_invariant=false, tensor_parallel_size=1, quantization and kv_cache_dtype unset"
            )
        tensors = read_adapter(source)
        self._commands.call("load_adapter", lambda: self._core.load_adapter(name, tensors))

    def unload_adapter(self, name: str) -> None:
        self._commands.call("unload_adapter", lambda: self._core.unload_adapter(name))

    def flush(self) -> None:
        self._commands.call("flush", self._core.scheduler.blocks.flush)

    def stats(self) -> EngineStats:
        """Raises EngineDiedError where the engine's thread has died: who watches it must not take it for idle."""
        self._commands.check_alive()
        return self._core.stats()

    def close(self) -> None:
        """Abort what runs, end the thread, give all memory back. May be called twice."""
        self._commands.close()
        if self._thread.ident is not None:
            self._thread.join(timeout=CONTROL_TIMEOUT_S)
        self._runner.close()
        if self._thread.is_alive():
            raise StuckError(f"close: the engine's thread did not end within {CONTROL_TIMEOUT_S} s")

    # --- the engine's thread -----------------------------------------------------------------------------

    def _loop(self) -> None:
        core, commands = self._core, self._commands
        failure: EngineDiedError | None = None
        try:
            commands.enter_thread()
            self._runner.enter_thread()
            while not commands.is_closed:
                commands.run_waiting(lambda: core.can_step)
                if core.can_step:
                    core.step()
                core.report_drained()
            commands.check_alive()  # where it was closed by what ends it, those that run are told so
        except BaseException as error:  # boundary: a dead thread must not leave its callers waiting
            if isinstance(error, EngineDiedError):
                failure = error
            else:
                failure = EngineDiedError(f"the engine's thread died: {type(error).__name__}: {error}")
                failure.__cause__ = error
            commands.close(failure)
            if not isinstance(error, EngineError):
                raise
        finally:
            commands.fail_waiting()
            try:
                core.close(failure)
            finally:
                core.leave_thread()
                self._runner.close()

    def _submit(
        self, requests: Sequence_[Request], on_delta: Callable[[Delta], None] | None
    ) -> list[Sequence]:
        self._check_available()
        is_known = are_known(requests, self.vocab_size)
        sequences = [self._admission.sequence(request, on_delta, is_known) for request in requests]
        self._core.outlet.take_ids(request.id for request in requests)
        self._post_sequences("submit", sequences)
        return sequences

    def _post_sequences(self, name: str, sequences: Sequence_[Sequence]) -> None:
        """Whatever keeps the command from being run ends the sequences, which nobody else knows yet."""

        def end_if_lost(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                for seq in sequences:
                    self._core.outlet.fail(seq, error)

        command = self._commands.post(name, lambda: self._core.add(sequences))
        command.done.add_done_callback(end_if_lost)

    def _read(self, what: str, sequences: Sequence_[ScoredSequence], timeout_s: float) -> list[Floats]:
        """Texts that are computed, and nothing is generated."""
        self._check_available()
        if self._core.released is not None:
            raise EngineError(
                f"the engine's memory is released ({self._core.released}): call restore() before {what}()"
            )
        self._post_sequences(what, sequences)
        return self._results(what, sequences, timeout_s)

    def _results(self, what: str, sequences: Sequence_[Sequence], timeout_s: float) -> list[Any]:
        return wait_for_all(
            [seq.future for seq in sequences],
            timeout_s,
            what=what,
            abort=lambda: self.abort([seq.id for seq in sequences]),
            describe=self._core.describe,
        )

    def _check_available(self) -> None:
        self._commands.check_open()
        if self._core.unavailable is not None:
            raise EngineError(
                f"{self._core.unavailable}: the engine waits for a whole update_weights() to succeed"
            )


def _num_blocks(runners: list[ModelRunner], config: NativeEngine.Config, max_context: int) -> int:
    """Of each runner's cache."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    runner, block_bytes = runners[0], sum(r.cache_shape.block_bytes for r in runners)
    useful = runner.max_num_seqs * -(-max_context // config.block_size) + 1
    affordable = int(runner.free_bytes() * config.kv_memory_fraction) // block_bytes
    if affordable < 2:
        raise EngineError(
            f"{runner.free_bytes() >> 20} MiB are free, which at kv_memory_fraction={config.kv_memory_fraction} "
            "is not one KV block: raise it, or free memory"
        )
    return min(useful, affordable)
