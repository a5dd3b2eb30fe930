"""A trainer in another process publishes, a running server pulls: verified, or the old weights stay in service."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rill.errors import WeightSyncError
from rill.inference.native.engine import NativeEngine
from rill.inference.server import ServerConfig, create_app, serve_in_thread
from rill.inference.server.target import ServerTarget
from rill.models.loading import ModelConfig, load_model
from rill.types import PolicyVersion
from rill.weights import Canary, ThreadedTargets, WeightSync, open_publisher
from rill.weights.disk import DiskTransport, manifest_to_json
from rill.weights.shm import ShmTransport

MODEL = ModelConfig(
    shape={"model_type": "qwen2", "vocab_size": 104, "hidden_size": 32, "intermediate_size": 64,
           "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
           "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    tokenizer="chars",
)  # fmt: skip
PROMPT = [40, 41, 42, 43]

pytestmark = pytest.mark.timeout(300)  # a process imports torch before the first test

TRAINER = """
import sys
from rill.types import PolicyVersion
from rill.weights import open_publisher
from rill.weights.disk import DiskTransport, manifest_to_json
from rill.weights.shm import ShmTransport
from tests.inference.test_server_weights import changed

publishers = {
    "disk": open_publisher(DiskTransport.Config(folder=sys.argv[1], bucket_bytes=8192)),
    "shm": open_publisher(ShmTransport.Config(bucket_bytes=8192)),
}
for line in sys.stdin:  # one version for every line that the test sends
    kind, version = line.split()
    manifest = publishers[kind].publish(changed(int(version)).items(), PolicyVersion(int(version)))
    print(manifest_to_json(manifest), flush=True)
"""


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
    """A server of its own for each test, on one engine: what an earlier test pulled does not help a later one."""
    config = ServerConfig(port=0, model_name="tiny")
    assert engine.tokenizer is not None
    app = create_app(engine, engine.tokenizer, config, model=MODEL)
    with serve_in_thread(app, config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


class Trainer:
    """A process that publishes what it is told to."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def publish(self, kind: str, version: int) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{kind} {version}\n")
        self._process.stdin.flush()
        manifest: dict[str, Any] = json.loads(self._process.stdout.readline())
        return manifest

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("weights"))
    yield trainer
    trainer.kill()


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


@pytest.mark.parametrize("kind", ["disk", "shm"])
def test_a_trainer_process_publishes_and_the_server_pulls(
    kind: str, trainer: Trainer, client: httpx.Client, engine: NativeEngine
) -> None:
    first = engine.version + 1
    for version in (first, first + 1, first + 5):
        manifest = trainer.publish(kind, version)
        answer = client.post("/update_weights", json={"manifest": manifest}).json()
        assert answer == {"status": "ok", "version": version}
        in_service(client, version)
    refused(client, {"manifest": manifest}, 409, "versions only grow")
    in_service(client, first + 5)


@pytest.mark.parametrize("kind", ["disk", "shm"])
def test_a_version_that_is_damaged_or_gone_changes_nothing(
    kind: str, trainer: Trainer, client: httpx.Client, engine: NativeEngine
) -> None:
    good = engine.version + 1
    assert client.post("/update_weights", json={"manifest": trainer.publish(kind, good)}).status_code == 200
    manifest = trainer.publish(kind, good + 1)
    folder = Path(manifest["location"]) / (f"v{good + 1:010d}" if kind == "disk" else "")
    path = folder / manifest["buckets"][1]["source"]
    whole = path.read_bytes()
    with path.open("r+b") as file:  # in place: shared memory is mapped
        file.seek(len(whole) - 64)
        file.write(bytes(64))
    refused(client, {"manifest": manifest}, 502, "checksum differs")
    in_service(client, good)
    path.unlink()
    refused(client, {"manifest": manifest}, 502, str(path))
    in_service(client, good)
    path.write_bytes(whole)
    assert client.post("/update_weights", json={"manifest": manifest}).status_code == 200, (
        "mended, it is taken"
    )
    in_service(client, good + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "shm"])
def test_what_a_trainer_published_before_it_was_killed_is_taken(
    kind: str, client: httpx.Client, engine: NativeEngine, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path)
    manifest = trainer.publish(kind, engine.version + 1)
    trainer.kill()
    assert client.post("/update_weights", json={"manifest": manifest}).status_code == 200
    in_service(client, manifest["version"])


