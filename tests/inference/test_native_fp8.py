"""Weights, keys and values of 8 bits in the native engine: near the model, and the same however weights come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rill.errors import ConfigError, UnsupportedError, WeightSyncError
from rill.inference.base import MemoryLevel, PauseMode
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig, load_model
from rill.models.ops.fp8 import FP8
from rill.types import PolicyVersion
from tests.inference.native_models import SHAPES, make_engine, prompts, request

OPTIONS: list[dict[str, Any]] = [
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8"},
    {"quantization": "fp8", "kv_cache_dtype": "fp8"},
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 128, "initializer_range": 0.05}

WIDE_GAPS = {
    ("qwen2", "quantization"): 0.130,
    ("qwen2", "kv_cache_dtype"): 0.0545,
    ("qwen2", "quantization", "kv_cache_dtype"): 0.162,
    ("qwen3", "quantization"): 0.136,
    ("qwen3", "kv_cache_dtype"): 0.0507,
    ("qwen3", "quantization", "kv_cache_dtype"): 0.153,
    ("gemma2", "quantization"): 0.158,
    ("gemma2", "kv_cache_dtype"): 0.0824,
    ("gemma2", "quantization", "kv_cache_dtype"): 0.188,
}
"""Mean difference in nats on the texts below, by rounding in float32 on the CPU."""


def shape_of(name: str, device: str) -> dict[str, Any]:
    """Wide enough for real tiles, on CUDA."""
    return SHAPES[name] | (WIDE if device == "cuda" else {"initializer_range": 0.1})


def model_of(name: str, device: str, seed: int = 0) -> Any:
    config = ModelConfig(shape=shape_of(name, device), seed=seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return load_model(config, dtype=dtype, device=torch.device(device))


def engine_of(name: str, device: str, seed: int = 0, **options: Any) -> NativeEngine:
    config = NativeEngine.Config(
        model=ModelConfig(shape=shape_of(name, device)), device=device, num_kv_blocks=200, max_num_seqs=80,
        max_batched_tokens=512, **options,
    )  # fmt: skip
    return NativeEngine(config, model=model_of(name, device, seed), owns_model=True)


def gap(one: list[Any], other: list[Any]) -> Any:
    return np.concatenate([abs(a[1:] - b[1:]) for a, b in zip(one, other, strict=True)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("options", OPTIONS, ids=["weights", "cache", "both"])
def test_log_probabilities_are_near_the_models_and_those_sampled_are_those_scored(
    device: str, name: str, options: dict[str, Any]
) -> None:
    """70 sequences at once, then 3: CUDA has other kernels for few."""
    texts = prompts((40, 90, 7), seed=3)
    plain, engine = engine_of(name, device), engine_of(name, device, **options)
    try:
        found = gap(engine.score(texts), plain.score(texts))
        if device == "cpu":
            assert 0 < found.mean() < 0.06 and found.max() < 0.5, (found.mean(), found.max())
        else:  # what rounding costs the same model on the CPU: a wrong scale costs more
            assert found.mean() == pytest.approx(WIDE_GAPS[name, *options], rel=0.25)
            assert found.max() < 2.0
        for inputs in (prompts([5] * 70, seed=1), texts) if device == "cuda" else (texts,):
            batch = [request(i, p, max_new_tokens=12, seed=i, temperature=1.0) for i, p in enumerate(inputs)]
            done = engine.generate(batch, timeout_s=110)
            whole = [np.concatenate([p, c.token_ids]) for p, c in zip(inputs, done)]
            sampled = [np.concatenate([p, c.logprobs]) for p, c in zip(inputs, done)]
            scored = [np.concatenate([p, s[len(p) :]]) for p, s in zip(inputs, engine.score(whole))]
            difference = gap(sampled, scored)
            # On CUDA few rows are summed in another order, which moves some numbers to the next of 8 bits.
            mean, most = (1e-4, 1e-3) if device == "cpu" else (0.1, 1.0)
            assert difference.mean() < mean and difference.max() < most, (difference.mean(), difference.max())
    finally:
        plain.close()
        engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_weights_are_quantised_however_they_come(device: str) -> None:
    """At the start, by an update of all, of some, and back from host memory."""
    options = OPTIONS[2]
    texts = prompts((30, 9), seed=4)
    engine, other = engine_of("qwen2", device, **options), engine_of("qwen2", device, seed=1, **options)
    try:
        first, wanted = engine.score(texts), other.score(texts)
        assert gap(first, wanted).max() > 0.01
        fresh = list(model_of("qwen2", device, seed=1).named_parameters())
        engine.update_weights(fresh, PolicyVersion(1))
        assert gap(engine.score(texts), wanted).max() == 0
        old = dict(model_of("qwen2", device).named_parameters())
        name = "model.layers.1.self_attn.k_proj.weight"
        engine.update_weights([(name, old[name])], PolicyVersion(2), partial=True)
        mixed = engine.score(texts)
        assert gap(mixed, wanted).max() > 0
        engine.pause(PauseMode.INTERRUPT)
        engine.release(MemoryLevel.WEIGHTS)
        engine.restore()
        engine.resume()
        assert gap(engine.score(texts), mixed).max() == 0
        with pytest.raises(WeightSyncError, match="lacks"):
            engine.update_weights(fresh[:3], PolicyVersion(3))
    finally:
        engine.close()
        other.close()


@pytest.mark.gpu
def test_on_a_gpu_weights_and_cache_are_held_in_8_bits() -> None:
    engine = engine_of("qwen2", "cuda", **OPTIONS[2])
    try:
        runner = engine._runner
        weights = {n: p.dtype for n, p in runner.model.named_parameters() if ".layers." in n and p.ndim == 2}
        assert set(weights.values()) == {FP8}
        assert {held.dtype for layer in runner.cache for held in layer} == {FP8}
        assert runner._skinny is not None  # type: ignore[attr-defined]
    finally:
        engine.close()


@pytest.mark.parametrize(
    "other", [{"batch_invariant": True}, {"tensor_parallel_size": 2}, {"fast_path": False}]
)
@pytest.mark.parametrize("options", OPTIONS[:2], ids=["weights", "cache"])
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(
    options: dict[str, Any], other: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match=f"= 'fp8' does not go together with {next(iter(other))}"):
        NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), **options, **other)


def test_experts_other_peoples_models_and_adapters_are_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match="dense models"):
        make_engine("qwen3_moe", quantization="fp8")
    with pytest.raises(UnsupportedError, match="fast path"):
        make_engine("gpt2", kv_cache_dtype="fp8")
    config = NativeEngine.Config(model=ModelConfig(shape=SHAPES["llama"]), device="cpu", quantization="fp8")
    with pytest.raises(ConfigError, match="somebody else"):
        NativeEngine(config, model=model_of("llama", "cpu"))
    engine = make_engine("llama", quantization="fp8")
    try:
        with pytest.raises(UnsupportedError, match="quantised"):
            engine.load_adapter("one", "nowhere")
    finally:
        engine.close()
