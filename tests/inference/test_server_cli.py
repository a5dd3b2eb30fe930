"""`rill serve` as a person runs it: a folder, an address, the official client, SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from typer.testing import CliRunner

from rill.cli.main import app
from rill.cli.serving import build_config
from rill.errors import ConfigError, UserError
from rill.inference.server import ServerConfig, bind
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.models.lora import LoRAConfig, add_lora, save_adapter
from rill.telemetry.run import Run
from tests.inference.plain_http import http
from tests.inference.scripted_model import write_scripted_model
from tests.inference.serve_process import rill_serve
from tests.inference.waiting import eventually

SHAPE = {
    "model_type": "qwen2", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ASK: dict[str, Any] = {
    "model": "scripted", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 100,
}  # fmt: skip
LONG = {"prompt": "abc", "max_tokens": 600, "ignore_eos": True}


@pytest.mark.timeout(400)
def test_a_process_answers_the_official_client_and_drains(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    folder = write_scripted_model(tmp_path / "scripted", f"Sure. {CALL}", num_prompt_tokens=4)
    with rill_serve(folder, "engine.num_kv_blocks=256", "server.stream_interval_s=0") as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        assert [card.id for card in client.models.list()] == ["scripted"]
        _chat_and_stream(client)
        _tools(client)
        _ends_after_what_runs(process, url)


def _chat_and_stream(client: Any) -> None:
    whole = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == f"Sure. {CALL}" and whole.choices[0].finish_reason == "stop"
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries[:-1]) == f"Sure. {CALL}"
    assert all(entry.logprob > -0.1 and entry.top_logprobs[0].token == entry.token for entry in entries)
    assert whole.usage.prompt_tokens == 4 and whole.usage.completion_tokens == len(entries)
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == f"Sure. {CALL}"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5, "the answer came in one piece"


def _tools(client: Any) -> None:
    choice = client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Sure. "
    history = [*ASK["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
    assert client.chat.completions.create(**ASK | {"messages": history}, tools=TOOLS).choices
    with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.name == "add" and final.finish_reason == "tool_calls"


def _ends_after_what_runs(process: subprocess.Popen[str], url: str) -> None:
    """SIGTERM in the middle of a request: that one is answered whole, the next is refused, the process ends well."""
    codes: list[tuple[int, int]] = []

    def ask() -> None:
        answer = http.post(f"{url}/v1/completions", json=LONG, timeout=60)
        codes.append((answer.status_code, answer.json()["usage"]["completion_tokens"]))

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: "rill_in_flight 1\n" in http.get(f"{url}/metrics", timeout=30).text)
    process.send_signal(signal.SIGTERM)
    asking.join(60)
    assert codes == [(200, 600)] and process.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        http.get(f"{url}/health", timeout=5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_answer_take_weights_and_drain(tmp_path: Path) -> None:
    model = ModelConfig(shape=SHAPE, tokenizer="chars")
    load_model(model, dtype=torch.float32).save_pretrained(tmp_path)
    load_tokenizer(model).save_pretrained(tmp_path)
    first = f"adapters.first={_write_adapter(tmp_path / 'first', 1)}"
    settings = ("--replicas", "2", "engine.num_kv_blocks=512", first)
    with rill_serve(tmp_path, *settings, environment={"RILL_ADMIN_KEY": "adm"}) as (process, url):
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "max_tokens": 8, "seed": 3, "return_token_ids": True}
        first = http.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
        assert len(first["token_ids"]) <= 8 and set(first["token_versions"]) == {0}
        assert http.post(f"{url}/reload_weights", timeout=60).status_code == 401
        update = http.post(f"{url}/reload_weights", headers={"Authorization": "Bearer adm"}, timeout=60)
        assert update.json() == {"status": "ok", "version": 1}
        again = http.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
        assert again["token_ids"] == first["token_ids"] and set(again["token_versions"]) == {1}
        assert http.get(f"{url}/health", timeout=60).json()["replicas"] == 2.0
        _adapters(url, tmp_path)
        _ends_after_what_runs(process, url)


def _write_adapter(folder: Path, seed: int) -> Path:
    adapted, config = load_model(ModelConfig(shape=SHAPE), dtype=torch.float32), LoRAConfig(rank=4, seed=seed)
    add_lora(adapted, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    save_adapter(adapted.named_parameters(), config, folder, base_model="tiny")
    return folder


def _adapters(url: str, tmp_path: Path) -> None:
    """One came with the command line, one comes now; both replicas answer for both, and for the model itself."""
    load = {"lora_name": "second", "lora_path": str(_write_adapter(tmp_path / "second", 2))}
    admin = {"Authorization": "Bearer adm"}
    answer = http.post(f"{url}/v1/load_lora_adapter", json=load, headers=admin, timeout=60)
    names = [tmp_path.name, "first", "second"]
    assert answer.json() == {"status": "ok", "models": names}
    assert [card["id"] for card in http.get(f"{url}/v1/models", timeout=60).json()["data"]] == names
    texts = {
        (name, prompt): http.post(
            f"{url}/v1/completions",
            json={"model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True},
            timeout=60,
        ).json()["choices"][0]["text"]
        for name in names
        for prompt in ("abc", "xyz", "123", "a b")
    }
    assert len(set(texts.values())) > 8, texts


def test_settings_reach_engine_server_and_router(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RILL_API_KEYS", "a,b")
    config = build_config(
        str(tmp_path),
        ["engine.block_size=32", "server.max_samples=4", "router.load_gap=1"],
        port=1,
        num_replicas=3,
    )
    assert config.engine.model_dump()["block_size"] == 32 and config.router.num_replicas == 3
    assert config.server.max_samples == 4 and len(config.server.api_keys) == 2
    assert (
        config.server.model_name == tmp_path.name
        and "a" not in repr(config.server.api_keys).replace("*", "")[-3:]
    )
    with pytest.raises(ConfigError, match="max_sample"):
        build_config(str(tmp_path), ["server.max_sample=4"])
    with pytest.raises(ConfigError, match="not KEY=VALUE"):
        build_config(str(tmp_path), ["nonsense"])


def test_a_run_stands_for_the_model_it_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("mine")
    run.close()
    with pytest.raises(UserError, match="has left no model yet"):
        build_config("mine", [])
    (run.path / "model").mkdir()
    for name in ("mine", "runs/mine"):
        config = build_config(name, [])
        assert config.engine.model_dump()["model"]["path"] == "runs/mine/model"
        assert config.server.model_name == "mine"


def test_a_port_in_use_is_one_line_before_the_model_is_loaded() -> None:
    """Also one that another `rill serve` has taken and does not answer on yet, because its model still loads."""
    with bind(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "no/such/model", "--port", str(port)], prog_name="rill")
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), done.output
    assert done.stderr == (
        f"error: port {port} of 127.0.0.1 is taken by another process: stop that one, or choose another port "
        "(0 picks a free one)\n"
    )
    with pytest.raises(ConfigError, match=r"no\.such\.host.* cannot be listened on"):
        bind(ServerConfig(host="no.such.host.invalid", port=0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_of_a_replica_costs_no_answer_and_it_comes_back(tmp_path: Path) -> None:
    """Streams and plain requests run on both replicas when one process is killed: every answer is the one it would have
    been, the server says meanwhile that one is missing, and then there are two again, with the weights of the other."""
    model = ModelConfig(shape=SHAPE, tokenizer="chars")
    load_model(model, dtype=torch.float32).save_pretrained(tmp_path)
    load_tokenizer(model).save_pretrained(tmp_path)
    settings = (
        "--replicas",
        "2",
        "engine.num_kv_blocks=512",
        "router.health_interval_s=0.5",
        "router.load_gap=0",
    )
    with rill_serve(tmp_path, *settings) as (process, url):
        assert http.post(f"{url}/reload_weights", timeout=60).json()["version"] == 1
        bodies = [
            {"prompt": "abc" + "xyz"[i % 3] * i, "max_tokens": 2000, "ignore_eos": True, "seed": i,
             "stream": i % 2 == 0, "return_token_ids": True}
            for i in range(8)
        ]  # fmt: skip
        expected = [_tokens(url, body) for body in bodies]
        found: dict[int, list[int]] = {}
        asking = [
            threading.Thread(target=lambda i=i, body=body: found.update({i: _tokens(url, body)}))
            for i, body in enumerate(bodies)
        ]
        for thread in asking:
            thread.start()
        eventually(lambda: "rill_in_flight 8\n" in http.get(f"{url}/metrics", timeout=30).text)
        time.sleep(0.3)
        victim, *others = _replica_pids(process.pid)
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: http.get(f"{url}/health", timeout=30).json()["replicas"] == 1.0)
        for thread in asking:
            thread.join(120)
        assert [found.get(i) for i in range(8)] == expected
        retried = re.search(
            r"^rill_engine_extra_retried (\S+)", http.get(f"{url}/metrics", timeout=30).text, re.M
        )
        assert retried is not None and float(retried[1]) >= 1
        eventually(lambda: http.get(f"{url}/health", timeout=30).json()["replicas"] == 2.0, 240)
        assert set(others) < set(_replica_pids(process.pid)) and victim not in _replica_pids(process.pid)
        both = [_tokens(url, body | {"seed": 100 + i}) for i, body in enumerate(bodies * 2)]
        assert len(both) == 16 and http.get(f"{url}/health", timeout=30).json()["version"] == 1


def _tokens(url: str, body: dict[str, Any]) -> list[int]:
    """The answer's token ids, however it came; every one of version 1."""
    if not body["stream"]:
        choice = http.post(f"{url}/v1/completions", json=body, timeout=200).json()["choices"][0]
        assert set(choice["token_versions"]) == {1}
        return list(choice["token_ids"])
    ids: list[int] = []
    with http.stream("POST", f"{url}/v1/completions", json=body, timeout=200) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                assert set(choice["token_versions"]) <= {1}
                ids += choice["token_ids"]
    return ids


def _replica_pids(parent: int) -> list[int]:
    """The processes under the server that have loaded a model; the runtime's own have not."""
    found = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):
            if any("libtorch" in entry.path for entry in child.memory_maps()):
                found.append(child.pid)
    return found
