"""Batch-invariant numerics: same tokens, same bits, in the engine and in a trainer's recomputation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rill.models.cpu_kernels import load_cpu_kernels
from rill.models.invariant import PackedScorer, invariant_linear
from tests.inference.native_models import forward_logprobs, make_engine, prompts, reference, request

needs_compiler = pytest.mark.skipif(load_cpu_kernels() is None, reason="no C++ compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        for num_out, num_in in ((96, 32), (300, 128), (64, 512)):
            weight = torch.randn(num_out, num_in, generator=generator).to(dtype)
            x = torch.randn(600, num_in, generator=generator).to(dtype)
            whole = invariant_linear(x, weight)
            for start, end in ((0, 1), (7, 24), (100, 356), (599, 600), (3, 500)):
                assert torch.equal(invariant_linear(x[start:end], weight), whole[start:end])
            expected = (x.float() @ weight.float().T).to(dtype)
            torch.testing.assert_close(
                whole, expected, rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-4
            )
    finally:
        torch.set_num_threads(before)


def test_its_gradients_are_those_of_an_ordinary_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 5, 8), (6, 8), (6,))
    )
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(invariant_linear, (x, weight, bias))


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_recomputed_logprobs_have_the_engines_bits(name: str) -> None:
    engine = make_engine(name, batch_invariant=True, check_every_step=False)
    model = reference(name)
    scorer = PackedScorer(model, max_len=256)
    try:
        inputs = prompts((5, 33, 60))
        done = engine.generate([request(i, p, temperature=0.8, seed=i) for i, p in enumerate(inputs)])
        sequences = [np.concatenate([p, c.token_ids]) for p, c in zip(inputs, done)]
        packed = scorer([torch.from_numpy(s) for s in sequences], temperature=0.8)
        scored = engine.score(sequences, temperature=0.8)
        for prompt, completion, mine, theirs in zip(inputs, done, packed, scored):
            assert mine.tolist() == theirs.tolist()
            assert mine[len(prompt) :].tolist() == completion.logprobs.tolist()
        np.testing.assert_allclose(
            scorer([torch.from_numpy(sequences[0])])[0], forward_logprobs(model, sequences[0]), atol=1e-4
        )
    finally:
        engine.close()
