"""The server's routes over a scripted engine: answers, streams, refusals and administration."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

import rill
from rill.data.tool_calls import SYNTAXES
from rill.inference.base import EngineStats, PauseMode
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.inference.server.text import TextCodec
from rill.models.card import TrainingCard
from rill.models.loading import ModelConfig
from tests.inference.fake_engine import LOGPROB, FakeEngine
from tests.inference.plain_http import http
from tests.inference.waiting import eventually


def start(engine: FakeEngine, **settings: Any) -> BackgroundServer:
    config = ServerConfig(port=0, model_name="tiny", **settings)
    return BackgroundServer(create_app(engine, engine.tokenizer, config), config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(FakeEngine.Config(answer="Hello there"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with start(engine) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def chat(**extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **extra}


def test_chat_answers_with_text_usage_and_reason(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=chat()).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Hello there"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 12


def test_chat_returns_token_ids_logprobs_and_versions(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json=chat(logprobs=True, return_token_ids=True)).json()
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"][0] == 5  # <user>
    assert (
        len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == len(choice["token_versions"]) == 12
    )
    assert choice["logprobs"]["content"][0]["token"] == "H"
    assert {entry["logprob"] for entry in choice["logprobs"]["content"]} == {LOGPROB}


def test_a_stream_gives_the_same_text_as_the_whole_answer(client: httpx.Client) -> None:
    body = chat(stream=True, n=2, stream_options={"include_usage": True}, return_token_ids=True)
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = events(response)
    texts, ids = ["", ""], [[], []]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        ids[choice["index"]] += choice["token_ids"]
    assert texts == ["Hello there"] * 2 and len(ids[0]) == len(ids[1]) == 12
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("stop") == 2


def test_a_stop_string_is_cut_from_the_text_and_never_streamed(client: httpx.Client) -> None:
    whole = client.post("/v1/chat/completions", json=chat(stop=["lo th"])).json()["choices"][0]
    assert whole["message"]["content"] == "Hel" and whole["stop_reason"] == "lo th"
    with client.stream("POST", "/v1/chat/completions", json=chat(stop="lo th", stream=True)) as response:
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(response)) == "Hel"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_the_token_that_ends_an_answer_is_no_text_unless_it_is_asked_for(
    client: httpx.Client, engine: FakeEngine, is_streamed: bool
) -> None:
    def said(**wanted: Any) -> str:
        body = {
            "prompt": "ab",
            "max_tokens": 20,
            "skip_special_tokens": False,
            "stream": is_streamed,
        } | wanted
        response = client.post("/v1/completions", json=body)
        answers = events(response) if is_streamed else [response.json()]
        return "".join(answer["choices"][0]["text"] for answer in answers)

    (o,) = engine.tokenizer.encode("o", add_special_tokens=False)
    assert said() == "Hello there" and said(stop_token_ids=[o]) == "Hell"
    assert said(include_stop_str_in_output=True) == "Hello there<eos>"
    assert said(stop_token_ids=[o], include_stop_str_in_output=True) == "Hello"
    assert said(max_tokens=5) == "Hello"


def test_completions_take_text_lists_and_token_ids(client: httpx.Client) -> None:
    for prompt, num in (("ab", 1), (["ab", "cd"], 2), ([40, 41], 1), ([[40], [41, 42]], 2)):
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5}).json()
        assert [c["text"] for c in answer["choices"]] == ["Hello"] * num
        assert {c["finish_reason"] for c in answer["choices"]} == {"length"}


def test_echo_without_new_tokens_scores_the_prompt(client: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "abc" and choice["logprobs"]["token_logprobs"] == [None, LOGPROB, LOGPROB]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_the_token_route_speaks_verifiers(client: httpx.Client) -> None:
    body = {
        "model": "tiny",
        "token_ids": [40, 41, 42],
        "cache_salt": "step-3",
        "sampling_params": {
            "temperature": 0.7, "top_p": 0.9, "max_tokens": 4, "stop_token_ids": [2], "logprobs": 1,
            "skip_special_tokens": False, "spaces_between_special_tokens": False, "detokenize": False,
        },
    }  # fmt: skip
    headers = {"Authorization": "Bearer anything", "X-Session-ID": "s1"}
    answer = client.post("/inference/v1/generate", json=body, headers=headers).json()
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 4
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"]):
        assert entry["token"] == f"token_id:{token_id}" and entry["logprob"] == LOGPROB
    assert (
        choice["finish_reason"] == "length" and answer["usage"]["prompt_tokens"] == 3 and answer["request_id"]
    )


def test_the_token_route_cuts_max_tokens_to_the_context_and_scores_prompts(client: httpx.Client) -> None:
    body = {"token_ids": [40, 41], "sampling_params": {"max_tokens": 10**6, "prompt_logprobs": 1}}
    answer = client.post("/inference/v1/generate", json=body).json()
    assert answer["prompt_logprobs"] == [None, {"41": {"logprob": LOGPROB}}]


def test_classic_verifiers_tokenizes_and_continues_from_tokens(client: httpx.Client) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
    tokens = client.post("/tokenize", json=body).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4 and tokens["max_model_len"] == 512
    extra = {"tokens": tokens["tokens"], "return_token_ids": True, "logprobs": True}
    answer = client.post("/v1/chat/completions/tokens", json=chat(**extra)).json()
    assert answer["prompt_token_ids"] == tokens["tokens"] and len(answer["choices"][0]["token_ids"]) == 12
    assert (
        client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
        == "<user>hi<assistant>"
    )


def test_models_are_listed_and_found(client: httpx.Client) -> None:
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 512
    assert client.get("/v1/models/none").status_code == 404


def test_a_model_says_how_it_was_trained(engine: FakeEngine, tmp_path: Path) -> None:
    TrainingCard(run="demo-1", workflow="grpo", prompts="bare", example="1+1=").save(tmp_path)
    model, config = ModelConfig(path=str(tmp_path)), ServerConfig(port=0, model_name="tiny")
    app = create_app(engine, engine.tokenizer, config, model=model)  # type: ignore[arg-type]
    with BackgroundServer(app, config) as server:
        card = httpx.get(f"{server.url}/v1/models/tiny", timeout=20).json()
    assert (card["trained"]["prompts"], card["trained"]["example"]) == ("bare", "1+1=")


BAD = [
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", chat(model="other"), 404, "model"),
    ("/v1/chat/completions", chat(temperature="0.5"), 400, "temperature"),
    ("/v1/chat/completions", chat(temperature=-1), 400, "temperature"),
    *(("/v1/completions", {"prompt": "a", name: value}, 400, name)
      for name in ("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty",
                   "frequency_penalty", "seed", "max_tokens", "min_tokens", "n", "priority", "logprobs")
      for value in (True, "1", [1], 10**30, -(10**30), 10**400)),
    *(("/v1/completions", {"prompt": "a", "logit_bias": {"5": value}}, 400, "logit_bias.5")
      for value in (True, "1", 10**30, 10**400)),
    *(("/v1/completions", {"prompt": "a", name: float("nan")}, 400, None) for name in ("temperature", "seed")),
    ("/v1/chat/completions", chat(n=10**9), 400, "n"),
    ("/v1/chat/completions", chat(n=0), 400, "n"),
    ("/v1/chat/completions", chat(max_tokens=10**6), 400, "max_tokens"),
    ("/v1/chat/completions", chat(max_tokens=0), 400, "max_tokens"),
    ("/v1/chat/completions", chat(top_logprobs=5, logprobs=True), 400, "top_logprobs"),
    ("/v1/completions", {"prompt": ["a"] * 200, "max_tokens": 0, "echo": True, "logprobs": 0}, 400, "prompt"),
    ("/v1/chat/completions", chat(logit_bias={"x": 1}), 400, "logit_bias"),
    ("/v1/chat/completions", chat(logit_bias={"99999": 1}), 400, None),
    ("/v1/chat/completions", chat(response_format={"type": "json_object"}), 400, "response_format"),
    ("/v1/chat/completions", chat(tool_choice="required"), 400, "tool_choice"),
    ("/v1/chat/completions", chat(chat_template="{{ 1 }}"), 400, "chat_template"),
    ("/v1/chat/completions", chat(stop=[""]), 400, "stop"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": [10**6]}, 400, None),
    ("/v1/completions", {"prompt": [-1]}, 400, None),
    ("/v1/completions", {"prompt": "a" * 600}, 400, "messages"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "guided_json": {}}, 400, "guided_json"),
    ("/v1/completions", {"prompt": "a", "temprature": 0}, 400, "temprature"),
    ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {}, "regex": "a"}}, 400, "structured_outputs"),
    ("/v1/chat/completions", chat(response_format={"type": "json_schema"}), 400, "response_format"),
    ("/v1/embeddings", {"input": "a"}, 400, "model"),
    ("/abort_requests", {"request_ids": []}, 400, "request_ids"),
    ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids"),
    ("/inference/v1/generate", {"token_ids": [2**40]}, 400, None),
    ("/inference/v1/generate", {"token_ids": [5], "features": {"image": "…"}}, 400, "features"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
    ("/update_weights", {"weight_dir": "/no/such\x00folder"}, 400, None),
    ("/update_weights", {}, 400, "weight_dir"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_malformed_requests_get_an_openai_error(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    response = client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"\xff\xfe", b'{"messages": NaN}', b"[" * 100_000])
def test_bodies_that_are_not_json_objects_are_refused(client: httpx.Client, content: bytes) -> None:
    response = client.post(
        "/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_tool_calls_are_taken_out_of_the_text() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    engine = FakeEngine(FakeEngine.Config(answer=f"Let me see. {call}\n{call}"))
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with start(engine) as server, httpx.Client(base_url=server.url, timeout=20) as client:
        choice = client.post("/v1/chat/completions", json=chat(tools=tools)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Let me see. "
        functions = [c["function"] for c in choice["message"]["tool_calls"]]
        assert functions == [{"name": "add", "arguments": '{"a": 1}'}] * 2
        with client.stream("POST", "/v1/chat/completions", json=chat(tools=tools, stream=True)) as response:
            deltas = [c["choices"][0]["delta"] for c in events(response)]
        assert "".join(d.get("content") or "" for d in deltas).strip() == "Let me see."
        told = [c for d in deltas for c in d.get("tool_calls", [])]
        for index in (0, 1):
            parts = [c["function"] for c in told if c["index"] == index]
            assert parts[0]["name"] == "add" and not any("name" in part for part in parts[1:])
            assert json.loads("".join(part["arguments"] for part in parts)) == {"a": 1}
        choice = client.post("/v1/chat/completions", json=chat(tools=tools, tool_choice="none")).json()[
            "choices"
        ][0]
        assert "tool_calls" not in choice["message"] and "<tool_call>" in choice["message"]["content"]
    engine.close()


def test_weights_come_from_a_folder_and_versions_grow(
    engine: FakeEngine, client: httpx.Client, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    before = engine.version
    answer = client.post("/update_weights", json={"weight_dir": str(tmp_path)})
    assert answer.json() == {"status": "ok", "version": before + 1}
    assert engine.updates[-1] == {"a": (2, 3), "b": (4,)}
    assert client.post("/update_weights", json={"weight_dir": str(tmp_path), "version": 0}).status_code == 409
    assert client.get("/health").status_code == client.get("/ping").status_code == 200, "it touches nothing"
    assert (
        client.post("/update_weights", json={"weight_dir": str(tmp_path), "version": 9}).json()["version"]
        == 9
    )
    assert client.get("/health").json() == {"status": "ok", "version": 9, "replicas": 1.0}


def test_a_server_without_a_live_replica_is_not_healthy(
    engine: FakeEngine, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "stats", lambda: EngineStats(extra={"replicas": 0.0}))
    answer = client.get("/health")
    assert answer.status_code == 503 and answer.json()["status"] == "no replica"


def test_pause_sleep_wake_resume_and_flush_reach_the_engine(engine: FakeEngine, client: httpx.Client) -> None:
    engine.calls.clear()
    assert client.post("/pause").json() == {"status": "paused"}
    assert client.post("/sleep", json={"level": "kv"}).status_code == 200
    assert client.get("/health").status_code == 503
    assert client.post("/resume").status_code == 409
    for path in ("/wake", "/resume", "/flush_cache"):
        assert client.post(path).status_code == 200
    assert engine.calls == ["pause interrupt", "release kv", "restore", "resume", "flush"]
    assert client.post("/pause", json={"mode": "nonsense"}).status_code == 400


def test_metrics_count_requests_and_tokens(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=chat())
    text = client.get("/metrics").text
    assert 'rill_responses_total{route="/v1/chat/completions",status="200"}' in text
    assert "rill_engine_policy_version" in text and 'rill_request_seconds_bucket{le="+Inf"}' in text
    assert client.get("/metrics/../../etc/passwd").status_code == 404


SAMPLE = re.compile(r'([a-z_]+)(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? -?[0-9.e+-]+$')


def test_metrics_follow_prometheus_text_format(client: httpx.Client) -> None:
    client.post("/v1/chat/completions", json=chat(stream=True))
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    types: dict[str, str] = {}
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in types and (kind != "counter" or name.endswith("_total"))
            types[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.fullmatch(line)
            assert found, line
            base = re.sub("_(bucket|sum|count)$", "", found[1])
            assert found[1] in types or types[base] == "histogram", line
    expected = {
        "rill_responses_total", "rill_generated_tokens_total", "rill_in_flight", "rill_request_seconds",
        "rill_first_token_seconds", "rill_engine_running", "rill_engine_free_kv_blocks",
    }  # fmt: skip
    assert expected <= types.keys()


def test_client_and_admin_keys_open_their_own_doors_only() -> None:
    engine = FakeEngine(FakeEngine.Config(answer="ok"))
    with start(engine, api_keys=["client-key"], admin_key="admin-key") as server:

        def code(path: str, key: str | None, **body: Any) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return http.post(server.url + path, json=body, headers=headers).status_code

        assert code("/v1/chat/completions", None, **chat()) == 401
        assert code("/v1/chat/completions", "wrong", **chat()) == 401
        assert code("/v1/chat/completions", "admin-key", **chat()) == 401
        assert code("/v1/chat/completions", "client-key", **chat()) == 200
        assert code("/pause", None) == 401
        assert code("/pause", "client-key") == 403
        assert code("/pause", "admin-key") == 200
        assert code("/resume", "admin-key") == 200
        assert http.get(server.url + "/health").status_code == 200
    engine.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.example"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_without_an_admin_key_neither_a_proxy_nor_a_web_page_administers(
    client: httpx.Client, headers: dict[str, str]
) -> None:
    assert client.post("/flush_cache", headers=headers).status_code == 403
    assert client.post("/flush_cache").status_code == 200


def test_a_request_is_aborted_by_its_own_caller_and_by_nobody_else() -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.01))
    with start(engine, api_keys=["mine", "other"]) as server, ThreadPoolExecutor(1) as pool:
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("mine", "other"))
        body = {"prompt": "ab", "max_tokens": 400, "request_id": "long"}
        answer = pool.submit(http.post, f"{server.url}/v1/completions", json=body, headers=mine, timeout=30)
        while not engine.stats().num_running:
            time.sleep(0.01)
        names = {"request_ids": ["long", "nobody"]}
        url = f"{server.url}/abort_requests"
        assert http.post(url, json=names, headers=other).json()["aborted"] == 0
        assert http.post(url, json=names, headers=mine).json()["aborted"] == 1
        choice = answer.result(30).json()["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert http.post(url, json=names, headers=mine).json()["aborted"] == 0
    engine.close()


def test_clients_that_leave_while_the_engine_is_busy_do_not_make_it_look_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, is_free = FakeEngine(FakeEngine.Config(step_s=0.01)), threading.Event()
    monkeypatch.setattr(engine, "abort", lambda ids=None: is_free.wait(30))  # as in the middle of an update
    with start(engine) as server:
        for index in range(40):  # more than the default executor has threads
            with pytest.raises(httpx.TimeoutException):
                http.post(
                    f"{server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 400}, timeout=0.05
                )
            if index % 10 == 0:
                assert http.get(f"{server.url}/liveness").status_code == 200
        assert http.get(f"{server.url}/liveness", timeout=4).status_code == 200
        is_free.set()
    monkeypatch.undo()
    engine.close()


def test_a_long_prompt_does_not_keep_answers_from_being_written(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is encoded, the loop decodes others' tokens."""
    codec = TextCodec(engine.tokenizer)
    begun, go_on = threading.Event(), threading.Event()
    encode = type(engine.tokenizer).encode

    def slow(self: Any, text: str, **options: Any) -> list[int]:
        if len(text) > 8192:
            begun.set()
            assert go_on.wait(20)
        return encode(self, text, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(type(engine.tokenizer), "encode", slow)

    async def both() -> None:
        long = asyncio.ensure_future(codec.encode("a" * 9000, add_special_tokens=False))
        await asyncio.to_thread(begun.wait, 20)
        assert codec.decode([40, 41]) and await codec.encode("abc", add_special_tokens=False)
        go_on.set()
        assert len(await long) == 9000

    asyncio.run(both())


def test_the_version_is_told(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": rill.__version__}


def test_every_syntax_of_tool_calls_that_is_read_can_be_named() -> None:
    for name in SYNTAXES:
        assert ServerConfig(tool_syntax=name).tool_syntax == name  # type: ignore[arg-type]


def test_an_admin_key_that_is_also_a_client_key_is_refused() -> None:
    with pytest.raises(ValueError, match="admin_key"):
        ServerConfig(api_keys=["same"], admin_key="same")  # type: ignore[list-item,arg-type]


def test_the_api_describes_itself_and_refuses_other_paths_methods_and_types(client: httpx.Client) -> None:
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
    assert "/openapi.json" in client.get("/docs").text
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    wrong = client.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and wrong.json()["error"]
    # What a web page can send to a server on its reader's machine without asking.
    headers = {"Content-Type": "text/plain"}
    shouted = {"Content-Type": "Application/JSON"}
    assert client.post("/v1/completions", content=b'{"prompt": "a"}', headers=shouted).status_code == 200
    plain = client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert plain.status_code == 400 and "application/json" in plain.json()["error"]["message"]


def test_size_and_concurrency_limits() -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.1))
    with start(engine, max_body_bytes=2000, max_concurrent=1) as server:
        url = server.url + "/v1/completions"
        assert http.post(url, json={"prompt": "a" * 3000}).status_code == 413
        chunked = (b"x" * 500 for _ in range(10))
        assert (
            http.post(url, content=chunked, headers={"Content-Type": "application/json"}).status_code == 413
        )
        short = {"prompt": "a", "max_tokens": 1}
        with http.stream("POST", url, json=short | {"max_tokens": 400, "stream": True}) as first:
            lines = first.iter_lines()
            assert "choices" in next(lines)
            refused = http.post(url, json=short)
            assert refused.status_code == 429, refused.text
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "too_many_requests"
        eventually(lambda: http.post(url, json=short).status_code == 200, wait_s=30.0)
    engine.close()


