"""`rill serve` as a person runs it: a folder, a port, requests, SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from rill.cli.serve import build_config
from rill.errors import ConfigError
from rill.models.loading import ModelConfig, load_model, load_tokenizer

SHAPE = {
    "model_type": "qwen2", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ModelConfig(shape=SHAPE, tokenizer="chars")
    folder = tmp_path_factory.mktemp("model")
    load_model(model, dtype=torch.float32).save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rill.cli.main", "serve", str(folder), "--port", str(port), "--replicas", "2",
               "engine.num_kv_blocks=512", "engine.device=cpu"]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | {"RILL_ADMIN_KEY": "adm"})
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 300
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield process, url
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_native_replicas_answer_take_weights_and_drain(
    server: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, url = server
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 8,
        "seed": 3,
        "return_token_ids": True,
    }
    first = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert len(first["token_ids"]) <= 8 and set(first["token_versions"]) == {0}
    assert httpx.post(f"{url}/reload_weights", timeout=60).status_code == 401
    update = httpx.post(f"{url}/reload_weights", headers={"Authorization": "Bearer adm"}, timeout=60)
    assert update.json() == {"status": "ok", "version": 1}
    again = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
    assert again["token_ids"] == first["token_ids"] and set(again["token_versions"]) == {1}
    assert httpx.get(f"{url}/health", timeout=60).json()["replicas"] == 2.0

    codes: list[int] = []
    long = {"prompt": "abc", "max_tokens": 600, "ignore_eos": True}
    ask = threading.Thread(
        target=lambda: codes.append(httpx.post(f"{url}/v1/completions", json=long, timeout=60).status_code)
    )
    ask.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    ask.join(60)
    assert codes == [200] and process.wait(60) == 0


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
