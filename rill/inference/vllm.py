"""vLLM in this process, as an Engine. The only file of rill that imports vllm.

    vllm.py          configuration, checks, and the Engine's methods
    vllm_loop.py     drives vLLM step by step; requests and answers in vLLM's words
    flight_engine.py what is under way, and how it is stopped and goes on
    vllm_worker.py   what is changed inside vLLM's workers

What vLLM does not promise, these files see to:
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

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rill.config import PartConfig
from rill.errors import MissingExtraError, ModelError, RequestError, UnsupportedError, WeightSyncError
from rill.inference.base import Feature, MemoryLevel, NamedTensors, Request
from rill.inference.commands import MOVE_TIMEOUT_S
from rill.inference.parameters import checked, expected_shapes
from rill.inference.requests import check_fits, check_request
from rill.inference.vllm_loop import VllmLoop, VllmWords
from rill.inference.vllm_worker import report_before_truncation, tie_head
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.runtime.process.scratch import ScratchFolder
from rill.types import PolicyVersion


class VllmEngine(VllmLoop):
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
        self._num_adapters = 0
        """Loaded since the start: the number of one is its id in vLLM."""
        self._folder: ScratchFolder | None = None
        self._expected = expected_shapes(config.model)
        self._llm = vllm.LLM(**self._llm_args())
        engine = self._llm.llm_engine
        _prepare(engine, vllm.__version__)
        super().__init__(engine, VllmWords(vllm))
        self._is_cpu = engine.vllm_config.device_config.device_type == "cpu"
        self.max_context = int(engine.model_config.max_model_len)
        self.vocab_size = int(engine.model_config.get_vocab_size())

    @property
    def features(self) -> frozenset[Feature]:
        found = {Feature.STREAM, Feature.SCORE, Feature.PARTIAL_ROLLOUT, Feature.SEEDED}
        found.add(Feature.LORA if self.config.max_adapters else Feature.UPDATE_WEIGHTS)
        if self.config.enable_sleep and not self._is_cpu:
            found.add(Feature.RELEASE_MEMORY)
        return frozenset(found)

    @property
    def adapters(self) -> frozenset[str]:
        return frozenset(self._adapters)

    def release(self, level: MemoryLevel) -> None:
        if Feature.RELEASE_MEMORY not in self.features:
            raise UnsupportedError(
                "vllm: release needs CUDA and enable_sleep = true; its CPU build ignores sleep"
            )
        super().release(level)

    def update_weights(self, tensors: NamedTensors, version: PolicyVersion, *, partial: bool = False) -> None:
        if self.config.max_adapters:
            raise UnsupportedError(
                "vllm: with adapters the base model's weights stay as they are: set max_adapters = 0 to update them"
            )
        super().update_weights(tensors, version, partial=partial)

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
                await self._hold(cut=True)  # what is under way goes on with the new one
                await self._emptied()
                self._engine.remove_lora(before.lora_int_id)
                self._go_on()

        self._call(load(), "load_adapter", MOVE_TIMEOUT_S)

    def unload_adapter(self, name: str) -> None:
        async def unload() -> None:
            if name in self._adapters:
                await self._abort(lambda flight: flight.request.adapter == name)
                self._engine.remove_lora(self._adapters.pop(name).lora_int_id)

        self._call(unload(), "unload_adapter")

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        if partial:
            raise UnsupportedError("vllm: its reload needs all parameters; publish whole weights")
        await self._emptied()
        try:
            # Copies: vLLM keeps a layer's tensors until it has all of them, and whoever sends may use his memory again
            # for the next one.
            copies = ((name, tensor.clone()) for name, tensor in checked(tensors, self._expected))
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
            self._engine.collective_rpc(tie_head)
            self._forget_prefixes()
        except Exception as error:  # vLLM raises anything; half-loaded weights must not be used
            raise WeightSyncError(f"vllm: {error}") from error

    async def _close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _check(self, request: Request) -> None:
        check_request(
            request, max_context=self.max_context, vocab_size=self.vocab_size, adapters=self.adapters
        )
        check_fits(request, self.max_context)
        try:
            self._words.sampling(request)
        except Exception as error:  # boundary: vLLM's refusals share no base class
            raise RequestError(f"request {request.id!r}: {error}") from error

    def _llm_args(self) -> dict[str, Any]:
        path, limit = self.config.model.path, self.config.max_adapters
        if path is None:
            self._folder = ScratchFolder("vllm")
            path = str(self._folder.path)
            _write_model(self.config.model, path)
        return {
            "model": path,
            "tokenizer": self.config.model.tokenizer
            if self.config.model.tokenizer not in (None, "chars")
            else path,
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


def _prepare(engine: Any, version: str) -> None:
    try:
        engine.collective_rpc(report_before_truncation)
    except (AttributeError, UnsupportedError) as error:
        raise UnsupportedError(
            f"vLLM {version} cannot be made to report log-probabilities that a trainer can recompute ({error}): use"
            " 0.26 on a GPU or 0.32 on a CPU, which the adapter was made for"
        ) from error


def _write_model(model: ModelConfig, folder: str) -> None:
    import torch

    load_model(model, dtype=torch.float32).save_pretrained(folder)
    if model.tokenizer is not None:
        load_tokenizer(model).save_pretrained(folder)
