"""With batch_invariant on both sides a trainer's log-probabilities are the engine's, bit for bit, in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rill.inference.base import Completion
from rill.inference.native.engine import NativeEngine
from rill.models.ops.cpu_kernels import load_cpu_kernels
from rill.training.policy import PolicyTrainer
from rill.types import PolicyVersion, Sample, Trajectory
from tests.inference.native_models import prompts, request
from tests.training.tiny import SHAPE, algorithm, config, make_samples

MODEL: dict[str, Any] = {"shape": {**SHAPE, "max_position_embeddings": 256}}
LENGTHS = (5, 33, 60, 2, 16, 47)
TEMPERATURE = 0.8


def sample_of(prompt: np.ndarray[Any, Any], completion: Completion, name: str) -> Sample:
    tokens = np.concatenate([prompt, completion.token_ids])
    sampled = np.arange(len(tokens)) >= len(prompt)
    trajectory = Trajectory(
        id=name,
        group_id=name,
        prompt_id=name,
        token_ids=tokens,
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs]),
        versions=np.where(sampled, 1, -1).astype(np.int32),
        loss_mask=sampled,
        turn_ids=sampled.astype(np.int32),
    )
    return Sample(trajectory=trajectory, advantages=sampled.astype(np.float32))


def check(device: str, dtype: str) -> None:
    trainer = PolicyTrainer(
        config(model=MODEL, compute_dtype=dtype, batch_invariant=True, temperature=TEMPERATURE),
        algorithm(),
        device=device,
    )
    engine = NativeEngine(
        NativeEngine.Config(
            model=MODEL,
            device=device,
            dtype=dtype,
            batch_invariant=True,
            num_kv_blocks=64,
            max_num_seqs=8,
            max_batched_tokens=32,
        )
    )
    try:
        trainer.update(make_samples())
        engine.update_weights(trainer.named_weights(), PolicyVersion(1))
        inputs = prompts(LENGTHS)
        requests = [
            request(i, p, temperature=TEMPERATURE, seed=i, max_new_tokens=20) for i, p in enumerate(inputs)
        ]
        samples = [
            sample_of(p, c, r.id) for p, c, r in zip(inputs, engine.generate(requests), requests, strict=True)
        ]
        together = trainer.logprobs(samples)
        for index, sample in enumerate(samples):
            (alone,) = trainer.logprobs([sample])
            assert alone.tolist() == together[index].tolist()
            sampled = sample.trajectory.loss_mask
            assert together[index][sampled].tolist() == sample.trajectory.logprobs[sampled].tolist()
        (again,) = engine.generate([requests[1]])
        assert again.logprobs.tolist() == samples[1].trajectory.logprobs[-20:].tolist()
    finally:
        engine.close()
        trainer.close()


@pytest.mark.skipif(load_cpu_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_the_engine_sampled_is_recomputed_bit_for_bit(dtype: str) -> None:
    check("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_the_engine_sampled_is_recomputed_bit_for_bit_on_cuda(dtype: str) -> None:
    check("cuda", dtype)