def test_a_request_beyond_its_deadline_is_aborted_and_gets_408() -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.05))
    with start(engine, request_timeout_s=0.2) as server:
        body = {"prompt": "a", "max_tokens": 400}
        assert http.post(server.url + "/v1/completions", json=body).status_code == 408
        with http.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}) as response:
            assert events(response)[-1]["error"]["type"] == "timeout_error"
        eventually(lambda: engine.stats().num_running == 0)
    engine.close()


def test_a_client_that_leaves_has_its_requests_aborted() -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.02))
    with start(engine) as server:
        body = {"prompt": "a", "max_tokens": 400, "n": 3}
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + "/v1/completions", json=body, timeout=0.3)
        eventually(lambda: engine.stats().num_running == 0)
        with http.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}) as response:
            next(response.iter_lines())
        eventually(lambda: engine.stats().num_running == 0)
        assert http.get(server.url + "/metrics").text.count("rill_in_flight 0\n") == 1
    engine.close()


@pytest.mark.parametrize("look_s", [0.05, 60.0])
def test_a_client_that_leaves_is_noticed_at_once_and_nobody_else_is(
    monkeypatch: pytest.MonkeyPatch, look_s: float
) -> None:
    monkeypatch.setattr("rill.inference.server.generation._LOOK_INTERVAL_S", look_s)
    engine = FakeEngine()
    engine.pause(PauseMode.INTERRUPT)
    body = {"token_ids": [8, 9], "sampling_params": {"max_tokens": 40}}
    with start(engine) as server, ThreadPoolExecutor(1) as pool:
        stays = pool.submit(http.post, server.url + "/inference/v1/generate", json=body)
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + "/inference/v1/generate", json=body, timeout=0.5)
        eventually(lambda: engine.stats().num_running == 1, 1.0)
        time.sleep(0.2)  # looked at again, and again
        engine.resume()
        assert stays.result().status_code == 200
        assert "rill_aborted_total 1\n" in http.get(server.url + "/metrics").text
    engine.close()