def test_a_manifest_that_is_wrong_is_a_client_error_in_words(
    client: httpx.Client, engine: NativeEngine, tmp_path: Path
) -> None:
    publisher = open_publisher(DiskTransport.Config(folder=str(tmp_path), bucket_bytes=8192))
    version, before = engine.version, answer_of(client)
    weights = changed(1)
    name = next(iter(weights))
    cases: list[tuple[dict[str, torch.Tensor], int, str]] = [
        ({n: t for n, t in weights.items() if n != name}, 409, "parameters are missing"),
        (weights | {name: torch.zeros(3, 3)}, 409, "expected (104, 32)"),
        (weights | {"stranger": torch.zeros(3)}, 409, "no parameter 'stranger'"),
    ]
    for offset, (tensors, status, words) in enumerate(cases, start=1):
        manifest = publisher.publish(tensors.items(), PolicyVersion(version + offset))
        refused(client, {"manifest": json.loads(manifest_to_json(manifest))}, status, words)
    sound = json.loads(manifest_to_json(publisher.publish(weights.items(), PolicyVersion(version + 9))))
    refused(client, {"manifest": sound | {"buckets": sound["buckets"][:1]}}, 400, "contradicts itself")
    refused(client, {"manifest": sound | {"transport": "cuda_ipc"}}, 400, "manifest.transport")
    refused(client, {"manifest": {"version": 3}}, 400, "manifest")
    refused(client, {}, 400, "say where the weights are")
    assert answer_of(client)[0] == before[0] and np.allclose(answer_of(client)[1], before[1])
    assert client.get("/health").json() == {"status": "ok", "version": version, "replicas": 1.0}


def test_a_version_on_disk_is_taken_by_its_folder_over_differences(
    client: httpx.Client, engine: NativeEngine, tmp_path: Path
) -> None:
    publisher = open_publisher(DiskTransport.Config(folder=str(tmp_path), bucket_bytes=8192, delta=True))
    first = engine.version + 1
    for version in (first, first + 1, first + 2):
        publisher.publish(changed(version).items(), PolicyVersion(version))

    def folder(version: int) -> Path:
        return tmp_path / f"v{version:010d}"

    def update(version: int) -> int:
        answer = client.post("/update_weights", json={"weight_dir": str(folder(version))})
        return int(answer.json()["version"])

    assert update(first) == first
    in_service(client, first)
    assert update(first + 2) == first + 2, "two differences at once"
    in_service(client, first + 2)
    folder(first + 3).mkdir()
    (folder(first + 3) / "manifest.json").write_text('{"version": 12, "tensors": [')
    refused(client, {"weight_dir": str(folder(first + 3))}, 502, "half-written")
    nccl = client.post("/init_broadcaster", json={"host": "10.0.0.1", "port": 29500})
    assert nccl.status_code == 404, "prime-rl goes on without"
    in_service(client, first + 2)


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


def test_a_server_is_a_target_that_passes_the_canary_and_words_its_refusals(
    client: httpx.Client, engine: NativeEngine
) -> None:
    publisher = open_publisher(ShmTransport.Config(bucket_bytes=8192))
    target = ServerTarget("server", str(client.base_url))
    sync = WeightSync(publisher, ThreadedTargets([target]), canary=Canary.random(104, length=8))
    version = PolicyVersion(engine.version + 1)
    weights = changed(int(version))
    report = sync.sync(weights.items(), version, lambda sequences: [forward(weights, s) for s in sequences])
    assert report.in_service == ("server",) and not report.failed
    assert report.canary["server"] < 1e-4
    others, version = changed(0), PolicyVersion(version + 1)
    with pytest.raises(WeightSyncError, match="answers with other weights"):
        sync.sync(weights.items(), version, lambda sequences: [forward(others, s) for s in sequences])
    gone = publisher.publish(weights.items(), PolicyVersion(version + 1))
    Path(gone.location, gone.buckets[0].source).unlink()
    with pytest.raises(WeightSyncError, match="answered 502: .* is gone"):
        target.pull(gone.seal())
    publisher.close()
