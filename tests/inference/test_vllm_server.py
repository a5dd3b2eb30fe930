"""The vllm_server adapter against a real `vllm serve` (the CPU build is enough); skipped where there is no vllm."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rill.inference.base import PauseMode, Request
from rill.inference.vllm_server import VllmServerEngine
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.types import PolicyVersion, SamplingParams, StopReason
from tests.inference.conformance import EngineConformance
from tests.inference.plain_http import http

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed: pip install 'rill[vllm]'", allow_module_level=True)

SHAPE = {
    "model_type": "qwen2", "vocab_size": 104, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip
MODEL = ModelConfig(shape=SHAPE, tokenizer="chars")
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    return load_model(MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Iterator[VllmServerEngine]:
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    load_tokenizer(MODEL).save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder),
        "--port", str(port), "--dtype", "float32",
        "--max-model-len", "256", "--enforce-eager", "--served-model-name", "tiny",
        "--logprobs-mode", "processed_logprobs", "--worker-extension-cls", "rill.inference.vllm_worker.WorkerExtension",
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if http.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        engine = VllmServerEngine(VllmServerEngine.Config(url=url, served_name="tiny", model=MODEL))
        yield engine
        engine.close()
    finally:
        server.terminate()
        server.wait(60)


def request(name: str, prompt: tuple[int, ...] = (40, 41, 42), **sampling: Any) -> Request:
    sampling = {"max_new_tokens": 12, "seed": 5, "ignore_eos": True, **sampling}
    return Request(id=name, token_ids=np.array(prompt, np.int32), sampling=SamplingParams(**sampling))


def forward(model: Any, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logprobs = (model(torch.tensor([ids])).logits[0].double() / temperature).log_softmax(-1)
    return np.array([0.0] + [float(logprobs[i, t]) for i, t in enumerate(ids[1:])])


def error_of(model: Any, prompt: tuple[int, ...], completion: Any, temperature: float = 1.0) -> float:
    expected = forward(model, [*prompt, *completion.token_ids.tolist()], temperature)[len(prompt) :]
    return float(np.abs(expected - completion.logprobs).max())


def new_weights(model: Any, seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def test_tokens_logprobs_and_scores_equal_a_forward_pass(engine: VllmServerEngine, reference: Any) -> None:
    assert engine.max_context == 256
    (completion,) = engine.generate([request("a", temperature=0.7)], 60.0)
    assert len(completion.token_ids) == 12 and completion.stop_reason is StopReason.LENGTH
    assert error_of(reference, (40, 41, 42), completion, 0.7) < TOLERANCE
    ids = np.array([40, 50, 60, 70], np.int32)
    assert np.abs(engine.score([ids])[0] - forward(reference, ids.tolist())).max() < TOLERANCE


def test_an_update_reaches_every_layer_and_cut_requests_go_on(
    engine: VllmServerEngine, reference: Any
) -> None:
    prompt = tuple(range(40, 90))
    engine.generate([request("warm", prompt)], 60.0)
    (future,) = engine.submit([request("long", max_new_tokens=150)])
    start = engine.stats().num_generated_tokens
    while engine.stats().num_generated_tokens < start + 5:
        time.sleep(0.005)
    engine.pause(PauseMode.INTERRUPT, 30.0)
    engine.update_weights(new_weights(reference, 1), PolicyVersion(1))
    engine.resume()
    completion = future.result(120)
    versions = completion.versions.tolist()
    assert len(versions) == 150 and versions == sorted(versions) and set(versions) == {0, 1}
    first_new = versions.index(1)
    expected = forward(reference, [40, 41, 42, *completion.token_ids.tolist()])[3 + first_new :]
    assert np.abs(expected - completion.logprobs[first_new:]).max() < TOLERANCE
    (after,) = engine.generate([request("after", prompt)], 60.0)
    assert error_of(reference, prompt, after) < TOLERANCE


class TestVllmServer(EngineConformance):
    """The suite that every engine runs, on the same server and reference: both take the same weights."""

    atol = TOLERANCE
