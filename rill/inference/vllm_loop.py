"""vLLM's engine in this process, driven step by step; and rill's requests and answers in vLLM's words. Base of vllm.py,
which hands the module `vllm` in.

    loop thread     attempts of flights (flight_engine.py), control ─► between two steps
                    LLMEngine.step() ─► deltas into the flights, ends of attempts

A step keeps the thread as long as it takes; whatever else is asked of the engine is done after it. An attempt that
is cut short leaves vLLM, and its flight comes back with its tokens as prompt: none comes from an old cache entry.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rill.errors import EngineDiedError, EngineError, RequestError
from rill.inference.base import Completion, Delta, MemoryLevel, Request
from rill.inference.continued import Flight
from rill.inference.flight_engine import FlightEngine
from rill.inference.requests import sampling_words
from rill.types import Floats, PolicyVersion, SamplingParams, StopReason, TokenIds


@dataclass(slots=True, eq=False)
class _Job:
    """A request in vLLM."""

    request: Request
    flight: Flight | None
    """None: its prompt is scored."""
    ended: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """With a Completion; or with the prompt's scores."""


class VllmLoop(FlightEngine):
    def __init__(self, engine: Any, words: VllmWords) -> None:
        """`engine` is vLLM's LLMEngine."""
        super().__init__("vllm", "vllm")
        self._engine, self._words = engine, words
        self._adapters: dict[str, Any] = {}
        """By name, as vLLM wants them with a request."""
        self._jobs: dict[str, _Job] = {}
        """By vLLM's id, which changes with every attempt: it must not come back."""
        self._num_jobs = 0
        self._stepping: asyncio.Task[None] | None = None

    async def _attempt(self, flight: Flight, request: Request) -> Completion:
        params = self._words.sampling(request, flight.num_kept)
        completion: Completion = await self._run(_Job(request, flight), params)
        return completion

    async def _score_one(self, token_ids: TokenIds, adapter: str | None) -> Floats:
        """vLLM needs room for one more token."""
        one = SamplingParams(max_new_tokens=1)
        request = Request(
            id="score", token_ids=np.asarray(token_ids, np.int32), sampling=one, adapter=adapter
        )
        self._check(request)
        scores: Floats = await self._run(_Job(request, None), self._words.scoring())
        return scores

    async def _flush(self) -> None:
        await self._hold(cut=True)
        await self._emptied()
        self._forget_prefixes()
        self._go_on()

    async def _release(self, level: MemoryLevel) -> None:
        """vLLM gives back weights and cache together, whatever the level; the weights wait in host memory."""
        await self._emptied()
        self._engine.sleep(level=1)

    async def _restore(self) -> None:
        if self._is_released:
            self._engine.wake_up()

    async def _emptied(self) -> None:
        """Nothing is in vLLM: attempts have been cut short, and what is scored ends soon."""
        while self._jobs:
            await asyncio.sleep(0)

    def _forget_prefixes(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise EngineError("vllm: its prefix cache was not reset, and holds what older weights computed")

    async def _run(self, job: _Job, params: Any) -> Any:
        request = job.request
        self._num_jobs += 1
        vllm_id = f"{request.id}#{self._num_jobs}"
        try:
            self._engine.add_request(
                vllm_id,
                self._words.prompt(request),
                params,
                lora_request=None if request.adapter is None else self._adapters[request.adapter],
                priority=request.priority,
            )
        except Exception as error:  # boundary: vLLM's refusals share no base class
            raise RequestError(f"request {request.id!r}: {error}") from error
        self._jobs[vllm_id] = job
        if self._stepping is None:
            self._stepping = self._loop.create_task(self._step())
        try:
            return await job.ended
        finally:
            if self._jobs.pop(vllm_id, None) is not None:
                self._engine.abort_request([vllm_id])

    async def _step(self) -> None:
        """While there is something in vLLM."""
        try:
            while self._jobs:
                for output in self._engine.step():
                    job = self._jobs.get(output.request_id)
                    if job is not None and not job.ended.done():  # else it is being cut short
                        self._take(job, output)
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001 - boundary: vLLM raises anything; every caller must hear of it
            self._unavailable = f"vLLM failed: {type(error).__name__}: {error}"
            jobs, self._jobs = self._jobs, {}
            for job in jobs.values():
                if not job.ended.done():
                    job.ended.set_exception(EngineDiedError(self._unavailable))
        finally:
            self._stepping = None

    def _take(self, job: _Job, output: Any) -> None:
        ended: Completion | Floats | None = None
        if job.flight is None:
            ended = scores_of(job.request, output.prompt_logprobs) if output.finished else None
        else:
            delta = delta_of(job.request, output, self.version)
            self._gain(job.flight, delta)
            if delta.stop_reason is not None:
                cached, text = output.num_cached_tokens or 0, stop_text_of(output)
                ended = job.flight.completed(delta.stop_reason, stop_text=text, num_cached_tokens=cached)
        if ended is not None:
            del self._jobs[output.request_id]
            job.ended.set_result(ended)


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
        """vLLM's prefix cache and its sets tell adapters apart by their names alone, so each has one of its own."""
        return self._vllm.lora.request.LoRARequest(f"{name}#{number}", number, str(folder))


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


def scores_of(request: Request, prompt_logprobs: Any) -> Floats:
    """The prompt's own log-probabilities."""
    scores = np.zeros(len(request.token_ids), np.float32)
    for index, entry in enumerate(prompt_logprobs or []):
        if entry is not None:
            scores[index] = entry[int(request.token_ids[index])].logprob
    return scores


def _stop_reason(sample: Any) -> StopReason:
    if sample.finish_reason == "length":
        return StopReason.LENGTH
    if sample.finish_reason == "abort":
        return StopReason.ABORTED
    return StopReason.EOS if sample.stop_reason is None else StopReason.STOP
