"""A trainer's recomputation of log-probabilities has the bits of a batch-invariant engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.models.decode.packed_scorer import PackedScorer
from rill.models.ops.cpu_kernels import load_cpu_kernels
from tests.inference.native_models import forward_logprobs, make_engine, prompts, reference, request

needs_compiler = pytest.mark.skipif(load_cpu_kernels() is None, reason="no C++ compiler")


def check_bits(name: str, device: str, dtype: torch.dtype) -> None:
    engine = make_engine(
        name, device=device, dtype=str(dtype)[6:], batch_invariant=True, check_every_step=False
    )
    model = reference(name, dtype).to(device)
    scorer = PackedScorer(model, max_len=256)
    try:
        inputs = prompts((5, 33, 60, 1, 16))
        done = engine.generate([request(i, p, temperature=0.8, seed=i) for i, p in enumerate(inputs)])
        sequences = [np.concatenate([p, c.token_ids]) for p, c in zip(inputs, done)]
        packed = scorer([torch.from_numpy(s) for s in sequences], temperature=0.8)
        scored = engine.score(sequences, temperature=0.8)
        for prompt, completion, mine, theirs in zip(inputs, done, packed, scored):
            assert mine.tolist() == theirs.tolist()
            assert mine[len(prompt) :].tolist() == completion.logprobs.tolist()
        if dtype is torch.float32:
            alone = scorer([torch.from_numpy(sequences[0])])[0]
            np.testing.assert_allclose(alone, forward_logprobs(model.cpu(), sequences[0]), atol=1e-4)
    finally:
        engine.close()


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_recomputed_logprobs_have_the_engines_bits(name: str) -> None:
    check_bits(name, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2"])
def test_recomputed_logprobs_have_the_engines_bits_on_cuda(name: str, dtype: torch.dtype) -> None:
    check_bits(name, "cuda", dtype)
