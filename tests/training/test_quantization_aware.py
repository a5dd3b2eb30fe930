"""Weights of 4 bits: what is rounded, that the trainer computes with what the engine holds, and where gradients go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rill.errors import UnsupportedError
from rill.inference.native.engine import NativeEngine
from rill.models.loading import ModelConfig
from rill.models.ops.int4 import GROUP, rounded_int4
from rill.types import PolicyVersion
from tests.training.tiny import SHAPE, make_samples, trainer

PLACES = {"max_position_embeddings": 128}


def test_a_group_has_fifteen_numbers_and_its_largest_stays() -> None:
    weight = torch.randn(6, 3 * GROUP, generator=torch.Generator().manual_seed(0))
    weight[2, GROUP : 2 * GROUP] = 0
    held = rounded_int4(weight)
    for old, new in zip(weight.view(-1, GROUP), held.view(-1, GROUP), strict=True):
        step = old.abs().max() / 7
        assert len(new.unique()) <= 15
        assert (old - new).abs().max() <= 0.51 * step
    torch.testing.assert_close(rounded_int4(held), held)


def test_the_gradient_passes_straight_through_the_rounding() -> None:
    aware, samples = trainer(quantization_aware="int4"), make_samples(4)
    plain = trainer()
    held = {
        name: rounded_int4(tensor) if ".layers." in name and tensor.ndim == 2 else tensor
        for name, tensor in plain.engine.named_weights()
    }
    with torch.no_grad():
        for name, parameter in plain.engine.module.lm.named_parameters():
            parameter.copy_(held[name])
    for found, wanted in zip(aware.logprobs(samples), plain.logprobs(samples), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    for one in (aware, plain):
        one.begin()
        one.accumulate(samples)
    for name, wanted in plain.engine.gradients().items():
        torch.testing.assert_close(aware.engine.gradients()[name], wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_holds_4_bits_says_what_the_trainer_computes(dtype: str) -> None:
    shape = {**SHAPE, **PLACES}
    aware = trainer(model={"shape": shape}, quantization_aware="int4", compute_dtype=dtype)
    plain = trainer(model={"shape": shape}, compute_dtype=dtype)
    samples = make_samples(6)
    aware.update(samples)
    weights = list(aware.engine.named_weights())
    with torch.no_grad():
        for name, parameter in plain.engine.module.lm.named_parameters():
            parameter.copy_(dict(weights)[name])
    config: dict[str, Any] = {"model": ModelConfig(shape=shape), "device": "cpu", "dtype": dtype}
    engine = NativeEngine(NativeEngine.Config(**config, quantization="int4", num_kv_blocks=64))
    try:
        engine.update_weights(weights, PolicyVersion(1))
        said = engine.score([sample.trajectory.token_ids for sample in samples])
    finally:
        engine.close()
    close, far = (
        np.concatenate([abs(a[1:] - b[1:]) for a, b in zip(said, one.logprobs(samples), strict=True)])
        for one in (aware, plain)
    )
    assert close.mean() < (1e-5 if dtype == "float32" else 0.02)
    assert far.mean() > 3 * close.mean() and far.mean() > 0.02


def test_what_cannot_be_rounded_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 32"):
        trainer(model={"shape": {**SHAPE, "intermediate_size": 40}}, quantization_aware="int4")
    with pytest.raises(ValidationError, match="whole, trained weights"):
        trainer(quantization_aware="int4", lora={"rank": 2})
