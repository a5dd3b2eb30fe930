"""One model on several ranks: the answers of one, weights on all of them, and an end when one of them dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch
from pydantic import ValidationError

from rill.errors import ConfigError, EngineDiedError, EngineError, UnsupportedError, WeightSyncError
from rill.inference.base import Engine, Feature, MemoryLevel
from rill.inference.native import followers
from rill.inference.native.engine import NativeEngine
from rill.models.decode.shards import ADDED_ONCE, Cut
from rill.models.loading import ModelConfig, load_model, load_tokenizer
from rill.types import PolicyVersion
from tests.inference.conformance import EngineConformance
from tests.inference.native_models import (
    SHAPES,
    check_greedy,
    make_engine,
    prompts,
    reference,
    request,
)
from tests.inference.serve_process import rill_serve

BIASED = SHAPES["llama"] | {"attention_bias": True, "num_key_value_heads": 1}
"""With a bias behind the sum over ranks, which must be added once."""
PHI = SHAPES["llama"] | {"model_type": "phi3"}
"""q, k and v are one module, gate and up another."""
GLM = SHAPES["llama"] | {"model_type": "glm4", "head_dim": 8}
"""Turns neighbours, in a half of each head."""
COHERE = SHAPES["llama"] | {
    "model_type": "cohere2", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""Attention and MLP side by side; one of the layers does not turn."""


SHARED = SHAPES["qwen3_moe"] | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48}
"""An expert that everybody has, weighed by a gate of its own."""


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # another test's, which ends just now
            if "native.follower" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.fixture
def two() -> Iterator[NativeEngine]:
    engine = make_engine(tensor_parallel_size=2)
    yield engine
    engine.close()


