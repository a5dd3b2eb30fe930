"""LoRA adapters through the server: loaded and unloaded while it runs, listed, and served beside the base model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from rill.cli.serving import build_config
from rill.inference.native.engine import NativeEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.models.tokenizer import build_char_tokenizer
from tests.inference.fake_engine import FakeEngine
from tests.inference.native_models import greedy_tokens, make_engine, prompts, reference
from tests.inference.plain_http import http
from tests.inference.test_native_adapters import write_adapter

ADMIN = {"Authorization": "Bearer admin"}
PROMPT = prompts((20,))[0]


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    engine = make_engine()
    yield engine
    engine.close()


@pytest.fixture
def client(engine: NativeEngine) -> Iterator[httpx.Client]:
    config = ServerConfig(port=0, model_name="base", admin_key="admin")  # type: ignore[arg-type]
    app = create_app(engine, build_char_tokenizer(), config)
    with BackgroundServer(app, config) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
    for name in engine.adapters:
        engine.unload_adapter(name)


def load(client: httpx.Client, name: str, folder: Path, **extra: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **extra}
    return client.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def answer(client: httpx.Client, model: str, **extra: Any) -> list[int]:
    body = {"model": model, "token_ids": [int(t) for t in PROMPT]}
    body["sampling_params"] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    response = client.post("/inference/v1/generate", json=body | extra)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def test_an_adapter_is_loaded_listed_served_replaced_and_unloaded(
    client: httpx.Client, tmp_path: Path
) -> None:
    first, second = write_adapter(tmp_path / "1", 1), write_adapter(tmp_path / "2", 2)
    assert load(client, "math", tmp_path / "1").json() == {"status": "ok", "models": ["base", "math"]}
    cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert cards["math"]["parent"] == "base" and cards["base"]["parent"] is None
    assert client.get("/v1/models/math").status_code == 200
    assert answer(client, "math") == greedy_tokens(first, PROMPT, 12)
    assert answer(client, "base") == greedy_tokens(reference(), PROMPT, 12)

    assert load(client, "math", tmp_path / "2").status_code == 400, "replacing must be asked for"
    assert load(client, "math", tmp_path / "2", load_inplace=True).status_code == 200
    assert answer(client, "math") == greedy_tokens(second, PROMPT, 12)

    unload = client.post("/v1/unload_lora_adapter", json={"lora_name": "math"}, headers=ADMIN)
    assert unload.json() == {"status": "ok", "models": ["base"]}
    assert client.get("/v1/models/math").status_code == 404
    body = {"model": "math", "prompt": "a"}
    assert client.post("/v1/completions", json=body).json()["error"]["code"] == "model_not_found"


def test_the_root_routes_load_every_version_under_one_name(client: httpx.Client, tmp_path: Path) -> None:
    for number in (1, 2):
        model = write_adapter(tmp_path / str(number), number)
        body = {"lora_name": "run", "lora_path": str(tmp_path / str(number))}
        assert client.post("/load_lora_adapter", json=body, headers=ADMIN).status_code == 200
        assert answer(client, "run") == greedy_tokens(model, PROMPT, 12)
    unload = client.post("/unload_lora_adapter", json={"lora_name": "run"}, headers=ADMIN)
    assert unload.json() == {"status": "ok", "models": ["base"]}


def test_an_adapter_scores_the_prompt_wherever_the_request_names_it(
    client: httpx.Client, tmp_path: Path
) -> None:
    write_adapter(tmp_path, 1)
    assert load(client, "math", tmp_path).status_code == 200

    def scores(body: dict[str, str], **sampling: str) -> Any:
        asked = {"max_tokens": 1, "prompt_logprobs": 1, **sampling}
        whole = {"token_ids": [int(t) for t in PROMPT], "sampling_params": asked, **body}
        return client.post("/inference/v1/generate", json=whole).json()["prompt_logprobs"]

    assert scores({}, model="math") == scores({"model": "math"}) != scores({"model": "base"})


@pytest.mark.parametrize("root", ["", "/v1"])
def test_only_the_admin_key_opens_the_adapter_routes(client: httpx.Client, tmp_path: Path, root: str) -> None:
    body = {"lora_name": "a"}
    assert client.post(f"{root}/unload_lora_adapter", json=body).status_code == 401
    body |= {"lora_path": str(tmp_path)}
    assert client.post(f"{root}/load_lora_adapter", json=body).status_code == 401


def test_what_is_no_adapter_of_this_model_is_refused_in_words(client: httpx.Client, tmp_path: Path) -> None:
    assert "holds no PEFT adapter" in load(client, "a", tmp_path / "nothing").json()["error"]["message"]
    write_adapter(tmp_path / "a", 1)
    assert load(client, "base", tmp_path / "a").status_code == 400
    ghost = {f"ghost.lora_{half}.weight": torch.zeros(4, 4) for half in "AB"}
    save_file(ghost, tmp_path / "a" / "adapter_model.safetensors")
    assert "no linear layer" in load(client, "a", tmp_path / "a").json()["error"]["message"]
    flat = {f"model.layers.0.self_attn.q_proj.lora_{half}.weight": torch.zeros(4) for half in "AB"}
    save_file(flat, tmp_path / "a" / "adapter_model.safetensors")
    assert "do not fit" in load(client, "a", tmp_path / "a").json()["error"]["message"]
    for broken in ("{", "[]", "{}", '{"r": 0, "lora_alpha": 1}', '{"r": "x", "lora_alpha": 1}'):
        (tmp_path / "a" / "adapter_config.json").write_text(broken)
        assert load(client, "a", tmp_path / "a").status_code == 400, broken
    missing = client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}, headers=ADMIN)
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "lora_name"
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["base"]


def test_an_engine_without_adapters_says_so(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.features = engine.features - {"lora"}  # type: ignore[misc]
    config = ServerConfig(port=0)
    with BackgroundServer(create_app(engine, engine.tokenizer, config), config) as server:
        body = {"lora_name": "a", "lora_path": str(tmp_path)}
        error = http.post(f"{server.url}/v1/load_lora_adapter", json=body).json()["error"]
        assert error["code"] == "unsupported"
    engine.close()


def test_the_command_line_names_adapters_to_start_with(tmp_path: Path) -> None:
    config = build_config(str(tmp_path), ["adapters.math=folders/math", "adapters.code=folders/code"])
    assert config.adapters == {"math": "folders/math", "code": "folders/code"}
