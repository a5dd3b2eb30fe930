"""What only a GPU has: the variable-length kernel, compiled layers, the one-pass optimizer, giving memory back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rill.training.policy import PolicyTrainer
from tests.training.tiny import SHAPE, algorithm, config, make_samples

pytestmark = pytest.mark.gpu

WIDE = {**SHAPE, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def gpu_trainer(**values: Any) -> PolicyTrainer:
    values.setdefault("compute_dtype", "bfloat16")
    return PolicyTrainer(config(model={"shape": WIDE}, **values), algorithm(), device="cuda")


@pytest.mark.parametrize("values", [{}, {"tree_packing": True}, {"compile": True}], ids=str)
def test_the_variable_length_kernel_has_the_gradient_of_float32_attention(values: dict[str, Any]) -> None:
    samples = make_samples()
    exact, fast = gpu_trainer(compute_dtype="float32"), gpu_trainer(**values)
    exact.accumulate(samples)
    fast.accumulate(samples)
    wanted, found = exact.engine.gradients(), fast.engine.gradients()
    error = torch.stack([(found[n] - g).norm() for n, g in wanted.items()]).norm()
    assert error < 0.05 * torch.stack([g.norm() for g in wanted.values()]).norm()


@pytest.mark.parametrize("micro_batch_tokens", [4096, 64])
def test_the_one_pass_optimizer_takes_torchs_step(micro_batch_tokens: int) -> None:
    plain = gpu_trainer(micro_batch_tokens=micro_batch_tokens)
    fused = gpu_trainer(
        micro_batch_tokens=micro_batch_tokens, optimizer={"learning_rate": 1e-3, "one_pass": True}
    )
    for seed in range(3):
        plain.update(make_samples(seed=seed))
        fused.update(make_samples(seed=seed))
    for a, b in zip(plain.engine.slots, fused.engine.slots, strict=True):
        assert ((a.master - b.master).abs() < 2e-4).float().mean() > 0.98, a.name
        assert torch.equal(b.template, b.master.to(b.template.dtype)), b.name


def test_offloaded_memory_is_given_back_and_comes_back_bit_for_bit() -> None:
    t = gpu_trainer()
    t.update(make_samples())
    before, held = t.logprobs(make_samples()), torch.cuda.memory_allocated()
    t.offload()
    assert torch.cuda.memory_allocated() < 0.5 * held
    t.onload()
    for a, b in zip(before, t.logprobs(make_samples()), strict=True):
        np.testing.assert_array_equal(a, b)
