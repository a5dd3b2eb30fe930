"""The sglang adapter against a server that follows SGLang's HTTP protocol. No real SGLang is involved."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from safetensors.torch import load_file

from rill.errors import EngineError, RequestError, UnsupportedError, WeightSyncError
from rill.inference.base import Feature, MemoryLevel, PauseMode, Request
from rill.inference.parameters import expected_shapes
from rill.inference.server import BackgroundServer, ServerConfig
from rill.inference.sglang import SglangEngine
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.waiting import eventually
from tests.models.tiny_vision import tiny

MODEL = ModelConfig(
    shape={"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16,
           "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256},
    tokenizer="chars",
)  # fmt: skip


CONTROL = (
    "abort_request", "flush_cache", "pause_generation", "continue_generation", "update_weights_from_disk",
    "release_memory_occupation", "resume_memory_occupation",
)  # fmt: skip
FIELDS = {
    "update_weights_from_disk": {"model_path", "load_format", "abort_all_requests", "weight_version", "is_async",
                                 "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "token_step", "flush_cache",
                                 "manifest"},
    "pause_generation": {"mode"}, "continue_generation": {"torch_empty_cache"},
    "release_memory_occupation": {"tags"}, "resume_memory_occupation": {"tags"}, "abort_request": {"rid", "abort_all"},
}  # fmt: skip
"""What its request structures have; the server here refuses anything else, so that a wrong name is found."""
GENERATE = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "rid", "lora_path",
            "extra_key"}  # fmt: skip


class FakeSglang:
    """Token i after prompt p is (p + i) mod 50; the log-probability is -token / 100."""

    def __init__(self, *, is_incremental: bool, is_newer: bool = True, admin_key: str = "") -> None:
        self.is_incremental = is_incremental
        self.is_newer = is_newer
        self.admin_key = admin_key
        self.calls: list[tuple[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.refuse_weights = False
        self.running: dict[str, bool] = {}  # rid -> is it to be aborted
        self.is_paused = False
        self.app = FastAPI()
        self.app.get("/server_info" if is_newer else "/get_server_info")(self.info)
        self.app.post("/generate")(self.generate)
        for path in CONTROL:
            self.app.post(f"/{path}")(self.control)

    @property
    def num_running(self) -> int:
        return len(self.running)

    async def info(self) -> dict[str, Any]:
        return {"context_length": None, "tp_size": 1, "version": "0.5.6", "internal_states": []}

    async def control(self, http: HttpRequest) -> Response:
        content = await http.body()
        body = json.loads(content) if content else None
        name = http.url.path.strip("/")
        self.calls.append((name, body))
        if self.admin_key and http.headers.get("authorization") != f"Bearer {self.admin_key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        assert body is None or body.keys() <= FIELDS[name], (name, body)
        match name:
            case "flush_cache":
                wait_s = float(http.query_params.get("timeout", 0)) if self.is_newer else 0.0
                return await self.flush(wait_s)
            case "abort_request":
                for rid in self.running:
                    self.running[rid] |= body.get("abort_all", False) or rid.startswith(body["rid"])
                return Response(status_code=200)
            case "pause_generation" | "continue_generation":
                assert body.get("mode", "retract") in ("abort", "retract", "in_place")
                self.is_paused = name == "pause_generation"
                return JSONResponse({"message": "Generation …ed successfully.", "status": "ok"})
            case "release_memory_occupation" | "resume_memory_occupation":
                assert not self.running, "it asserts that nothing runs"
                return JSONResponse(None)
            case "update_weights_from_disk":
                return self.load(body)
        return JSONResponse({"success": True, "message": "Succeeded."})

    async def flush(self, wait_s: float) -> Response:
        deadline = time.monotonic() + wait_s
        while self.running and not self.is_paused:
            if time.monotonic() >= deadline:
                return PlainTextResponse("Flush cache failed.\n", 400)
            await asyncio.sleep(0.005)
        return PlainTextResponse("Cache flushed.\nPlease check backend logs for more details.\n")

    def load(self, body: dict[str, Any]) -> Response:
        answer = {"success": not self.refuse_weights, "message": "no", "num_paused_requests": 0}
        if self.refuse_weights:
            return JSONResponse(answer, 400)
        assert self.is_paused or not self.running, "an update can only happen while nothing is processed"
        self.weights = load_file(Path(body["model_path"]) / "model.safetensors")
        return JSONResponse(answer)

    async def generate(self, http: HttpRequest) -> Any:
        body = await http.json()
        assert body.keys() <= GENERATE, body
        ids, params = body["input_ids"], body["sampling_params"]
        if not body.get("stream"):
            if max(ids) >= 50:
                return JSONResponse({"error": {"message": "bad ids"}}, 400)
            entries = [[None if i == 0 else -t / 100, t, None] for i, t in enumerate(ids)]
            return {
                "text": "",
                "output_ids": [],
                "meta_info": {"input_token_logprobs": entries, "completion_tokens": 0},
            }
        return StreamingResponse(self.events(body["rid"], ids, params), media_type="text/event-stream")

    async def events(self, rid: str, ids: list[int], params: dict[str, Any]) -> AsyncIterator[bytes]:
        if max(ids) >= 50 or rid in self.running:  # a stream's refusal comes as an event
            reason = {
                "message": f"Duplicate request ID detected: {rid}",
                "type": "invalid_request_error",
                "code": 400,
            }
            yield f"data: {json.dumps({'error': reason})}\n\ndata: [DONE]\n\n".encode()
            return
        entries: list[list[Any]] = []
        self.running[rid] = False
        try:
            for i in range(params["max_new_tokens"]):
                token = (ids[-1] + 1) % 50
                ids = [*ids, token]
                entries.append([-token / 100, token, None])
                finish = None
                if self.running[rid]:
                    finish = {"type": "abort", "message": "Abort by user."}
                elif token in params["stop_token_ids"]:
                    finish = {"type": "stop", "matched": token}
                elif i + 1 == params["max_new_tokens"]:
                    finish = {"type": "length", "length": i + 1}
                meta = {"id": rid, "prompt_tokens": 2, "completion_tokens": i + 1, "finish_reason": finish,
                        "cached_tokens": 3, "weight_version": "default"}  # fmt: skip
                meta["output_token_logprobs"] = entries[-1:] if self.is_incremental else entries
                event = {"text": "", "output_ids": [token], "meta_info": meta}
                yield f"data: {json.dumps(event)}\n\n".encode()
                if finish is not None:
                    break
                await asyncio.sleep(0.005)
            yield b"data: [DONE]\n\n"
        finally:
            # The scheduler lets go of it a little later than the client.
            asyncio.get_running_loop().call_later(0.02, self.running.pop, rid)


@pytest.fixture(params=[False, True], ids=["older, cumulative", "newer, incremental"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[SglangEngine, FakeSglang]]:
    # The first is as the 0.5 line of October 2025 is, the second as its documentation of 2026 says.
    server = FakeSglang(is_incremental=request.param, is_newer=request.param)
    with BackgroundServer(server.app, ServerConfig(port=0)) as running:
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
    assert names == ["abort_request", "pause_generation", "update_weights_from_disk", "continue_generation"]
    assert server.calls[2][1]["flush_cache"] is True
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
    eventually(lambda: not server.num_running, 5.0, "the server still generates for nobody")


def test_memory_that_is_released_twice_is_given_back_once_and_comes_back_whole(pair: Pair) -> None:
    engine, server = pair
    for level in (MemoryLevel.WEIGHTS, MemoryLevel.KV, MemoryLevel.WEIGHTS, MemoryLevel.GRAPHS):
        engine.release(level)
    engine.restore()
    moves = [(name.partition("_")[0], body["tags"]) for name, body in server.calls if "memory" in name]
    whole = ["kv_cache", "weights", "cuda_graph"]
    assert moves == [("release", whole[:2]), ("release", whole[2:]), ("resume", whole)]
    assert len(engine.generate([ask("after")], 20.0)[0].token_ids) == 10


def test_refusals_and_features(pair: Pair) -> None:
    engine, _ = pair
    engine.vocab_size = None  # so that the server is the one to refuse
    with pytest.raises(RequestError):
        engine.generate([Request(id="bad", token_ids=np.array([99], np.int32))], 20.0)
    with pytest.raises(UnsupportedError):
        engine.score([np.array([1, 2], np.int32)], temperature=0.5)
    assert Feature.SEEDED not in engine.features and Feature.RELEASE_MEMORY in engine.features


def test_aborting_one_request_leaves_those_whose_names_begin_alike(pair: Pair) -> None:
    engine, server = pair
    first, tenth = engine.submit([ask("r-1", 100), ask("r-10", 40)])
    while server.num_running < 2:
        time.sleep(0.005)
    engine.abort(["r-1"])
    assert first.result(5).stop_reason is StopReason.ABORTED
    assert tenth.result(20).stop_reason is StopReason.LENGTH and len(tenth.result().token_ids) == 40


def test_a_request_that_is_resumed_at_once_is_not_taken_for_its_first_attempt(pair: Pair) -> None:
    engine, server = pair
    (future,) = engine.submit([ask("again", 60)])
    for _ in range(3):
        time.sleep(0.03)
        engine.pause(PauseMode.INTERRUPT, 10.0)
        engine.resume()
    assert future.result(20).token_ids.tolist() == [(5 + i) % 50 for i in range(60)]
    engine.flush()
    assert server.calls[-1][0] == "flush_cache"


def test_control_routes_take_the_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeSglang(is_incremental=False, admin_key="boss")
    monkeypatch.setenv("SGLANG_API_KEY", "client")
    with BackgroundServer(server.app, ServerConfig(port=0)) as running:
        engine = SglangEngine(SglangEngine.Config(url=running.url, model=MODEL))
        with pytest.raises(RequestError, match="401"):
            engine.flush()
        engine.close()
        monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "boss")
        engine = SglangEngine(SglangEngine.Config(url=running.url, model=MODEL))
        engine.flush()
        assert len(engine.generate([ask("a")], 20.0)[0].token_ids) == 10
        engine.close()


def test_a_vision_language_model_has_its_sizes_in_its_text_part() -> None:
    def server_info(http: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"context_length": None})

    config = SglangEngine.Config(url="http://nowhere", model=tiny("qwen2_5_vl"))
    with closing(SglangEngine(config, transport=httpx.MockTransport(server_info))) as engine:
        assert (engine.vocab_size, engine.max_context) == (107, 256)
