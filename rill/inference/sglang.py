"""A running SGLang server as an Engine, over its native HTTP protocol.

    /generate                       input_ids, return_logprob, stream: (logprob, id, text) of every token
    /abort_request                  what is cut short here is ended there, by its rid
    /update_weights_from_disk       whole or partial weights through a folder that both sides see
    /flush_cache, /pause_generation, /continue_generation
    /release_memory_occupation, /resume_memory_occupation

SGLang reports log-probabilities after temperature and before top-k and top-p, which is what the protocol asks. Requests
are cut short by the client around an update (see remote.py), and the server is paused (`retract`) while it loads.

Three of its habits shape this file. It aborts every request whose rid begins with the one given, and refuses a rid that
it still knows: so each attempt has a rid of its own, all of one length. It flushes its cache only when nothing runs:
an update flushes while the server is paused, and not again. Where it has an admin key, control routes take that one.

Not run against a real SGLang, which does not install without a GPU: routes, fields and answers were read from its
documentation and its code, and the tests speak to a server made after them. docs/serving.md says which versions.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

import httpx
import numpy as np
from pydantic import Field

from rill.errors import AccessError, EngineError, RequestError, WeightSyncError
from rill.inference.base import Feature, MemoryLevel, NamedTensors, Request
from rill.inference.parameters import Checkpoint, checked, expected_shapes
from rill.inference.remote import Chunk, RemoteConfig, RemoteEngine, bearer
from rill.inference.requests import sampling_words
from rill.models.loading import ModelConfig, load_model_config
from rill.runtime.process.scratch import ScratchFolder
from rill.types import Floats, PolicyVersion, StopReason, TokenIds

_TAGS = {
    MemoryLevel.KV: ["kv_cache"],
    MemoryLevel.WEIGHTS: ["kv_cache", "weights"],
    MemoryLevel.GRAPHS: ["kv_cache", "weights", "cuda_graph"],
}

_FLUSH_WAIT_S = 30.0
_FLUSH_RETRY_S = 0.05


class SglangEngine(RemoteEngine):
    takes_partial_weights = True

    class Config(RemoteConfig):
        type: Literal["sglang"] = "sglang"
        model: ModelConfig
        """The same model as the server's: its names and shapes are checked before weights are sent."""
        api_key_variable: str = "SGLANG_API_KEY"
        admin_key_variable: str = "SGLANG_ADMIN_API_KEY"
        """The same for the control routes, where the server has --admin-api-key. Unset or empty: the key above."""
        exchange_folder: str = "/dev/shm"
        """Where new weights are written for the server to read. Both must see it."""
        max_context: int | None = Field(default=None, ge=2)
        """Prompt and completion together, in tokens. Unset: the server's, else the model's."""
        enable_memory_saver: bool = False
        """The server runs with --enable-memory-saver, so that release() works."""
        is_deterministic: bool = False
        """The server runs with --enable-deterministic-inference, so that seeds work."""

    def __init__(self, config: Config, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__(config, "sglang", transport)
        self.config = config
        variables = (config.admin_key_variable, config.api_key_variable)
        self._admin = bearer(next(filter(None, map(os.environ.get, variables)), ""))
        self._expected = expected_shapes(config.model)
        self.vocab_size = int(load_model_config(config.model).get_text_config().vocab_size)
        self.max_context = config.max_context or self._call(self._ask_context(), "server_info", 60.0)

    @property
    def features(self) -> frozenset[Feature]:
        found = {Feature.STREAM, Feature.SCORE, Feature.PARTIAL_ROLLOUT, Feature.UPDATE_WEIGHTS, Feature.LORA}
        if self.config.enable_memory_saver:
            found.add(Feature.RELEASE_MEMORY)
        if self.config.is_deterministic:
            found |= {Feature.SEEDED, Feature.BATCH_INVARIANT}
        return frozenset(found)

    # --- what the base asks -------------------------------------------------------------------------------

    async def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        rid = uuid.uuid4().hex
        body = {
            "input_ids": request.token_ids.tolist(),
            "sampling_params": self._sampling(request),
            "return_logprob": True,
            "stream": True,
            "rid": rid,
        }
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        num_seen = 0
        is_over = False
        try:
            async with aclosing(self._http.events("/generate", body)) as events:
                async for event in events:
                    chunk = _read_event(event, num_seen, request.sampling.stop_token_ids)
                    num_seen += len(chunk.token_ids)
                    is_over = chunk.stop_reason is not None
                    yield chunk
        finally:
            if not is_over:
                await self._control("/abort_request", {"rid": rid})

    async def _score_one(self, token_ids: TokenIds, adapter: str | None) -> Floats:
        body = {
            "input_ids": token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = await self._http.post("/generate", body)
        entries = answer["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != token_ids.tolist():
            raise EngineError("sglang: the scored tokens are not those that were sent")
        return np.array([0.0, *(entry[0] for entry in entries[1:])], np.float32)

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        with ScratchFolder("weights", self.config.exchange_folder) as folder:
            weights = checked(tensors, self._expected, partial=partial)
            Checkpoint.write(weights, folder.path / "model.safetensors")
            body = {"model_path": str(folder.path), "flush_cache": True, "weight_version": str(version)}
            # `retract` lets the update flush the cache even when others have requests at this server.
            await self._control("/pause_generation", {"mode": "retract"})
            try:
                answer = await self._control("/update_weights_from_disk", body)
            except RequestError as error:  # an update that fails is a 400 with the reason in `message`
                raise WeightSyncError(str(error)) from error
            finally:
                await self._control("/continue_generation", {})
        if not (isinstance(answer, dict) and answer.get("success")):
            raise WeightSyncError(f"sglang: the update failed: {str(answer)[:500]}")

    async def _flush(self) -> None:
        """It refuses while anything runs. Newer servers wait for that, older ones must be asked again."""
        deadline = time.monotonic() + _FLUSH_WAIT_S
        while True:
            try:
                await self._control(f"/flush_cache?timeout={_FLUSH_WAIT_S:g}")
                return
            except AccessError:
                raise  # no asking again will help
            except RequestError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_FLUSH_RETRY_S)

    async def _release(self, level: MemoryLevel, before: MemoryLevel | None) -> None:
        if before is None:
            await self._flush()  # it asserts that nothing runs
        num_before = 0 if before is None else len(_TAGS[before])
        await self._control("/release_memory_occupation", {"tags": _TAGS[level][num_before:]})

    async def _restore(self, released: MemoryLevel) -> None:
        await self._control("/resume_memory_occupation", {"tags": _TAGS[released]})

    async def _control(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._http.post(path, body, headers=self._admin)

    async def _ask_context(self) -> int:
        info = await self._http.get("/server_info") or await self._http.get("/get_server_info")
        length = (info or {}).get("context_length")
        return int(length or load_model_config(self.config.model).get_text_config().max_position_embeddings)

    def _sampling(self, request: Request) -> dict[str, Any]:
        s = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": s.max_new_tokens,
            "min_new_tokens": s.min_new_tokens,
            "top_k": s.top_k or -1,
            **sampling_words(s),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if s.logit_bias:
            params["logit_bias"] = {str(token): bias for token, bias in s.logit_bias.items()}
        if s.seed is not None and self.config.is_deterministic:
            params["sampling_seed"] = s.seed
        return params


def _read_event(event: dict[str, Any], num_seen: int, stop_ids: Sequence[int]) -> Chunk:
    """Events carry all tokens so far, or only the new ones where the server streams increments."""
    meta = event["meta_info"]
    entries = meta["output_token_logprobs"]
    total = int(meta["completion_tokens"])
    new = entries[num_seen:] if len(entries) == total else entries
    if num_seen + len(new) != total:
        raise EngineError(f"sglang: {total} tokens were announced, {num_seen + len(new)} arrived")
    finish = meta.get("finish_reason")
    matched = finish.get("matched") if finish else None
    return Chunk(
        token_ids=[entry[1] for entry in new],
        logprobs=[entry[0] for entry in new],
        stop_reason=None if finish is None else _stop_reason(finish, stop_ids),
        stop_text=matched if isinstance(matched, str) else None,
        num_cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _stop_reason(finish: dict[str, Any], stop_ids: Sequence[int]) -> StopReason:
    if finish["type"] == "length":
        return StopReason.LENGTH
    if finish["type"] == "abort":
        if finish.get("status_code"):
            raise EngineError(f"sglang: {finish.get('message')}")
        return StopReason.ABORTED
    matched = finish.get("matched")
    return StopReason.STOP if isinstance(matched, str) or matched in stop_ids else StopReason.EOS
