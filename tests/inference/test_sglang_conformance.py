"""The sglang adapter under the suite that every engine runs: SGLang's protocol in front of a native engine.

No real SGLang is involved; that the protocol is SGLang's is what docs/serving.md and test_sglang.py are about. What
this shows is that an adapter of that protocol can keep the promises of every engine, weights and memory included.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from safetensors.torch import load_file

from rill.inference.base import Delta, Engine, MemoryLevel, PauseMode, Request
from rill.inference.native.engine import NativeEngine
from rill.inference.server import BackgroundServer, ServerConfig
from rill.inference.sglang import SglangEngine
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import SHAPES, make_engine, reference

_LEVELS = {1: MemoryLevel.KV, 2: MemoryLevel.WEIGHTS, 3: MemoryLevel.GRAPHS}


class SglangOverNative:
    """SGLang's routes; every answer comes from the engine. Log-probabilities are cumulative, as in the 0.5 line."""

    def __init__(self, native: NativeEngine) -> None:
        self.native = native
        self.running: set[str] = set()
        self.app = FastAPI()
        self.app.get("/get_server_info")(self.info)
        for handler in (self.generate, self.abort_request, self.flush_cache, self.pause_generation,
                        self.continue_generation, self.update_weights_from_disk, self.release_memory_occupation,
                        self.resume_memory_occupation):  # fmt: skip
            self.app.post(f"/{handler.__name__}")(handler)

    async def info(self) -> dict[str, Any]:
        return {"context_length": self.native.max_context}

    async def generate(self, http: HttpRequest) -> Response:
        body = await http.json()
        ids = np.array(body["input_ids"], np.int32)
        if not body.get("stream"):
            (scores,) = await asyncio.to_thread(self.native.score, [ids])
            entries = [
                [None if i == 0 else float(s), int(t), None] for i, (s, t) in enumerate(zip(scores, ids))
            ]
            return JSONResponse(
                {"text": "", "meta_info": {"input_token_logprobs": entries, "completion_tokens": 0}}
            )
        request = Request(id=body["rid"], token_ids=ids, sampling=_sampling(body["sampling_params"]))
        return StreamingResponse(self.events(request), media_type="text/event-stream")

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Delta]()
        (future,) = self.native.submit([request], lambda d: loop.call_soon_threadsafe(news.put_nowait, d))
        self.running.add(request.id)
        entries: list[list[Any]] = []
        try:
            reason: StopReason | None = None
            while reason is None:
                delta = await news.get()
                entries += [[float(p), int(t), None] for p, t in zip(delta.logprobs, delta.token_ids)]
                reason = delta.stop_reason
                meta = {
                    "completion_tokens": len(entries),
                    "output_token_logprobs": entries,
                    "finish_reason": None if reason is None else _finish(reason, entries),
                    "cached_tokens": 0
                    if reason is None
                    else (await asyncio.wrap_future(future)).num_cached_tokens,
                }
                yield f"data: {json.dumps({'text': '', 'meta_info': meta})}\n\n".encode()
            yield b"data: [DONE]\n\n"
        finally:
            self.running.discard(request.id)

    async def abort_request(self, http: HttpRequest) -> Response:
        await asyncio.to_thread(self.native.abort, [(await http.json())["rid"]])
        return Response()

    async def flush_cache(self) -> Response:
        if self.running:
            return PlainTextResponse("Flush cache failed.", 400)
        await asyncio.to_thread(self.native.flush)
        return PlainTextResponse("Cache flushed.")

    async def pause_generation(self) -> Any:
        await asyncio.to_thread(self.native.pause, PauseMode.INTERRUPT)
        return {"status": "ok"}

    async def continue_generation(self) -> Any:
        await asyncio.to_thread(self.native.resume)
        return {"status": "ok"}

    async def update_weights_from_disk(self, http: HttpRequest) -> Any:
        body = await http.json()
        tensors = load_file(Path(body["model_path"]) / "model.safetensors")
        version = PolicyVersion(int(body["weight_version"]))
        self.native.rewind()  # SGLang's weight_version is a text, which need not grow
        await asyncio.to_thread(self.native.update_weights, list(tensors.items()), version)
        return {"success": True, "message": "", "num_paused_requests": 0}

    async def release_memory_occupation(self, http: HttpRequest) -> None:
        await asyncio.to_thread(self.native.release, _LEVELS[len((await http.json())["tags"])])

    async def resume_memory_occupation(self) -> None:
        await asyncio.to_thread(self.native.restore)


def _sampling(params: dict[str, Any]) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_k=max(0, params["top_k"]),
        top_p=params["top_p"],
        stop_token_ids=tuple(params["stop_token_ids"]),
        ignore_eos=params["ignore_eos"],
    )


def _finish(reason: StopReason, entries: list[list[Any]]) -> dict[str, Any]:
    if reason is StopReason.LENGTH:
        return {"type": "length", "length": len(entries)}
    if reason is StopReason.ABORTED:
        return {"type": "abort", "message": "Abort by user."}
    return {"type": "stop", "matched": entries[-1][1]}


class TestSglang(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        native = make_engine(check_every_step=False)
        with BackgroundServer(SglangOverNative(native).app, ServerConfig(port=0)) as server:
            model = ModelConfig(shape=SHAPES["llama"])
            adapter = SglangEngine(SglangEngine.Config(url=server.url, model=model, enable_memory_saver=True))
            yield adapter
            adapter.close()
        native.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return reference()
