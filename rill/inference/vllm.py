"""vLLM in this process, as an Engine. The only file of rill that imports vllm.

    callers                         engine thread
    submit, abort, pause,   ──►  commands ─► LLMEngine.step() ─► deltas, completions
    update_weights, score           ▲                │
                                    └────────────────┘ sleeps when idle, paused or without usable weights

What vLLM does not promise, this file sees to:
- its prefix cache survives a weight update: it is reset with every update, and requests under way are taken out and
  put back with their tokens as prompt, so that no token is computed from old cache entries;
- with tied embeddings a reload leaves the packed output head stale: it is tied and packed again;
- names, shapes and completeness of new weights are checked here;
- log-probabilities are `processed_logprobs`, after penalties, bias and temperature; vLLM also truncates them by top-k,
  top-p and min-p, which the protocol does not: its sampler is told to report what it had before that.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.config import PartConfig
from rill.errors import (
    EngineError,
    MissingExtraError,
    RequestError,
    StuckError,
    UnsupportedError,
    WeightSyncError,
)
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
from rill.inference.checkpoint import Checkpoint
from rill.inference.flight import Flight
from rill.inference.parameters import checked, expected_shapes
from rill.inference.requests import check_request
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.types import Floats, PolicyVersion, SamplingParams, StopReason, TokenIds

_CONTROL_TIMEOUT_S = 120.0


@dataclass(slots=True, eq=False)
class _Command:
    run: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Job:
    """A flight as vLLM knows it. Its id changes with every attempt: vLLM ids must not come back."""

    flight: Flight
    vllm_id: str = ""
    is_score: bool = False
    parts: list[Delta] = field(default_factory=list)


class VllmEngine:
    """See rill.inference.base.Engine for what each method promises."""

    class Config(PartConfig):
        type: Literal["vllm"] = "vllm"
        model: ModelConfig
        """What to load. A `shape` is written to a temporary folder first."""
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
        """auto: as the model's configuration says."""
        max_context: int | None = Field(default=None, ge=2)
        """Prompt and completion together, in tokens. Unset: the model's own limit."""
        max_num_seqs: int = Field(default=256, ge=1)
        """Sequences that run at one time; others wait."""
        gpu_memory_fraction: float = Field(default=0.85, gt=0, lt=1)
        """Share of a GPU that vLLM may take."""
        cpu_kv_gib: int = Field(default=1, ge=1)
        """Size of the KV cache on CPU, in GiB."""
        enforce_eager: bool = False
        """No compilation and no CUDA graphs: slower, and quick to start."""
        enable_sleep: bool = False
        """Lets release() give memory back. CUDA only."""
        engine_args: dict[str, Any] = Field(default_factory=dict)
        """Further keyword arguments of vllm.LLM, as they are."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._vllm = _import_vllm(config.cpu_kv_gib)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._expected = expected_shapes(config.model)
        self._llm = self._vllm.LLM(**self._llm_args())
        self._engine = self._llm.llm_engine
        self._engine.collective_rpc(_report_before_truncation)
        self._is_cpu = self._engine.vllm_config.device_config.device_type == "cpu"
        self._max_context = int(self._engine.model_config.max_model_len)
        self._vocab_size = int(self._engine.model_config.get_vocab_size())
        self._version = PolicyVersion(0)
        self._pause: PauseMode | None = None
        self._unavailable: str | None = None
        self._is_released = False
        self._jobs: dict[str, _Job] = {}
        self._by_vllm_id: dict[str, _Job] = {}
        self._held: list[_Job] = []
        self._num_attempts = self._num_finished = self._num_prompt = self._num_cached = (
            self._num_generated
        ) = 0
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="rill-vllm-engine", daemon=True)
        self._thread.start()

    # --- what it is --------------------------------------------------------------------------------------

    @property
    def features(self) -> frozenset[Feature]:
        found = {
            Feature.STREAM,
            Feature.SCORE,
            Feature.PARTIAL_ROLLOUT,
            Feature.UPDATE_WEIGHTS,
            Feature.SEEDED,
        }
        if self.config.enable_sleep and not self._is_cpu:
            found.add(Feature.RELEASE_MEMORY)
        return frozenset(found)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def max_context(self) -> int:
        return self._max_context

    # --- requests ----------------------------------------------------------------------------------------

    def submit(
        self, requests: Sequence[Request], on_delta: Callable[[Delta], None] | None = None
    ) -> list[Future[Completion]]:
        self._check_available()
        for request in requests:
            self._check(request)
        ids = [request.id for request in requests]
        if len(set(ids)) != len(ids) or any(i in self._jobs for i in ids):
            raise RequestError("two requests under way have the same id: give each its own")
        jobs = [_Job(Flight(request, on_delta)) for request in requests]
        self._post(_Command(lambda: self._add(jobs)))
        return [job.flight.future for job in jobs]

    def generate(self, requests: Sequence[Request], timeout_s: float = 600.0) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        futures = self.submit(requests)
        try:
            return [f.result(max(0.0, deadline - time.monotonic())) for f in futures]
        except FutureTimeoutError:
            self.abort([r.id for r in requests])
            raise StuckError(f"vllm: generate did not end within {timeout_s} s") from None

    def score(
        self, sequences: Sequence[TokenIds], temperature: float = 1.0, timeout_s: float = 600.0
    ) -> list[Floats]:
        """vLLM reports prompts at temperature 1 only, and needs room for one more token."""
        if temperature != 1.0:
            raise UnsupportedError(f"vllm scores at temperature 1 only, got {temperature}")
        self._check_available()
        jobs = []
        for index, tokens in enumerate(sequences):
            request = Request(
                id=f"score-{time.monotonic_ns()}-{index}",
                token_ids=np.asarray(tokens, np.int32),
                sampling=SamplingParams(max_new_tokens=1),
            )
            self._check(request)
            jobs.append(_Job(Flight(request, None), is_score=True))
        self._post(_Command(lambda: self._add(jobs)))
        deadline = time.monotonic() + timeout_s
        try:
            done = [job.flight.future.result(max(0.0, deadline - time.monotonic())) for job in jobs]
        except FutureTimeoutError:
            self.abort([job.flight.request.id for job in jobs])
            raise StuckError(f"vllm: score did not end within {timeout_s} s") from None
        return [completion.logprobs for completion in done]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        ids = None if request_ids is None else list(request_ids)
        command = _Command(lambda: self._abort(ids))
        self._post(command)
        if threading.current_thread() is not self._thread:  # from on_delta it takes effect after this step
            self._await(command, "abort", _CONTROL_TIMEOUT_S)

    # --- control -----------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        self._call("pause", lambda: self._set_pause(mode), timeout_s)
        while mode is PauseMode.FINISH and self._by_vllm_id:
            if time.monotonic() > deadline:
                raise StuckError(
                    f"vllm: pause({mode}): {len(self._by_vllm_id)} requests run after {timeout_s} s"
                )
            time.sleep(0.005)

    def resume(self) -> None:
        self._call("resume", lambda: self._set_pause(None))

    def release(self, level: MemoryLevel) -> None:
        """vLLM gives back weights and cache together, whatever the level; the weights wait in host memory."""
        if Feature.RELEASE_MEMORY not in self.features:
            raise UnsupportedError(
                "vllm: release needs CUDA and enable_sleep = true; its CPU build ignores sleep"
            )

        def sleep() -> None:
            if self._by_vllm_id and self._pause is not PauseMode.INTERRUPT:
                raise EngineError("vllm: release needs an idle or paused engine: requests run")
            self._take_out()
            self._engine.sleep(level=1)
            self._is_released = True

        self._call("release", sleep)

    def restore(self) -> None:
        def wake() -> None:
            if self._is_released:
                self._engine.wake_up()
                self._is_released = False
                self._put_back()

        self._call("restore", wake)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        if partial:
            raise UnsupportedError("vllm: its reload needs all parameters; publish whole weights")
        self._call("update_weights", lambda: self._update(tensors, version), 1800.0)

    def flush(self) -> None:
        def reset() -> None:
            self._take_out()
            self._engine.reset_prefix_cache()
            self._put_back()

        self._call("flush", reset)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._by_vllm_id),
            num_waiting=len(self._held),
            num_finished=self._num_finished,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=self._num_cached,
            num_generated_tokens=self._num_generated,
            version=self._version,
        )

    def close(self) -> None:
        with self._wake:
            if self._is_closed:
                return
        self.abort()
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(_CONTROL_TIMEOUT_S)
        if self._folder is not None:
            self._folder.cleanup()

    # --- the engine's thread -----------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._commands and not self._is_closed and not self._can_step:
                    self._wake.wait(timeout=1.0)
                if self._is_closed:
                    break
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                try:
                    command.done.set_result(command.run())
                except Exception as error:  # noqa: BLE001 - boundary: it belongs to the command's caller
                    command.done.set_exception(error)
            if self._can_step:
                self._step()
        for job in list(self._jobs.values()):
            self._end(job, job.flight.aborted())

    @property
    def _can_step(self) -> bool:
        if self._pause is PauseMode.INTERRUPT or self._unavailable is not None or self._is_released:
            return False
        return bool(self._by_vllm_id)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # noqa: BLE001 - boundary: vLLM raises anything; every caller must hear of it
            self._unavailable = f"vLLM failed: {type(error).__name__}: {error}"
            for job in list(self._jobs.values()):
                self._end(job, EngineError(self._unavailable))
            return
        for output in outputs:
            if output.request_id in self._by_vllm_id:
                self._take(self._by_vllm_id[output.request_id], output)

    def _take(self, job: _Job, output: Any) -> None:
        if job.is_score:
            if output.finished:
                self._end(job, _score_completion(job.flight.request, output.prompt_logprobs))
            return
        (sample,) = output.outputs
        ids = list(sample.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(ids, sample.logprobs or [], strict=True)]
        reason = _stop_reason(sample) if output.finished else None
        delta = Delta(
            request_id=job.flight.request.id,
            token_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.full(len(ids), self._version, np.int32),
            stop_reason=reason,
        )
        self._num_generated += len(ids)
        job.parts.append(delta)
        job.flight.record(delta)
        if reason is not None:
            self._end(job, job.flight.joined(_completion(job, sample, output, reason)))

    def _add(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._jobs[job.flight.request.id] = job
            self._held.append(job)
        self._put_back()

    def _put_back(self) -> None:
        """Give vLLM everything that is held, unless nothing may be admitted now."""
        if self._pause is not None or self._unavailable is not None or self._is_released:
            return
        held, self._held = self._held, []
        for job in held:
            job.flight.restart()
            job.parts = []
            request = job.flight.next_request()
            self._num_attempts += 1
            job.vllm_id = f"{request.id}#{self._num_attempts}"
            prompt = self._vllm.TokensPrompt(prompt_token_ids=request.token_ids.tolist())
            if request.cache_salt:
                prompt["cache_salt"] = request.cache_salt
            try:
                self._engine.add_request(
                    job.vllm_id, prompt, self._params(job, request), priority=request.priority
                )
            except Exception as error:  # noqa: BLE001 - boundary: vLLM's refusals share no base class
                self._end(job, RequestError(f"request {request.id!r}: {error}"))
                continue
            self._by_vllm_id[job.vllm_id] = job

    def _take_out(self) -> None:
        """Out of vLLM, with the tokens so far kept; put back later."""
        jobs = list(self._by_vllm_id.values())
        if jobs:
            self._engine.abort_request([job.vllm_id for job in jobs])
        self._by_vllm_id.clear()
        self._held = jobs + self._held

    def _abort(self, ids: list[str] | None) -> None:
        jobs = [self._jobs[i] for i in (list(self._jobs) if ids is None else ids) if i in self._jobs]
        running = [job.vllm_id for job in jobs if job.vllm_id in self._by_vllm_id]
        if running:
            self._engine.abort_request(running)
        for job in jobs:
            self._end(job, EngineError("scoring was aborted") if job.is_score else job.flight.aborted())

    def _end(self, job: _Job, outcome: Completion | BaseException) -> None:
        if self._jobs.pop(job.flight.request.id, None) is None:
            return
        self._by_vllm_id.pop(job.vllm_id, None)
        if job in self._held:
            self._held.remove(job)
        if isinstance(outcome, Completion) and not job.is_score:
            self._num_finished += 1
            self._num_prompt += len(job.flight.request.token_ids)
            self._num_cached += outcome.num_cached_tokens
        job.flight.finish(outcome)

    def _set_pause(self, mode: PauseMode | None) -> None:
        self._pause = mode
        if mode is None:
            self._put_back()

    def _update(self, tensors: NamedTensors, version: PolicyVersion) -> None:
        if version <= self._version:
            raise WeightSyncError(f"vllm: version {version} is not newer than {self._version}")
        self._take_out()
        try:
            whole = list(checked(tensors, self._expected))
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(whole)})
            self._engine.collective_rpc(_tie_head)
            self._engine.reset_prefix_cache()
        except Exception as error:  # vLLM raises anything; half-loaded weights must not be used
            self._unavailable = f"the last weight update failed: {error}"
            raise WeightSyncError(f"vllm: {error}") from error
        self._version, self._unavailable = version, None
        self._put_back()

    # --- asking ------------------------------------------------------------------------------------------

    def _params(self, job: _Job, request: Request) -> Any:
        s = request.sampling
        kind = self._vllm.sampling_params.RequestOutputKind
        if job.is_score:
            return self._vllm.SamplingParams(
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=0,
                detokenize=False,
                output_kind=kind.FINAL_ONLY,
            )
        # A generator starts anew with every attempt: the same seed would repeat the draws of the first.
        seed = s.seed if s.seed is None or not job.flight.num_kept else hash((s.seed, job.flight.num_kept))
        return self._vllm.SamplingParams(
            max_tokens=s.max_new_tokens,
            min_tokens=s.min_new_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            stop=list(s.stop),
            stop_token_ids=list(s.stop_token_ids),
            ignore_eos=s.ignore_eos,
            logit_bias=dict(s.logit_bias) or None,
            seed=None if seed is None else seed % 2**63,
            logprobs=0,
            detokenize=bool(s.stop),
            output_kind=kind.DELTA,
        )

    def _check(self, request: Request) -> None:
        check_request(request, max_context=self._max_context, vocab_size=self._vocab_size)
        if request.adapter is not None or request.multimodal is not None:
            raise UnsupportedError("vllm: adapters and multimodal inputs are not wired up")
        try:
            self._params(_Job(Flight(request, None)), request)
        except Exception as error:  # boundary: vLLM's refusals share no base class
            raise RequestError(f"request {request.id!r}: {error}") from error

    def _check_available(self) -> None:
        if self._is_closed or self._unavailable is not None:
            raise EngineError(f"vllm: {self._unavailable or 'the engine is closed'}")

    def _call(self, what: str, run: Callable[[], Any], timeout_s: float = _CONTROL_TIMEOUT_S) -> Any:
        command = _Command(run)
        self._post(command)
        return self._await(command, what, timeout_s)

    def _post(self, command: _Command) -> None:
        with self._wake:
            if self._is_closed:
                raise EngineError("vllm: the engine is closed")
            self._commands.append(command)
            self._wake.notify()

    def _await(self, command: _Command, what: str, timeout_s: float) -> Any:
        try:
            return command.done.result(timeout_s)
        except FutureTimeoutError:
            raise StuckError(f"vllm: {what} was not done within {timeout_s} s") from None

    def _llm_args(self) -> dict[str, Any]:
        path = self.config.model.path
        if path is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rill-vllm-")
            path = self._folder.name
            _write_model(self.config.model, path)
        return {
            "model": path,
            "tokenizer": self.config.model.tokenizer
            if self.config.model.tokenizer not in (None, "chars")
            else path,
            "dtype": self.config.dtype,
            "max_model_len": self.config.max_context,
            "max_num_seqs": self.config.max_num_seqs,
            "gpu_memory_utilization": self.config.gpu_memory_fraction,
            "enforce_eager": self.config.enforce_eager,
            "enable_sleep_mode": self.config.enable_sleep,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            **self.config.engine_args,
        }


class WorkerExtension:
    """For `vllm serve --worker-extension-cls rill.inference.vllm.WorkerExtension`: see vllm_server.py."""

    def rill_prepare(self) -> None:
        _report_before_truncation(self)

    def rill_load_weights(self, path: str) -> None:
        checkpoint = Checkpoint((Path(path),))
        self.reload_weights(weights_iterator=iter(checkpoint))  # type: ignore[attr-defined]
        _tie_head(self)


def _report_before_truncation(worker: Any) -> None:
    """Let the sampler report log-probabilities as they are after the temperature and before top-k, top-p and min-p."""
    sampler = worker.model_runner.sampler
    scale, truncate = sampler.apply_temperature, sampler.topk_topp_sampler.forward
    reported: list[Any] = []

    def apply_temperature(logits: Any, temperature: Any, all_random: bool) -> Any:
        logits = scale(logits, temperature, all_random)
        reported[:] = [sampler.compute_logprobs(logits)]
        return logits

    def forward(*args: Any, **kwargs: Any) -> Any:
        sampled, _ = truncate(*args, **kwargs)
        return sampled, reported.pop()

    sampler.apply_temperature = apply_temperature
    sampler.topk_topp_sampler.forward = forward


def _tie_head(worker: Any) -> None:
    """Tie the output head to the embedding again, and pack it again: a reload leaves it as it was."""
    model = worker.model_runner.get_model()
    if not model.config.tie_word_embeddings:
        return
    head = model.lm_head.tie_weights(model.model.embed_tokens)
    head.quant_method.process_weights_after_loading(head)
    model.lm_head = head


def _import_vllm(cpu_kv_gib: int) -> Any:
    # In this process: quick to load, and weights can be handed over without a copy between processes.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_gib))
    try:
        import vllm
        import vllm.sampling_params
    except ImportError as error:
        raise MissingExtraError(f"engine 'vllm' needs vLLM: pip install 'rill[vllm]' ({error})") from error
    return vllm


def _write_model(model: ModelConfig, folder: str) -> None:
    import torch

    load_model(model, dtype=torch.float32).save_pretrained(folder)
    if model.tokenizer is not None:
        load_tokenizer(model).save_pretrained(folder)


def _stop_reason(sample: Any) -> StopReason:
    if sample.finish_reason == "length":
        return StopReason.LENGTH
    if sample.finish_reason == "abort":
        return StopReason.ABORTED
    return StopReason.EOS if sample.stop_reason is None else StopReason.STOP


def _completion(job: _Job, sample: Any, output: Any, reason: StopReason) -> Completion:
    return Completion(
        request_id=job.flight.request.id,
        token_ids=np.concatenate([p.token_ids for p in job.parts]),
        logprobs=np.concatenate([p.logprobs for p in job.parts]),
        versions=np.concatenate([p.versions for p in job.parts]),
        stop_reason=reason,
        stop_text=sample.stop_reason if isinstance(sample.stop_reason, str) else None,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _score_completion(request: Request, prompt_logprobs: Any) -> Completion:
    scores = np.zeros(len(request.token_ids), np.float32)
    for index, entry in enumerate(prompt_logprobs or []):
        if entry is not None:
            scores[index] = entry[int(request.token_ids[index])].logprob
    return Completion(
        request_id=request.id,
        token_ids=request.token_ids,
        logprobs=scores,
        versions=np.zeros(len(scores), np.int32),
        stop_reason=StopReason.LENGTH,
    )
