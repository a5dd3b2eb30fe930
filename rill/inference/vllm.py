"""vLLM in this process, as an Engine. The only file of rill that imports vllm.

    loop thread     attempts of flights (flight_engine.py), control ─► between two steps
                    LLMEngine.step() ─► deltas into the flights, ends of attempts

A step keeps the thread as long as it takes; whatever else is asked of the engine is done after it. What is changed
inside vLLM's workers is in vllm_worker.py. What vLLM does not promise, these two files see to:
- its prefix cache survives a weight update: it is reset with every update, and requests under way are taken out and
  put back with their tokens as prompt, so that no token is computed from old cache entries;
- with tied embeddings a reload may leave an output head of its own stale, or packed: it is tied and packed again;
- a reload keeps tensors of a layer until it has all of them: it is given copies;
- names, shapes and completeness of new weights are checked here;
- an adapter that takes another's place gets a name of its own: nothing is found in a cache that the old one filled;
- log-probabilities are `processed_logprobs`, after penalties, bias and temperature; vLLM also truncates them by top-k,
  top-p and min-p, which the protocol does not: its sampler is told to report what it had before that.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from rill.config import PartConfig
from rill.errors import (
    EngineDiedError,
    EngineError,
    MissingExtraError,
    ModelError,
    RequestError,
    UnsupportedError,
)
from rill.inference.base import Completion, Delta, EngineStats, Feature, MemoryLevel, NamedTensors, Request
from rill.inference.commands import MOVE_TIMEOUT_S
from rill.inference.continued import Flight, reseeded
from rill.inference.flight_engine import FlightEngine
from rill.inference.parameters import checked, expected_shapes
from rill.inference.requests import check_adapter, sampling_words, stop_reason_of
from rill.inference.vllm_worker import report_before_truncation, tie_head
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.runtime.process.scratch import ScratchFolder
from rill.types import Floats, PolicyVersion, SamplingParams, TokenIds


@dataclass(slots=True, eq=False)
class _Job:
    """A request in vLLM."""

    request: Request
    flight: Flight | None
    """None: its prompt is scored."""
    ended: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """With a Completion; or with the prompt's scores."""


