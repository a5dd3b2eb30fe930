"""The thread that drives vLLM's engine, what is under way in it, and rill's requests and answers in vLLM's words.
Used by vllm.py only, which hands the module `vllm` in.

    callers                         engine thread
    submit, abort, pause,   ──►  commands ─► LLMEngine.step() ─► deltas, completions
    update_weights, score           ▲                │
                                    └────────────────┘ sleeps when idle, paused or without usable weights

A job is held (in `held`) or in vLLM (in `running`). What interrupts (pause, update, flush, release) takes jobs out with
their tokens kept, and puts them back later with those tokens as prompt: no token comes from an old cache entry.
Everything but `submit` and `commands` runs on the engine's thread, so nothing here needs a lock of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rill.errors import EngineDiedError, EngineError, RequestError
from rill.inference.base import Completion, Delta, EngineStats, PauseMode, Request
from rill.inference.commands import CONTROL_TIMEOUT_S, CommandQueue
from rill.inference.flight import Flight
from rill.inference.requests import sampling_words
from rill.inference.tally import Tally
from rill.types import PolicyVersion, StopReason


@dataclass(slots=True, eq=False)
class Job:
    """A flight as vLLM knows it. Its id changes with every attempt: vLLM ids must not come back."""

    flight: Flight
    vllm_id: str = ""
    is_score: bool = False


class VllmLoop:
    def __init__(self, engine: Any, words: VllmWords) -> None:
        """`engine` is vLLM's LLMEngine."""
        self._engine = engine
        self._words = words
        self.version = PolicyVersion(0)
        self.pause: PauseMode | None = None
        self.unavailable: str | None = None
        """Why no request can be taken: vLLM failed, or an update did."""
        self.is_released = False
        self.adapters: dict[str, Any] = {}
        """By name, as vLLM wants them with a request."""
        self.jobs: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self._held: list[Job] = []
        self._num_attempts = 0
        self._tally = Tally()
        self.commands = CommandQueue(self._describe)
        self._thread = threading.Thread(target=self._loop, name="rill-vllm-engine", daemon=True)
        self._thread.start()

    # --- for callers' threads ----------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue them; whatever keeps them from being taken ends them."""

        def end_if_lost(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                for job in jobs:
                    if not job.flight.future.done():
                        job.flight.finish(error)

        self.commands.post("submit", lambda: self.add(jobs)).done.add_done_callback(end_if_lost)

    def stats(self) -> EngineStats:
        return self._tally.stats(
            num_running=len(self.running), num_waiting=len(self._held), version=self.version
        )

    def close(self) -> None:
        self.commands.close()
        self._thread.join(CONTROL_TIMEOUT_S)

    def _describe(self) -> str:
        return f"vllm: {len(self.running)} running, {len(self._held)} held, pause {self.pause}"

    # --- on the engine's thread: what commands do --------------------------------------------------------

    def add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.jobs[job.flight.request.id] = job
            self._held.append(job)
        self.put_back()

    def abort(self, ids: Sequence[str] | None) -> None:
        jobs = [self.jobs[i] for i in (list(self.jobs) if ids is None else ids) if i in self.jobs]
        running = [job.vllm_id for job in jobs if job.vllm_id in self.running]
        if running:
            self._engine.abort_request(running)
        for job in jobs:
            self._end(job, EngineError("scoring was aborted") if job.is_score else job.flight.aborted())

    def set_pause(self, mode: PauseMode | None) -> None:
        self.pause = mode
        if mode is None:
            self.put_back()

    def take_out(self) -> None:
        """Out of vLLM, with the tokens so far kept; put back later."""
        jobs = list(self.running.values())
        if jobs:
            self._engine.abort_request([job.vllm_id for job in jobs])
        self.running.clear()
        self._held = jobs + self._held

    def put_back(self) -> None:
        """Give vLLM everything that is held, unless nothing may be admitted now."""
        if self.pause is not None or self.unavailable is not None or self.is_released:
            return
        held, self._held = self._held, []
        for job in held:
            self._admit(job)

    # --- on the engine's thread: the loop ----------------------------------------------------------------

    def _loop(self) -> None:
        self.commands.enter_thread()
        while not self.commands.is_closed:
            self.commands.run_waiting(lambda: self._can_step)
            if self._can_step:
                self._step()
        for job in list(self.jobs.values()):
            self._end(job, job.flight.aborted())
        self.commands.fail_waiting()

    @property
    def _can_step(self) -> bool:
        if self.pause is PauseMode.INTERRUPT or self.unavailable is not None or self.is_released:
            return False
        return bool(self.running)

    def _step(self) -> None:
        try:
            for output in self._engine.step():
                if output.request_id in self.running:
                    self._take(self.running[output.request_id], output)
        except Exception as error:  # noqa: BLE001 - boundary: vLLM raises anything; every caller must hear of it
            self.unavailable = f"vLLM failed: {type(error).__name__}: {error}"
            for job in list(self.jobs.values()):
                self._end(job, EngineDiedError(self.unavailable))

    def _admit(self, job: Job) -> None:
        job.flight.restart()
        request = job.flight.next_request()
        self._num_attempts += 1
        job.vllm_id = f"{request.id}#{self._num_attempts}"
        words = self._words
        params = words.scoring() if job.is_score else words.sampling(request, job.flight.num_kept)
        try:
            self._engine.add_request(
                job.vllm_id,
                words.prompt(request),
                params,
                lora_request=None if request.adapter is None else self.adapters[request.adapter],
                priority=request.priority,
            )
        except Exception as error:  # noqa: BLE001 - boundary: vLLM's refusals share no base class
            self._end(job, RequestError(f"request {request.id!r}: {error}"))
            return
        self.running[job.vllm_id] = job

    def _take(self, job: Job, output: Any) -> None:
        request = job.flight.request
        if job.is_score:
            if output.finished:
                self._end(job, scores_of(request, output.prompt_logprobs))
            return
        delta = delta_of(request, output, self.version)
        self._tally.add(num_generated_tokens=len(delta.token_ids))
        job.flight.record(delta)
        if delta.stop_reason is not None:
            cached = output.num_cached_tokens or 0
            text = stop_text_of(output)
            self._end(job, job.flight.completed(delta.stop_reason, stop_text=text, num_cached_tokens=cached))

    def _end(self, job: Job, outcome: Completion | BaseException) -> None:
        if self.jobs.pop(job.flight.request.id, None) is None:
            return
        self.running.pop(job.vllm_id, None)
        if job in self._held:
            self._held.remove(job)
        if isinstance(outcome, Completion) and not job.is_score:
            self._tally.end(
                num_prompt=len(job.flight.request.token_ids), num_cached=outcome.num_cached_tokens
            )
        job.flight.finish(outcome)


class VllmWords:
    def __init__(self, vllm: Any) -> None:
        self._vllm = vllm

    def prompt(self, request: Request) -> Any:
        prompt = self._vllm.TokensPrompt(prompt_token_ids=request.token_ids.tolist())
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return prompt

    def sampling(self, request: Request, num_kept: int = 0) -> Any:
        """`num_kept`: tokens that earlier attempts made, and that are part of the prompt now."""
        s = request.sampling
        # A generator starts anew with every attempt: the same seed would repeat the draws of the first.
        seed = s.seed if s.seed is None or not num_kept else hash((s.seed, num_kept))
        return self._vllm.SamplingParams(
            max_tokens=s.max_new_tokens,
            min_tokens=s.min_new_tokens,
            top_k=s.top_k,
            **sampling_words(s),
            logit_bias=dict(s.logit_bias) or None,
            seed=None if seed is None else seed % 2**63,
            logprobs=0,
            detokenize=bool(s.stop),
            output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
        )

    def scoring(self) -> Any:
        """Log-probabilities of the prompt; vLLM must sample one token too."""
        return self._vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def adapter(self, name: str, number: int, folder: str | Path) -> Any:
        return self._vllm.lora.request.LoRARequest(name, number, str(folder))


def delta_of(request: Request, output: Any, version: PolicyVersion) -> Delta:
    (sample,) = output.outputs
    ids = list(sample.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(ids, sample.logprobs or [], strict=True)]
    return Delta(
        request_id=request.id,
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        versions=np.full(len(ids), version, np.int32),
        stop_reason=_stop_reason(sample) if output.finished else None,
    )


def stop_text_of(output: Any) -> str | None:
    reason = output.outputs[0].stop_reason
    return reason if isinstance(reason, str) else None


def scores_of(request: Request, prompt_logprobs: Any) -> Completion:
    """The prompt's own log-probabilities, in a completion that generated nothing."""
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


def _stop_reason(sample: Any) -> StopReason:
    if sample.finish_reason == "length":
        return StopReason.LENGTH
    if sample.finish_reason == "abort":
        return StopReason.ABORTED
    return StopReason.EOS if sample.stop_reason is None else StopReason.STOP
