"""New weights for a running server: checked, or the old ones stay in service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rill.inference.native.engine import NativeEngine
from rill.inference.server import BackgroundServer, ServerConfig, create_app
from rill.models.loading import ModelConfig, load_model

MODEL = ModelConfig(
    shape={"model_type": "qwen2", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 64,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
           "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    tokenizer="chars",
)  # fmt: skip
PROMPT = [40, 41, 42, 43]


def changed(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: different for each, the same in every process."""
    generator = torch.Generator().manual_seed(version)
    model = load_model(MODEL, dtype=torch.float32)
    return {
        n: p.detach() + 0.05 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()
    }


def forward(weights: dict[str, torch.Tensor], tokens: Any) -> np.ndarray[Any, Any]:
    """Log-probability of every token but the first, for which it is 0, by a plain forward pass."""
    model = load_model(MODEL, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    ids = torch.as_tensor(np.asarray(tokens, np.int64))
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(ids[None]).logits[0].float(), dim=-1)
    taken = logprobs_TV[torch.arange(len(ids) - 1), ids[1:]]
    return np.concatenate([[0.0], taken.numpy()]).astype(np.float32)


def scores(version: int) -> np.ndarray[Any, Any]:
    """What the weights of that version say of the prompt."""
    return forward(changed(version), PROMPT)[1:]


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    engine = NativeEngine(NativeEngine.Config(model=MODEL, num_kv_blocks=64, dtype="float32", device="cpu"))
    yield engine
    engine.close()


@pytest.fixture
def client(engine: NativeEngine) -> Iterator[httpx.Client]:
    """A server of its own for each test, on one engine: what an earlier test read does not help a later one."""
    config = ServerConfig(port=0, model_name="tiny")
    assert engine.tokenizer is not None
    app = create_app(engine, engine.tokenizer, config, model=MODEL)
    with BackgroundServer(app, config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def answer_of(client: httpx.Client) -> tuple[int, np.ndarray[Any, Any]]:
    """(version, prompt scores) of what is in service."""
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}}
    answer = client.post("/inference/v1/generate", json=body).json()
    (version,) = set(answer["choices"][0]["token_versions"])
    entries = answer["prompt_logprobs"][1:]
    return version, np.array([e[str(t)]["logprob"] for t, e in zip(PROMPT[1:], entries, strict=True)])


def in_service(client: httpx.Client, version: int) -> None:
    """That version answers, with its own weights, and the server calls itself healthy."""
    found, values = answer_of(client)
    assert found == version and client.get("/health").json()["status"] == "ok"
    assert np.allclose(values, scores(version), atol=1e-4)


def refused(client: httpx.Client, body: dict[str, Any], status: int, words: str) -> None:
    response = client.post("/update_weights", json=body)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


def test_versions_are_taken_in_order_and_each_answers_with_its_own_weights(
    client: httpx.Client, engine: NativeEngine, tmp_path: Path
) -> None:
    first = int(engine.version) + 1
    for version in (first, first + 3):
        save_file(changed(version), tmp_path / "model.safetensors")
        body = {"weight_dir": str(tmp_path), "version": version}
        assert client.post("/update_weights", json=body).json()["version"] == version
        in_service(client, version)
    refused(client, {"weight_dir": str(tmp_path), "version": first}, 409, "versions only grow")
    refused(client, {"weight_dir": str(tmp_path / "nowhere")}, 400, "there is no folder")
    nccl = client.post("/init_broadcaster", json={"host": "10.0.0.1", "port": 29500})
    assert nccl.status_code == 404, "prime-rl goes on without"
    in_service(client, first + 3)


