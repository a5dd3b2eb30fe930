"""A running `vllm serve` as an Engine, over HTTP.

Start the server with what training needs:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs \\
        --worker-extension-cls rill.inference.vllm_worker.WorkerExtension

Generation goes through /v1/completions with token ids. Weights travel through a folder that both sides see
(`exchange_folder`; /dev/shm on one machine), are loaded by our worker extension, and the prefix cache is reset.
The development routes have no keys of their own in vLLM: keep the server on a private network.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

import httpx
import numpy as np

from rill.errors import EngineError
from rill.inference.base import Feature, MemoryLevel, NamedTensors, Request
from rill.inference.continued import reseeded
from rill.inference.openai import completion_chunks, model_card
from rill.inference.parameters import Checkpoint, checked, expected_shapes
from rill.inference.remote import Chunk, RemoteConfig, RemoteEngine
from rill.models.loading import ModelConfig, load_model_config
from rill.runtime.process.scratch import ScratchFolder
from rill.types import Floats, PolicyVersion, TokenIds


class VllmServerEngine(RemoteEngine):
    class Config(RemoteConfig):
        type: Literal["vllm_server"] = "vllm_server"
        url: str
        """The server's base address, without /v1."""
        served_name: str
        """The model's name at the server."""
        model: ModelConfig
        """The same model as the server's: its names and shapes are checked before weights are sent."""
        api_key_variable: str = "VLLM_API_KEY"
        is_extended: bool = True
        """The server runs with our worker extension. Without it there are no weight updates, and log-probabilities are
        those after top-k, top-p and min-p."""
        exchange_folder: str = "/dev/shm"
        """Where new weights are written for the server to read. Both must see it."""
        enable_sleep: bool = False
        """The server runs with --enable-sleep-mode on CUDA, so that release() works."""

    def __init__(self, config: Config, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(config, "vllm_server", transport)
        self.config = config
        self._expected = expected_shapes(config.model)
        self.vocab_size = int(load_model_config(config.model).get_text_config().vocab_size)
        self.max_context = self._call(self._ask_context(), "models", config.connect_timeout_s + 30.0)
        if config.is_extended:
            self._call(self._http.post("/collective_rpc", {"method": "rill_prepare"}), "prepare", 60.0)

    @property
    def features(self) -> frozenset[Feature]:
        found = {Feature.STREAM, Feature.SCORE, Feature.PARTIAL_ROLLOUT, Feature.SEEDED}
        if self.config.is_extended:
            found.add(Feature.UPDATE_WEIGHTS)
        if self.config.enable_sleep:
            found.add(Feature.RELEASE_MEMORY)
        return frozenset(found)

    def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        # vLLM's generators start anew with every attempt.
        return completion_chunks(self._http, "/v1/completions", reseeded(request), self.config.served_name)

    async def _score_one(self, token_ids: TokenIds, adapter: str | None) -> Floats:
        ids = token_ids.tolist()
        body = {
            "model": adapter or self.config.served_name,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
        }
        answer = await self._http.post("/v1/completions", body | {"prompt_logprobs": 0})
        scores = np.zeros(len(ids), np.float32)
        for index, entry in enumerate(answer["choices"][0]["prompt_logprobs"] or []):
            if entry is not None:
                scores[index] = entry[str(ids[index])]["logprob"]
        return scores

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        with ScratchFolder("weights", self.config.exchange_folder) as folder:
            path = folder.path / f"{version}.safetensors"
            Checkpoint.write(checked(tensors, self._expected), path)
            await self._http.post("/collective_rpc", {"method": "rill_load_weights", "args": [str(path)]})
        await self._flush()

    async def _flush(self) -> None:
        await self._http.post("/reset_prefix_cache")

    async def _release(self, level: MemoryLevel, before: MemoryLevel | None) -> None:
        """Weights and cache together, whatever the level."""
        if before is None:
            await self._http.post("/sleep?level=1")

    async def _restore(self, released: MemoryLevel) -> None:
        await self._http.post("/wake_up")

    async def _ask_context(self) -> int:
        card = await model_card(self._http, "/v1/models", self.config.served_name)
        if not card:
            raise EngineError(f"the server at {self._http.url} does not serve {self.config.served_name!r}")
        return int(card["max_model_len"])