def test_before_its_first_token_a_stream_is_refused_by_status_and_forgotten_with_its_client() -> None:
    engine = FakeEngine()
    engine.pause(PauseMode.INTERRUPT)
    with start(engine, request_timeout_s=0.5) as server:
        body = {"prompt": "a", "max_tokens": 40, "stream": True}
        late = http.post(server.url + "/v1/completions", json=body)
        assert late.status_code == 408 and late.json()["error"]["type"] == "timeout_error"
        eventually(lambda: engine.stats().num_running == 0)
        with pytest.raises(httpx.ReadTimeout):
            http.post(server.url + "/v1/completions", json=body, timeout=0.2)
        eventually(lambda: engine.stats().num_running == 0)
        assert http.get(server.url + "/metrics").text.count("rill_in_flight 0\n") == 1
    engine.close()


def test_a_drain_ends_what_runs_refuses_what_comes_and_stops() -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.02))
    server = start(engine)
    codes: list[int] = []

    def ask() -> None:
        codes.append(
            http.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 40}).status_code
        )

    thread = threading.Thread(target=ask)
    with httpx.Client(base_url=server.url) as kept:
        kept.get("/health")
        thread.start()
        eventually(lambda: engine.stats().num_running == 1)
        server.drain()
        eventually(lambda: kept.get("/health").status_code == 503)
        refused = kept.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
    thread.join(10)
    assert codes == [200]
    eventually(lambda: not server.is_running, 10)
    engine.close()