def random_weights(shape: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Of every parameter, biases too."""
    generator = torch.Generator().manual_seed(5)
    model = load_model(ModelConfig(shape=shape), dtype=torch.float32)
    return [(name, torch.randn(p.shape, generator=generator) * 0.3) for name, p in model.named_parameters()]


@pytest.mark.timeout(120)
def test_two_ranks_say_what_one_says_before_and_after_an_update() -> None:
    config = {"model": ModelConfig(shape=BIASED), "device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 8}
    weights = random_weights(BIASED)
    one = NativeEngine(NativeEngine.Config(**config))
    two = NativeEngine(NativeEngine.Config(**config, tensor_parallel_size=2))
    asked = [request(i, p, max_new_tokens=20) for i, p in enumerate(prompts((5, 33, 1)))]
    asked += [request(f"s{i}", p, temperature=1.0, seed=i, top_p=0.9) for i, p in enumerate(prompts((7, 40)))]
    try:
        for version in (1, 2):
            for alone, shared in zip(one.generate(asked), two.generate(asked), strict=True):
                assert shared.token_ids.tolist() == alone.token_ids.tolist()
                np.testing.assert_allclose(shared.logprobs, alone.logprobs, atol=1e-4)
                assert (
                    shared.versions.tolist() == alone.versions.tolist() == [version - 1] * len(alone.versions)
                )
            for engine in (one, two):
                # From an iterator, as a receiver gives them, and in another precision than the model's.
                engine.update_weights(((name, t.double()) for name, t in weights), PolicyVersion(version))
        for theirs, own in zip(two.score(prompts((50, 9))), one.score(prompts((50, 9))), strict=True):
            np.testing.assert_allclose(theirs, own, atol=1e-4)
        assert Feature.LORA not in two.features
        assert len(children()) == 1
    finally:
        one.close()
        two.close()
    assert not children()


def test_what_cannot_be_spread_is_refused_by_name_before_a_process_is_started() -> None:
    def refused(match: str, size: int, name: str = "llama", **shape: Any) -> None:
        model = ModelConfig(shape=SHAPES[name] | shape)
        with pytest.raises((ConfigError, UnsupportedError), match=match):
            NativeEngine(NativeEngine.Config(model=model, device="cpu", tensor_parallel_size=size))
        assert not children()

    refused("tensor_parallel_size 3 does not divide the model's 4 attention heads", 3)
    refused(
        "2 neither divides the model's 3 key/value heads nor is a multiple", 2,
        num_attention_heads=6, num_key_value_heads=3, hidden_size=48,
    )  # fmt: skip
    refused("2 does not divide the model's intermediate_size 47", 2, intermediate_size=47)
    refused("2 does not divide the model's intermediate_size 31", 2, "qwen3_moe", moe_intermediate_size=31)
    refused("'gpt_oss' keeps its experts in a way that is not spread", 2, "qwen3_moe", model_type="gpt_oss")
    with pytest.raises(ConfigError, match="over a loaded module"):
        NativeEngine(
            NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), tensor_parallel_size=2),
            model=reference(),
        )
    for option in ({"batch_invariant": True}, {"fast_path": False}):
        with pytest.raises(ValidationError, match=f"go together with {next(iter(option))}"):
            NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), tensor_parallel_size=2, **option)


def test_the_parts_of_a_cut_are_the_whole_and_scarce_heads_are_held_by_several() -> None:
    whole = torch.arange(24.0).view(12, 2)
    fused = Cut(
        0, ((8, 4), (2, 2), (2, 2))
    )  # four query heads of two rows, two key and two value heads of one
    assert [fused.part(whole, rank, 4)[:, 0].tolist() for rank in range(4)] == [
        [0, 2, 16, 20], [4, 6, 16, 20], [8, 10, 18, 22], [12, 14, 18, 22],
    ]  # fmt: skip
    columns = Cut(1, ((2, 2),))
    assert torch.equal(torch.cat([columns.part(whole, rank, 2) for rank in range(2)], 1), whole)
    assert torch.equal(sum(ADDED_ONCE.part(whole, rank, 3) for rank in range(3)), whole)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(
            (name, 2)
            for name in ("llama-tied", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma2")
        ),
        ("llama", 4),
        ("phi3", 2),
        ("glm4", 2),
        ("cohere2", 2),
        ("qwen3_moe", 2),
        ("qwen2_moe", 2),
    ],
)
def test_every_family_says_what_transformers_says(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, and from drafts. Two ranks hold qwen2's one key/value head each, pairs of four llama's two."""
    for shape in (PHI, GLM, COHERE, SHARED):
        monkeypatch.setitem(SHAPES, shape["model_type"], shape)
    check_greedy(name, monkeypatch, tensor_parallel_size=size)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_that_share_experts_choose_as_one_does_before_and_after_an_update() -> None:
    config = {
        "model": ModelConfig(shape=SHARED), "device": "cpu", "num_kv_blocks": 64, "max_num_seqs": 8,
        "routed_experts": True,
    }  # fmt: skip
    weights = random_weights(SHARED)
    one = NativeEngine(NativeEngine.Config(**config))
    two = NativeEngine(NativeEngine.Config(**config, tensor_parallel_size=2))
    asked = [request(i, p, max_new_tokens=12) for i, p in enumerate(prompts((5, 33)))]
    try:
        for version in (1, 2):
            for alone, shared in zip(one.generate(asked), two.generate(asked), strict=True):
                assert shared.token_ids.tolist() == alone.token_ids.tolist()
                np.testing.assert_allclose(shared.logprobs, alone.logprobs, atol=1e-4)
                np.testing.assert_array_equal(shared.routed_experts, alone.routed_experts)
            for engine in (one, two):
                engine.update_weights(iter(weights), PolicyVersion(version))
    finally:
        one.close()
        two.close()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_summed_too(dtype: str) -> None:
    one, two = (make_engine("qwen3", dtype=dtype, tensor_parallel_size=size) for size in (1, 2))
    texts = prompts((30, 12))
    try:
        for theirs, own in zip(two.score(texts), one.score(texts), strict=True):
            np.testing.assert_allclose(theirs, own, atol=0.3)
            assert np.abs(theirs - own).mean() < 0.03
    finally:
        one.close()
        two.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestTwoRanks(EngineConformance):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[Engine]:
        engine = make_engine(tensor_parallel_size=2)
        yield engine
        engine.close()

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls) -> Any:
        return reference()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_failed_update_a_release_and_adapters_do_what_they_do_on_one_rank(two: NativeEngine) -> None:
    whole = [(name, p.data) for name, p in reference().named_parameters()]
    asked = request(1, prompts((9,))[0])
    before = two.generate([asked])[0]
    with pytest.raises(WeightSyncError, match="the model's is"):
        two.update_weights(
            [*whole[:5], ("model.layers.1.mlp.up_proj.weight", torch.zeros(24, 32))], PolicyVersion(1)
        )
    with pytest.raises(EngineError, match="waits for a whole update"):
        two.generate([asked])
    two.update_weights(whole, PolicyVersion(2))
    assert two.generate([asked])[0].token_ids.tolist() == before.token_ids.tolist()
    two.release(MemoryLevel.WEIGHTS)
    two.restore()
    assert two.generate([asked])[0].token_ids.tolist() == before.token_ids.tolist()
    with pytest.raises(UnsupportedError, match="tensor_parallel_size=1"):
        two.load_adapter("a", "nowhere")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_follower_fails_what_runs_by_name_and_leaves_no_process() -> None:
    """The name is that of the one that was killed, and not of those that it took with it."""
    engine = make_engine(tensor_parallel_size=4)
    _, follower, _ = children()
    started: Future[bool] = Future()
    asked = [request(i, p, max_new_tokens=200) for i, p in enumerate(prompts((8,) * 6))]
    flights = engine.submit(asked, lambda delta: None if started.done() else started.set_result(True))
    started.result(timeout=60)
    follower.kill()
    for flight in flights:
        with pytest.raises(
            EngineDiedError,
            match=rf"rank \d of the engine\'s 4 \(process {follower.pid}\) ended \(exit code -9",
        ):
            flight.result(timeout=60)
    with pytest.raises(EngineDiedError, match="exit code -9"):
        engine.stats()
    engine.close()
    assert not children()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_idle_engine_hears_of_a_death_by_itself() -> None:
    engine = make_engine(tensor_parallel_size=2)
    (first,) = children()
    first.kill()
    deadline = time.monotonic() + 60
    with pytest.raises(EngineDiedError, match=f"process {first.pid}"):
        while time.monotonic() < deadline:
            engine.stats()
            time.sleep(0.05)
    engine.close()
    assert not children()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_follower_that_stands_still_costs_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "STEP_TIMEOUT_S", 20)
    engine = make_engine(tensor_parallel_size=2)
    (follower,) = children()
    follower.suspend()
    try:
        with pytest.raises(EngineDiedError, match="did not come together"):
            engine.generate([request(1, prompts((8,))[0])], timeout_s=120)
    finally:
        engine.close()
    assert not children()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_model_without_a_fast_path_is_refused_and_leaves_no_process() -> None:
    with pytest.raises(UnsupportedError, match="'gpt2' does not run on the fast path"):
        make_engine("gpt2", tensor_parallel_size=2)
    assert not children()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rill_serve_takes_the_option_and_followers_end_with_a_killed_server(tmp_path: Path) -> None:
    config = ModelConfig(shape=SHAPES["llama"] | {"vocab_size": 104}, tokenizer="chars")
    load_model(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    load_tokenizer(config).save_pretrained(tmp_path / "model")
    with rill_serve(tmp_path / "model", "--tensor-parallel-size", "2", "engine.num_kv_blocks=64") as (
        server,
        url,
    ):
        body = {"model": "model", "prompt": "1+1=", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 8
        started = psutil.Process(server.pid).children()
        assert len(started) == 1
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_two_gpus_say_what_transformers_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_greedy(
        name, monkeypatch, device="cuda", dtype="float32", check_every_step=False, tensor_parallel_size=2
    )