def test_a_models_folder_is_checked_before_it_is_loaded(
    client: httpx.Client, engine: NativeEngine, tmp_path: Path
) -> None:
    version, before = engine.version, answer_of(client)
    weights = changed(3)
    save_file(weights, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(client, {"weight_dir": str(tmp_path)}, 502, "cannot be read")
    save_file({n: t for n, t in weights.items() if "norm" not in n}, tmp_path / "model.safetensors")
    refused(client, {"weight_dir": str(tmp_path)}, 409, "parameters are missing")
    assert answer_of(client)[0] == before[0] == version and np.allclose(answer_of(client)[1], before[1])
    (tmp_path / "model.safetensors").write_bytes(whole)
    assert client.post("/update_weights", json={"weight_dir": str(tmp_path)}).json()["version"] == version + 1
    assert np.allclose(answer_of(client)[1], scores(3), atol=1e-4)


def test_of_a_folder_the_files_are_read_that_transformers_would_read(
    client: httpx.Client, engine: NativeEngine, tmp_path: Path
) -> None:
    version = int(engine.version) + 1
    model = load_model(MODEL, dtype=torch.float32)
    model.load_state_dict(changed(version), strict=False)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    save_file(
        {"layers.0.wq": torch.ones(2)}, tmp_path / "consolidated.safetensors"
    )  # as Mistral's folders have it
    assert client.post("/update_weights", json={"weight_dir": str(tmp_path)}).json()["version"] == version
    in_service(client, version)
    index = tmp_path / "model.safetensors.index.json"
    whole = index.read_text()
    index.write_text(whole[:40])
    refused(client, {"weight_dir": str(tmp_path), "partial": True}, 502, "index.json cannot be read")
    index.write_text(whole)
    next(tmp_path.glob("model-00001-*")).unlink()
    refused(client, {"weight_dir": str(tmp_path), "partial": True}, 502, "cannot be read")
    save_file(
        changed(version + 1), tmp_path / "model.safetensors"
    )  # and not what lies there of the version before
    assert client.post("/update_weights", json={"weight_dir": str(tmp_path)}).json()["version"] == version + 1
    in_service(client, version + 1)


def test_a_model_of_the_hub_can_be_reloaded_too(
    engine: NativeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(MODEL, dtype=torch.float32)
    model.load_state_dict(changed(7), strict=False)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("rill.models.loading.hub_folder", lambda *_: tmp_path)
    served = ModelConfig(path="owner/tiny", tokenizer="chars")
    app = create_app(engine, engine.tokenizer, ServerConfig(port=0), model=served)
    with BackgroundServer(app, ServerConfig(port=0)) as server, httpx.Client(base_url=server.url) as client:
        answer = client.post("/reload_weights")
        assert answer.status_code == 200, answer.text
        assert np.allclose(answer_of(client)[1], scores(7), atol=1e-4)


@pytest.mark.parametrize("shard_size", ["10GB", "40KB"])
def test_experts_may_lie_one_by_one_as_transformers_writes_them(tmp_path: Path, shard_size: str) -> None:
    shape = {**MODEL.shape, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
             "moe_intermediate_size": 16}  # fmt: skip
    fresh, trained = (ModelConfig(shape=shape, tokenizer="chars", seed=seed) for seed in (0, 1))
    model = load_model(trained, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        logprobs_TV = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
    wanted = logprobs_TV[torch.arange(3), ids[0, 1:]].numpy()
    config = NativeEngine.Config(model=fresh, num_kv_blocks=64, dtype="float32", device="cpu")
    with closing(NativeEngine(config)) as engine:
        app = create_app(engine, engine.tokenizer, ServerConfig(port=0), model=fresh)
        with (
            BackgroundServer(app, ServerConfig(port=0)) as server,
            httpx.Client(base_url=server.url) as client,
        ):
            assert not np.allclose(answer_of(client)[1], wanted, atol=1e-2)
            answer = client.post("/update_weights", json={"weight_dir": str(tmp_path)}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert np.allclose(answer_of(client)[1], wanted, atol=1e-4)
            name = "model.layers.1.mlp.experts.3.down_proj.weight"
            path, tensors = next(
                (path, tensors)
                for path in tmp_path.glob("*.safetensors")
                if name in (tensors := load_file(path))
            )
            del tensors[name]
            save_file(tensors, path)
            refused(client, {"weight_dir": str(tmp_path)}, 409, "experts")
            save_file({**tensors, name: torch.ones(2, 2)}, path)
            refused(client, {"weight_dir": str(tmp_path)}, 502, "experts")
            assert np.allclose(answer_of(client)[1], wanted, atol=1e-4)