def test_a_second_signal_ends_a_drain_at_once() -> None:
    engine = FakeEngine(FakeEngine.Config(step_s=0.1))
    server = start(engine)
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": "a", "max_tokens": 400}
        asked = pool.submit(http.post, f"{server.url}/v1/completions", json=body, timeout=60)
        eventually(lambda: engine.stats().num_running == 1)
        server._server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: http.get(f"{server.url}/health").status_code == 503)
        server._server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: not server.is_running, 4.0)
        assert asked.exception(10) is not None or asked.result().status_code >= 500
        eventually(lambda: engine.stats().num_running == 0)
    engine.close()


def test_texts_that_are_scored_keep_neither_a_health_check_nor_the_end_of_a_drain_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, is_free = FakeEngine(), threading.Event()
    scores = engine.score
    monkeypatch.setattr(engine, "score", lambda *args, **options: is_free.wait(60) and scores(*args))
    app = create_app(engine, engine.tokenizer, ServerConfig())  # type: ignore[arg-type]
    server = BackgroundServer(app, ServerConfig(port=0, drain_timeout_s=0.1))
    monkeypatch.setattr(server._server.config, "timeout_graceful_shutdown", 0.1)
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 0}
    count = 40  # more than the default executor has threads
    with ThreadPoolExecutor(count) as clients:
        for _ in range(count):
            clients.submit(http.post, f"{server.url}/v1/completions", json=body)
        try:
            eventually(lambda: app.state.admission.num_in_flight == count, 30)
            assert http.get(f"{server.url}/health", timeout=30).status_code == 200
            server.drain()
            eventually(lambda: not server.is_running, 30)
        finally:
            is_free.set()
    engine.close()