class VllmEngine(FlightEngine):
    """See rill.inference.base.Engine for what each method promises."""

    advice = {
        Feature.RELEASE_MEMORY: "it needs CUDA and enable_sleep = true; its CPU build ignores sleep",
        Feature.UPDATE_WEIGHTS: "with adapters the base model's weights stay as they are: set max_adapters = 0",
    }

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
        seed: int = 0
        """Seeds the requests that bring no seed of their own."""
        gpu_memory_fraction: float = Field(default=0.85, gt=0, lt=1)
        """Share of a GPU that vLLM may take."""
        cpu_kv_gib: int = Field(default=1, ge=1)
        """Size of the KV cache on CPU, in GiB."""
        enforce_eager: bool = False
        """No compilation and no CUDA graphs: slower, and quick to start."""
        enable_sleep: bool = False
        """Lets release() give memory back. CUDA only."""
        max_adapters: int = Field(default=0, ge=0)
        """LoRA adapters that can be loaded at one time, of rank 64 at most. 0: none. With them the base model's weights
        cannot be updated: vLLM wraps its layers, and its reload does not find them then."""
        engine_args: dict[str, Any] = Field(default_factory=dict)
        """Further keyword arguments of vllm.LLM, as they are."""

    def __init__(self, config: Config) -> None:
        self.config = config
        vllm = _import_vllm(config.cpu_kv_gib)
        self._folder: ScratchFolder | None = None
        self._expected = expected_shapes(config.model)
        self._llm = vllm.LLM(**self._llm_args())
        engine = self._llm.llm_engine
        try:
            engine.collective_rpc(report_before_truncation)
        except (AttributeError, UnsupportedError) as error:
            raise UnsupportedError(
                f"vLLM {vllm.__version__} cannot be made to report log-probabilities that a trainer can recompute "
                f"({error}): use 0.26 on a GPU or 0.32 on a CPU, which the adapter was made for"
            ) from error
        self._drive_engine(engine, VllmWords(vllm))
        self._is_cpu = engine.vllm_config.device_config.device_type == "cpu"
        self.max_context = int(engine.model_config.max_model_len)
        self.vocab_size = int(engine.model_config.get_vocab_size())

    def _drive_engine(self, engine: Any, words: VllmWords) -> None:
        """`engine` is vLLM's LLMEngine."""
        super().__init__("vllm", "vllm")
        self._engine, self._words = engine, words
        self._adapters: dict[str, Any] = {}
        """By name, as vLLM wants them with a request."""
        self._num_adapters = 0
        """Loaded since the start: the number of one is its id in vLLM."""
        self._jobs: dict[str, _Job] = {}
        """By vLLM's id, which changes with every attempt: it must not come back."""
        self._num_jobs = 0
        self._stepping: asyncio.Task[None] | None = None
        self._death: EngineDiedError | None = None

    @property
    def features(self) -> frozenset[Feature]:
        found = {Feature.STREAM, Feature.SCORE, Feature.PARTIAL_ROLLOUT, Feature.SEEDED}
        found.add(Feature.LORA if self.config.max_adapters else Feature.UPDATE_WEIGHTS)
        if self.config.enable_sleep and not self._is_cpu:
            found.add(Feature.RELEASE_MEMORY)
        return frozenset(found)

    def stats(self) -> EngineStats:
        """Raises EngineDiedError where vLLM has failed: who watches it must not take it for idle."""
        if self._death is not None:
            raise EngineDiedError(*self._death.args)
        return super().stats()

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def load_adapter(self, name: str, source: str | Path) -> None:
        limit = self.config.max_adapters

        async def load() -> None:
            if len(self.adapters | {name}) > limit:
                raise ModelError(f"vllm: {limit} adapters fit (max_adapters): unload one, or start with more")
            self._num_adapters += 1
            adapter = self._words.adapter(name, self._num_adapters, source)
            try:
                self._engine.add_lora(adapter)
            except Exception as error:  # boundary: vLLM's refusals share no base class
                raise ModelError(f"vllm: the adapter in {source} does not fit: {error}") from error
            before = self._adapters.get(name)
            self._adapters[name] = adapter
            if before is not None:
                async with self._interruption():  # what is under way goes on with the new one
                    await self._emptied()
                    self._engine.remove_lora(before.lora_int_id)

        self._call(load(), "load_adapter", MOVE_TIMEOUT_S)

    def unload_adapter(self, name: str) -> None:
        async def unload() -> None:
            if name in self._adapters:
                await self._abort(lambda flight: flight.request.adapter == name)
                self._engine.remove_lora(self._adapters.pop(name).lora_int_id)

        self._call(unload(), "unload_adapter")

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        await self._emptied()
        # Copies: vLLM keeps a layer's tensors until it has all of them, and whoever sends may use his memory again for
        # the next one.
        copies = ((name, tensor.clone()) for name, tensor in checked(tensors, self._expected))
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
        self._engine.collective_rpc(tie_head)
        self._forget_prefixes()

    async def _attempt(self, flight: Flight, request: Request) -> Completion:
        completion: Completion = await self._run(_Job(request, flight), self._words.sampling(request))
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
        async with self._interruption():
            await self._emptied()
            self._forget_prefixes()

    async def _release(self, level: MemoryLevel, before: MemoryLevel | None) -> None:
        """vLLM gives back weights and cache together, whatever the level; the weights wait in host memory."""
        if before is None:
            await self._emptied()
            self._engine.sleep(level=1)

    async def _restore(self, released: MemoryLevel) -> None:
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
            self._death = EngineDiedError(self._unavailable)
            jobs, self._jobs = self._jobs, {}
            for job in jobs.values():
                if not job.ended.done():
                    job.ended.set_exception(self._death)
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
                cached, matched = output.num_cached_tokens or 0, output.outputs[0].stop_reason
                text = matched if isinstance(matched, str) else None
                ended = job.flight.completed(delta.stop_reason, stop_text=text, num_cached_tokens=cached)
        if ended is not None:
            del self._jobs[output.request_id]
            job.ended.set_result(ended)

    async def _close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _check(self, request: Request) -> None:
        super()._check(request)
        check_adapter(request, self.adapters)
        try:
            self._words.sampling(request)
        except Exception as error:  # boundary: vLLM's refusals share no base class
            raise RequestError(f"request {request.id!r}: {error}") from error

    def _llm_args(self) -> dict[str, Any]:
        import torch

        model, limit = self.config.model, self.config.max_adapters
        path, tokenizer = model.path, model.tokenizer
        if path is None:
            self._folder = ScratchFolder("vllm")
            path = str(self._folder.path)
            load_model(model, dtype=torch.float32).save_pretrained(path)
            if tokenizer is not None:
                load_tokenizer(model).save_pretrained(path)
        return {
            "model": path,
            "tokenizer": path if tokenizer in (None, "chars") else tokenizer,
            "dtype": self.config.dtype,
            "max_model_len": self.config.max_context,
            "max_num_seqs": self.config.max_num_seqs,
            "seed": self.config.seed,
            "gpu_memory_utilization": self.config.gpu_memory_fraction,
            "enforce_eager": self.config.enforce_eager,
            "enable_sleep_mode": self.config.enable_sleep,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            **({"enable_lora": True, "max_lora_rank": 64} if limit else {}),
            **({"max_loras": limit, "max_cpu_loras": limit + 1} if limit else {}),
            **self.config.engine_args,
        }


def _import_vllm(cpu_kv_gib: int) -> Any:
    # In this process: quick to load, and weights can be handed over without a copy between processes.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cpu_kv_gib))
    # FlashInfer's sampler gives no log-probabilities, and vLLM stops where it is not installed.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        import vllm
        import vllm.lora.request
        import vllm.sampling_params
    except ImportError as error:
        raise MissingExtraError(f"engine 'vllm' needs vLLM: pip install 'rill[vllm]' ({error})") from error
    return vllm


class VllmWords:
    def __init__(self, vllm: Any) -> None:
        self._vllm = vllm

    def prompt(self, request: Request) -> Any:
        prompt = self._vllm.TokensPrompt(prompt_token_ids=request.token_ids.tolist())
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        return prompt

    def sampling(self, request: Request) -> Any:
        s = reseeded(request).sampling  # a generator starts anew with every attempt
        return self._vllm.SamplingParams(
            max_tokens=s.max_new_tokens,
            min_tokens=s.min_new_tokens,
            top_k=s.top_k,
            **sampling_words(s),
            logit_bias=dict(s.logit_bias) or None,
            seed=None if s.seed is None else s.seed % 2**63,
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
        stop_reason=stop_reason_of(sample.finish_reason, sample.stop_reason) if output.finished else None,
    )


def scores_of(request: Request, prompt_logprobs: Any) -> Floats:
    """The prompt's own log-probabilities."""
    scores = np.zeros(len(request.token_ids), np.float32)
    for index, entry in enumerate(prompt_logprobs or []):
        if entry is not None:
            scores[index] = entry[int(request.token_ids[index])].logprob
    return scores
