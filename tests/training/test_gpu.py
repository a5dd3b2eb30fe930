"""What only a GPU has: packed attention in Triton, compiled layers, one-pass AdamW, giving memory back, nccl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rill.training.parallel import Rendezvous
from rill.training.policy import PolicyTrainer
from tests.training.tiny import SHAPE, algorithm, check_saved_off_the_device, config, make_samples

pytestmark = pytest.mark.gpu

# Heads of 64, which the Triton kernels take, and weights small enough for bf16 to come near float32.
WIDE = {
    **SHAPE,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "initializer_range": 0.05,
}


def gpu_trainer(rendezvous: Rendezvous | None = None, **values: Any) -> PolicyTrainer:
    values.setdefault("compute_dtype", "bfloat16")
    return PolicyTrainer(
        config(model={"shape": WIDE}, **values), algorithm(), device="cuda", rendezvous=rendezvous
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"tree_packing": True},
        {"head_keep_bytes": 0, "head_chunk_bytes": 4096},
        {"compile": True},
        {"compile": True, "activation_memory_budget": 0.5},
    ],
    ids=str,
)
def test_the_fast_path_has_the_gradient_of_float32(values: dict[str, Any]) -> None:
    samples = make_samples()
    exact, fast = gpu_trainer(compute_dtype="float32"), gpu_trainer(**values)
    exact.begin()
    exact.accumulate(samples)
    fast.begin()
    fast.accumulate(samples)
    wanted, found = exact.engine.gradients(), fast.engine.gradients()
    error = torch.stack([(found[n] - g).norm() for n, g in wanted.items()]).norm()
    assert error < 0.05 * torch.stack([g.norm() for g in wanted.values()]).norm()


def test_a_step_has_the_same_bits_each_time() -> None:
    trainers = [gpu_trainer(tree_packing=False) for _ in range(2)]
    for t in trainers:
        t.update(make_samples())
    for a, b in zip(trainers[0].engine.slots, trainers[1].engine.slots, strict=True):
        assert torch.equal(a.master, b.master), a.name


@pytest.mark.parametrize("micro_batch_tokens", [4096, 64])
def test_the_one_pass_optimizer_takes_torchs_step(micro_batch_tokens: int) -> None:
    plain = gpu_trainer(
        micro_batch_tokens=micro_batch_tokens, optimizer={"learning_rate": 1e-3, "one_pass": False}
    )
    fused = gpu_trainer(micro_batch_tokens=micro_batch_tokens, optimizer={"learning_rate": 1e-3})
    assert fused.engine.optimizer.takes_copies and not plain.engine.optimizer.takes_copies
    for seed in range(3):
        plain.update(make_samples(seed=seed))
        fused.update(make_samples(seed=seed))
    for a, b in zip(plain.engine.slots, fused.engine.slots, strict=True):
        # A key's bias changes no probability: its gradient is rounding alone, which Adam makes as large as any other.
        is_rounding = a.name.endswith("k_proj.bias")
        assert is_rounding or ((a.master - b.master).abs() < 2e-4).float().mean() > 0.98, a.name
        assert torch.equal(b.template, b.master.to(b.template.dtype)), b.name


def test_eight_bit_moments_in_one_pass_take_the_step_of_torchs_operations() -> None:
    values = {"learning_rate": 1e-3, "type": "adamw8bit"}
    plain, fused = gpu_trainer(optimizer={**values, "one_pass": False}), gpu_trainer(optimizer=values)
    assert fused.engine.optimizer.takes_copies and not plain.engine.optimizer.takes_copies
    for seed in range(3):
        plain.update(make_samples(seed=seed))
        fused.update(make_samples(seed=seed))
    for a, b in zip(plain.engine.slots, fused.engine.slots, strict=True):
        if "k_proj.bias" in a.name:
            continue  # attention does not depend on it: its gradient is rounding, which Adam takes for a signal
        assert ((a.master - b.master).abs() < 2e-4).float().mean() > 0.98, a.name
        assert torch.equal(b.template, b.master.to(b.template.dtype)), b.name


def test_a_run_with_eight_bit_moments_resumes_bit_for_bit(tmp_path: Path) -> None:
    values: dict[str, Any] = {"optimizer": {"learning_rate": 1e-3, "type": "adamw8bit"}}
    straight = gpu_trainer(**values)
    straight.update(make_samples())
    straight.save(tmp_path)
    straight.wait_saved()
    resumed = gpu_trainer(**values)
    resumed.load(tmp_path)
    for t in (straight, resumed):
        t.update(make_samples(seed=1))
    for a, b in zip(straight.engine.slots, resumed.engine.slots, strict=True):
        assert torch.equal(a.master, b.master), a.name


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_state_on_the_host_changes_no_bit_and_takes_no_device_memory(kind: str, tmp_path: Path) -> None:
    values = {"learning_rate": 1e-3, "type": kind, "one_pass": False}
    plain, streamed = (
        gpu_trainer(optimizer={**values, "offload_state": is_streamed}) for is_streamed in (False, True)
    )
    for seed in range(3):
        plain.update(make_samples(seed=seed))
        streamed.update(make_samples(seed=seed))
    for a, b in zip(plain.engine.slots, streamed.engine.slots, strict=True):
        assert torch.equal(a.master, b.master), a.name
    for state in streamed.engine.optimizer.state_tensors().values():
        assert all(v.device.type == "cpu" and v.is_pinned() for v in state.values() if v.ndim > 0)
    streamed.save(tmp_path)
    streamed.wait_saved()
    resumed = gpu_trainer(optimizer={**values, "offload_state": True})
    resumed.load(tmp_path)
    for t in (plain, resumed):
        t.update(make_samples(seed=5))
    for a, b in zip(plain.engine.slots, resumed.engine.slots, strict=True):
        assert torch.equal(a.master, b.master), a.name


def test_offloaded_memory_is_given_back_and_comes_back_bit_for_bit() -> None:
    t = gpu_trainer()
    t.update(make_samples())
    before, held = t.logprobs(make_samples()), torch.cuda.memory_allocated()
    num_bytes = 14 * sum(s.master.numel() for s in t.engine.slots)  # master, two moments, copy
    for _ in range(2):
        t.offload()
        assert torch.cuda.memory_allocated() <= held - num_bytes
        t.onload()
    for a, b in zip(before, t.logprobs(make_samples()), strict=True):
        np.testing.assert_array_equal(a, b)
    again = gpu_trainer()
    again.update(make_samples())
    assert t.update(make_samples(seed=1))["loss"] == again.update(make_samples(seed=1))["loss"]


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_one_that_left_its_device_is_saved_from_where_it_lies(tmp_path: Path, kind: str) -> None:
    values = {"optimizer": {"learning_rate": 1e-3, "type": kind}}
    check_saved_off_the_device(
        lambda: gpu_trainer(**values), lambda t: t.offload(), tmp_path, rests=kind != "adamw8bit"
    )


@pytest.mark.parametrize("leaves", [False, True], ids=["the next step", "offload"])
def test_a_checkpoint_is_copied_beside_training_and_holds_the_state_of_its_moment(
    tmp_path: Path, leaves: bool
) -> None:
    t = gpu_trainer()
    memory: list[int] = []
    for turn in range(3):
        t.update(make_samples(seed=turn))
        masters = {slot.name: slot.master.clone() for slot in t.engine.slots}
        t.save(tmp_path)
        if leaves:
            t.offload()
            t.onload()
        else:
            t.update(make_samples(seed=9))
        t.wait_saved()
        again = gpu_trainer()
        again.load(tmp_path)
        for slot in again.engine.slots:
            assert torch.equal(slot.master, masters[slot.name]), slot.name
        pinned = t._checkpointer._staging._pinned
        memory.append(sum(buffer.data_ptr() for buffer in pinned.values()))
        assert pinned and all(buffer.is_pinned() for buffer in pinned.values())
    assert len(set(memory)) == 1, "made once and used again"


def test_one_rank_of_nccl_trains_like_a_process_alone(tmp_path: Path) -> None:
    alone = gpu_trainer()
    rendezvous = Rendezvous(init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout_s=60.0)
    ranked = gpu_trainer(rendezvous)
    try:
        assert dist.get_backend() == "nccl"
        total = torch.full((1,), 3.0, device="cuda")
        dist.all_reduce(total)
        assert total.item() == 3.0
        wanted, found = alone.update(make_samples()), ranked.update(make_samples())
        assert found["loss"] == wanted["loss"] and found["grad_norm"] == wanted["grad_norm"]
    finally:
        ranked.close()


def test_a_sequence_has_the_same_log_probabilities_wherever_it_lies_in_the_row() -> None:
    t, samples = gpu_trainer(), make_samples()
    together, apart = t.logprobs([*samples, samples[0]]), t.logprobs(samples[:1])
    np.testing.assert_array_equal(together[0], together[-1])
    np.testing.assert_allclose(together[0], apart[0], atol=2e-2)
