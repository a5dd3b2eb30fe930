"""What the HTTP adapters share: requests that are cut short and go on, and what an update leaves behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest

from rill.errors import EngineError, StuckError, WeightSyncError
from rill.inference import flight_engine
from rill.inference.base import Completion, Delta, Feature, MemoryLevel, NamedTensors, PauseMode, Request
from rill.inference.remote import Chunk, RemoteConfig, RemoteEngine
from rill.inference.vllm_server import VllmServerEngine
from rill.models.loading import ModelConfig
from rill.types import PolicyVersion, SamplingParams, StopReason


def request(name: str) -> Request:
    return Request(id=name, token_ids=np.array([4, 5], np.int32), sampling=SamplingParams(max_new_tokens=3))


class Scripted(RemoteEngine):
    """Three tokens for everybody, from no server. An update never ends where its sender does not fail."""

    features = frozenset({Feature.STREAM, Feature.UPDATE_WEIGHTS})

    def __init__(self) -> None:
        config = RemoteConfig(type="scripted", url="http://nowhere", api_key_variable="NO_KEY")
        super().__init__(config, "scripted")
        self.max_context = 64
        self.num_streams = 0
        self.token_s, self.end_s = 0.001, 0.0
        self.num_updates = 0

    async def _stream(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.num_streams += 1
        try:
            for token in (7, 8, 9):
                await asyncio.sleep(self.token_s)
                reason = StopReason.LENGTH if token == 9 else None
                yield Chunk(token_ids=[token], logprobs=[-1.0], stop_reason=reason)
        finally:
            await asyncio.shield(asyncio.sleep(self.end_s))

    async def _load_weights(self, tensors: NamedTensors, version: PolicyVersion, partial: bool) -> None:
        self.num_updates += 1
        list(tensors)
        await asyncio.sleep(60)


@pytest.fixture
def engine() -> Iterator[Scripted]:
    engine = Scripted()
    yield engine
    engine.close()


def test_a_request_that_arrives_as_the_others_go_on_is_started_once(engine: Scripted) -> None:
    futures: list[Future[Completion]] = []

    async def go_on_meanwhile() -> None:
        await engine._hold(cut=True)
        arriving = threading.Thread(target=lambda: futures.extend(engine.submit([request("a")])))
        arriving.start()
        arriving.join()  # its start waits for the loop, which is here
        engine._go_on()

    engine._call(go_on_meanwhile(), "race", 5.0)
    assert futures[0].result(5).token_ids.tolist() == [7, 8, 9]
    assert engine.num_streams == 1


def test_an_update_that_was_given_up_leaves_the_engine_unavailable_and_not_silent(
    engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_engine, "MOVE_TIMEOUT_S", 0.1)
    with pytest.raises(StuckError, match="update_weights did not end"):
        engine.update_weights([], PolicyVersion(1))
    with pytest.raises(EngineError, match="update again"):
        engine.submit([request("after")])


def test_an_update_that_is_given_up_before_it_began_does_not_begin_later(
    engine: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.token_s = engine.end_s = 0.5  # the server is slow to let go of it
    (future,) = engine.submit([request("a")])
    monkeypatch.setattr(flight_engine, "MOVE_TIMEOUT_S", 0.1)
    with pytest.raises(StuckError):
        engine.update_weights([], PolicyVersion(1))
    assert future.result(20).token_ids.tolist() == [7, 8, 9]
    assert engine.num_updates == 0


def test_an_update_whose_sender_or_disk_fails_is_a_weight_error_and_not_silence(engine: Scripted) -> None:
    def sender() -> Iterator[tuple[str, Any]]:
        raise OSError("no space left on device")
        yield "never", None

    with pytest.raises(WeightSyncError, match="no space left"):
        engine.update_weights(sender(), PolicyVersion(1))
    with pytest.raises(EngineError, match="no space left.*update again"):
        engine.submit([request("after")])


def test_memory_is_not_released_under_a_request_that_was_only_just_submitted(engine: Scripted) -> None:
    engine.features = engine.features | {Feature.RELEASE_MEMORY}  # type: ignore[misc]
    engine.token_s = 0.2
    with pytest.raises(EngineError, match="1 requests run: pause"):
        futures = engine.submit([request("a")])
        engine.release(MemoryLevel.KV)
    assert futures[0].result(5).token_ids.tolist() == [7, 8, 9]


@pytest.mark.parametrize("method", ["resume", "flush", "pause", "update_weights"])
def test_a_control_call_from_on_delta_is_refused_at_once(engine: Scripted, method: str) -> None:
    args: dict[str, Any] = {"pause": (PauseMode.FINISH,), "update_weights": ([], PolicyVersion(1))}
    errors: list[BaseException] = []

    def on_delta(_: Delta) -> None:
        try:
            getattr(engine, method)(*args.get(method, ()))
        except EngineError as error:
            errors.append(error)

    (future,) = engine.submit([request("a")], on_delta)
    assert future.result(20).token_ids.tolist() == [7, 8, 9] and len(errors) == 3
    assert all("must not block" in str(error) for error in errors)
    engine.resume()


def test_what_goes_on_at_a_server_does_not_draw_the_same_numbers_again() -> None:
    asked: list[dict[str, Any]] = []

    def server(http: httpx.Request) -> httpx.Response:
        if http.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": 64}]})
        asked.append(json.loads(http.content))
        choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}
        return httpx.Response(200, text=f"data: {json.dumps({'choices': [choice]})}\n\n")

    shape = {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16,
             "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
    model = ModelConfig(shape=shape)
    config = VllmServerEngine.Config(url="http://vllm", served_name="m", model=model, is_extended=False)
    engine = VllmServerEngine(config, transport=httpx.MockTransport(server))
    sampling = SamplingParams(max_new_tokens=3, seed=7)
    ids = np.array([4, 5, 6], np.int32)
    for number, count in enumerate((0, 2, 2, 1)):
        engine.generate(
            [Request(id=str(number), token_ids=ids, num_generated=count, sampling=sampling)], 10.0
        )
    assert Feature.UPDATE_WEIGHTS not in engine.features, "only the worker extension can"
    seeds = [body["seed"] for body in asked]
    assert seeds[0] == 7 and seeds[1] == seeds[2] and len(set(seeds)) == 3
    engine.close()
