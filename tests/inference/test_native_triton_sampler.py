"""Sampling with top-k, top-p and min-p on CUDA, in Triton's interpreter: the same tokens as the host's sampler."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import numpy as np, torch
from rill.inference.native.sampler import SamplingBatch, filter_logits, sample
from rill.inference.native.triton_sampler import _SPARE_BITS, TritonSampler, _cut
generator, rows, vocab = np.random.default_rng(0), 24, 200
for dtype in _SPARE_BITS:
    logits = torch.from_numpy(generator.normal(size=(rows, vocab)) * 3).to(dtype)
    temperature = generator.choice([0.5, 1.0, 1.7], rows).astype(np.float32)
    top_k = generator.choice([0, 0, 1, 5, 50], rows).astype(np.int32)
    top_p = generator.choice([1.0, 0.3, 0.5, 0.7, 0.95], rows).astype(np.float32)
    min_p = generator.choice([0, 0.05], rows).astype(np.float32)
    cut, inverse = torch.empty(rows), torch.from_numpy(1 / temperature)
    filters = [torch.from_numpy(column) for column in (top_k, top_p, min_p)]
    _cut[(rows,)](logits, inverse, *filters, cut, vocab, SHIFT=_SPARE_BITS[dtype], BLOCK=64, PDL=False, num_warps=4)
    scaled = logits.float() * inverse[:, None]
    batch = SamplingBatch(temperature_S=temperature, top_k_S=top_k, top_p_S=top_p, min_p_S=min_p,
                          uniform_S=generator.random(rows))
    has_cut = torch.from_numpy(~batch.is_redrawn_S)[:, None]
    stays = torch.isfinite(filter_logits(scaled.clone(), batch)) | ~has_cut
    assert torch.equal(scaled >= cut[:, None], stays), dtype
    is_greedy = torch.from_numpy(generator.choice([0, 0, 0, 1], rows).astype(np.int32))
    batch.temperature_S[is_greedy.numpy() > 0] = 0
    inverse = torch.where(is_greedy > 0, 1, inverse)
    slots, last = torch.arange(rows, dtype=torch.int32).flip(0), torch.zeros(rows, dtype=torch.int32)
    columns = [slots, inverse, is_greedy, torch.from_numpy(batch.uniform_S).float(), *filters]
    columns = [column.view(torch.int32) for column in columns]
    numbers, turn = torch.full((3, 2, rows + 2), -7, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    place = torch.tensor([1], dtype=torch.int32)
    TritonSampler(rows, vocab, torch.device("cpu"))(logits, columns, last, numbers, place, (turn, 5))
    expected, scores = sample(logits.float(), batch)
    assert numbers[1, 0, :rows].tolist() == expected.tolist() == last.flip(0).tolist(), dtype
    assert torch.allclose(numbers[1, 1, :rows].view(torch.float32), scores, atol=1e-4)
    assert (numbers[[0, 2]] == -7).all() and (numbers[1, :, rows:] == -7).all() and turn.item() == 0
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_filtered_tokens_are_those_of_the_host() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=280)
