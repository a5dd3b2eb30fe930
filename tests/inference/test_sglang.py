"""The sglang adapter against a server that follows SGLang's HTTP protocol. No real SGLang is involved."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse
from safetensors.torch import load_file

from rill.errors import EngineError, RequestError, UnsupportedError, WeightSyncError
from rill.inference.base import Feature, MemoryLevel, PauseMode, Request
from rill.inference.parameters import expected_shapes
from rill.inference.server import ServerConfig, serve_in_thread
from rill.inference.sglang import SglangEngine
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion, SamplingParams, StopReason

MODEL = ModelConfig(
    shape={"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16,
           "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256},
    tokenizer="chars",
)  # fmt: skip


class FakeSglang:
    """Token i after prompt p is (p + i) mod 50; the log-probability is -token / 100."""

    def __init__(self, *, is_incremental: bool) -> None:
        self.is_incremental = is_incremental
        self.calls: list[tuple[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.refuse_weights = False
        self.num_running = 0
        self.app = FastAPI()
        self.app.get("/get_server_info")(self.info)
        self.app.post("/generate")(self.generate)
        for path in ("abort_request", "flush_cache", "pause_generation", "continue_generation",
                     "update_weights_from_disk", "update_weights_from_distributed", "init_weights_update_group",
                     "release_memory_occupation", "resume_memory_occupation"):  # fmt: skip
            self.app.post(f"/{path}")(self.control)

    async def info(self) -> dict[str, Any]:
        return {"context_length": None, "tp_size": 1}

    async def control(self, http: HttpRequest) -> JSONResponse:
        content = await http.body()
        body = json.loads(content) if content else None
        name = http.url.path.strip("/")
        self.calls.append((name, body))
        if name == "update_weights_from_disk":
            if self.refuse_weights:
                return JSONResponse({"success": False, "message": "no"}, 400)
            self.weights = load_file(Path(body["model_path"]) / "model.safetensors")
        return JSONResponse({"success": True, "message": "ok"})

    async def generate(self, http: HttpRequest) -> Any:
        body = await http.json()
        ids, params = body["input_ids"], body["sampling_params"]
        if max(ids) >= 50:
            return JSONResponse({"error": {"message": "bad ids"}}, 400)
        if not body.get("stream"):
            entries = [[None if i == 0 else -t / 100, t, None] for i, t in enumerate(ids)]
            return {"text": "", "meta_info": {"input_token_logprobs": entries, "completion_tokens": 0}}
        return StreamingResponse(self.events(ids, params), media_type="text/event-stream")

    async def events(self, ids: list[int], params: dict[str, Any]) -> AsyncIterator[bytes]:
        entries: list[list[Any]] = []
        self.num_running += 1
        try:
            for i in range(params["max_new_tokens"]):
                token = (ids[-1] + 1) % 50
                ids = [*ids, token]
                entries.append([-token / 100, token, None])
                finish = None
                if token in params["stop_token_ids"]:
                    finish = {"type": "stop", "matched": token}
                elif i + 1 == params["max_new_tokens"]:
                    finish = {"type": "length", "length": i + 1}
                meta = {"completion_tokens": i + 1, "finish_reason": finish, "cached_tokens": 3}
                meta["output_token_logprobs"] = entries[-1:] if self.is_incremental else entries
                yield f"data: {json.dumps({'text': '', 'meta_info': meta})}\n\n".encode()
                if finish is not None:
                    break
                await asyncio.sleep(0.005)
            yield b"data: [DONE]\n\n"
        finally:
            self.num_running -= 1


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SglangEngine, FakeSglang]]:
    server = FakeSglang(is_incremental=request.param)
    with serve_in_thread(server.app, ServerConfig(port=0)) as running:
        engine = SglangEngine(SglangEngine.Config(url=running.url, model=MODEL, enable_memory_saver=True))
        yield engine, server
        engine.close()


def ask(name: str, length: int = 10, **sampling: Any) -> Request:
    params = SamplingParams(max_new_tokens=length, **sampling)
    return Request(id=name, token_ids=np.array([3, 4], np.int32), sampling=params)


Pair = tuple[SglangEngine, FakeSglang]


def test_tokens_and_logprobs_in_order(pair: Pair) -> None:
    engine, _ = pair
    (completion,) = engine.generate([ask("a")], 20.0)
    assert completion.token_ids.tolist() == list(range(5, 15))
    assert np.allclose(completion.logprobs, -np.arange(5, 15) / 100)
    assert completion.stop_reason is StopReason.LENGTH and completion.num_cached_tokens == 3
    (stopped,) = engine.generate([ask("b", stop_token_ids=(8,))], 20.0)
    assert stopped.stop_reason is StopReason.STOP and stopped.token_ids.tolist() == [5, 6, 7, 8]
    assert engine.max_context == 256
    scores = engine.score([np.array([7, 9], np.int32)])
    assert np.allclose(scores[0], [0.0, -0.09])


def test_an_update_cuts_requests_short_and_they_go_on_under_the_new_version(pair: Pair) -> None:
    engine, server = pair
    (future,) = engine.submit([ask("long", 100)])
    while engine.stats().num_generated_tokens < 5:
        time.sleep(0.005)
    weights = [(name, torch.full(shape, 0.5)) for name, shape in expected_shapes(MODEL).items()]
    engine.update_weights(weights, PolicyVersion(4))
    completion = future.result(20)
    assert completion.token_ids.tolist() == [(5 + i) % 50 for i in range(100)]
    versions = completion.versions.tolist()
    assert versions == sorted(versions) and set(versions) == {0, 4} and engine.version == 4
    assert server.weights.keys() == dict(weights).keys()
    names = [name for name, _ in server.calls]
    assert names == ["abort_request", "pause_generation", "update_weights_from_disk", "continue_generation",
                     "flush_cache"]  # fmt: skip
    assert server.calls[1][1] == {"mode": "retract"} and server.calls[2][1]["weight_version"] == "4"
    assert not Path(server.calls[2][1]["model_path"]).exists()


def test_bad_weights_never_reach_the_server_and_refused_ones_close_the_engine(pair: Pair) -> None:
    engine, server = pair
    whole = [(name, torch.zeros(shape)) for name, shape in expected_shapes(MODEL).items()]
    with pytest.raises(WeightSyncError, match="missing"):
        engine.update_weights(whole[1:], PolicyVersion(1))
    assert not server.weights
    with pytest.raises(EngineError):
        engine.submit([ask("x")])
    server.refuse_weights = True
    with pytest.raises(WeightSyncError):
        engine.update_weights(whole, PolicyVersion(1))
    server.refuse_weights = False
    engine.update_weights(whole, PolicyVersion(1))
    assert engine.generate([ask("x")], 20.0)[0].versions.tolist() == [1] * 10
    with pytest.raises(WeightSyncError, match="not newer"):
        engine.update_weights(whole, PolicyVersion(1))


def test_pause_abort_and_memory(pair: Pair) -> None:
    engine, server = pair
    (future,) = engine.submit([ask("p", 200)])
    time.sleep(0.1)
    engine.pause(PauseMode.INTERRUPT, 10.0)
    assert not future.done()
    engine.release(MemoryLevel.WEIGHTS)
    engine.restore()
    assert ("release_memory_occupation", {"tags": ["kv_cache", "weights"]}) in server.calls
    assert ("resume_memory_occupation", {"tags": ["kv_cache", "weights"]}) in server.calls
    engine.resume()
    time.sleep(0.05)
    engine.abort()
    assert future.result(5).stop_reason is StopReason.ABORTED
    deadline = time.monotonic() + 5
    while server.num_running:
        assert time.monotonic() < deadline, "the server still generates for nobody"
        time.sleep(0.02)


def test_groups_refusals_and_features(pair: Pair) -> None:
    engine, server = pair
    engine.init_weights_group(master_address="h", master_port=1, rank_offset=1, world_size=2, name="g")
    engine.update_from_group(
        names=["a"], dtypes=["float32"], shapes=[[2]], name="g", version=PolicyVersion(2)
    )
    assert engine.version == 2 and "update_weights_from_distributed" in [name for name, _ in server.calls]
    engine.vocab_size = None  # so that the server is the one to refuse
    with pytest.raises(RequestError):
        engine.generate([Request(id="bad", token_ids=np.array([99], np.int32))], 20.0)
    with pytest.raises(UnsupportedError):
        engine.score([np.array([1, 2], np.int32)], temperature=0.5)
    assert Feature.SEEDED not in engine.features and Feature.RELEASE_MEMORY in engine.features
