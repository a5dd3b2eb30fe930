"""Optimizers, clipping and schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional

from rill.training.blockwise import decode, encode
from rill.training.muon import Muon, orthogonalise
from rill.training.schedule import Schedule
from rill.training.slots import OptimizerConfig, Slot
from tests.training.tiny import make_samples, trainer


def test_adamw_takes_the_step_of_torchs_own_on_the_clipped_mean_gradient() -> None:
    values = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "epsilon": 1e-3}
    t = trainer(optimizer=values, max_grad_norm=0.5)
    samples = make_samples()
    t.begin()
    t.accumulate(samples)
    gradients = t.engine.gradients()
    count = sum(int(s.trajectory.loss_mask[1:].sum()) for s in samples)
    copies = {s.name: s.master.clone() for s in t.engine.slots}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm() / count
    reference = torch.optim.AdamW(
        [
            {"params": [c for c in copies.values() if c.ndim >= 2], "weight_decay": 0.1},
            {"params": [c for c in copies.values() if c.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.99),
        eps=1e-3,
    )
    for name, copy in copies.items():
        copy.grad = gradients[name] / count * min(1.0, 0.5 / float(norm))
    reference.step()
    metrics = t.finish()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for slot in t.engine.slots:
        torch.testing.assert_close(slot.master, copies[slot.name], atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "values", [{"type": "muon"}, {"type": "sgd"}, {"type": "adamw8bit"}, {"offload_state": True}], ids=str
)
def test_every_optimizer_lowers_the_loss(values: dict[str, Any]) -> None:
    t = trainer(optimizer={"learning_rate": 2e-2, **values}, num_epochs=4)
    samples = [s for s in make_samples() if s.advantages.max() > 0]
    before = sum(v.sum() for v in t.logprobs(samples, trained_only=True))
    t.update(samples)
    assert sum(v.sum() for v in t.logprobs(samples, trained_only=True)) > before


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_state_kept_on_the_host_changes_nothing(kind: str) -> None:
    values = {"learning_rate": 1e-3, "type": kind}
    plain, streamed = trainer(optimizer=values), trainer(optimizer={**values, "offload_state": True})
    start = {n: w.clone() for n, w in plain.named_weights()}
    for seed in range(2):
        plain.update(make_samples(seed=seed))
        streamed.update(make_samples(seed=seed))
    for (name, a), (_, b) in zip(plain.named_weights(), streamed.named_weights(), strict=True):
        # Not to the bit: torch's AdamW takes the place of the C++ one, and Muon iterates in bfloat16.
        assert (a - b).norm() <= 0.02 * (a - start[name]).norm(), name


def test_muon_is_for_decoder_matrices_and_its_update_is_orthogonal() -> None:
    t = trainer(optimizer={"type": "muon", "learning_rate": 1e-3})
    matrices = {s.name for s in t.engine.slots if s.is_matrix}
    assert "lm.model.layers.0.mlp.up_proj.weight" in matrices
    assert not any("embed" in n or "norm" in n for n in matrices)
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(24, 40)).float())
    assert singular.min() > 0.6 and singular.max() < 1.3
    master = torch.zeros(24, 40)
    master.grad = torch.randn(24, 40)
    Muon([Slot("w", master, master, True)], OptimizerConfig(learning_rate=0.1)).step()
    assert master.square().mean().sqrt() == pytest.approx(0.1 * 0.2, rel=0.4)


def test_codes_are_near_and_coding_again_changes_nothing() -> None:
    torch.manual_seed(0)
    values = torch.randn(40, 100) * torch.logspace(-9, 3, 4000).view(40, 100)
    values[3] = 0.0
    for is_signed in (True, False):
        exact = values if is_signed else values.abs()
        codes, scales = encode(exact, is_signed=is_signed)
        found = decode(codes, scales, is_signed=is_signed)
        assert codes.dtype == torch.uint8 and codes.shape == exact.shape and len(scales) == 16
        assert torch.equal(found == 0, exact == 0) and torch.equal(found.sign(), exact.sign())
        largest = functional.pad(exact.flatten(), (0, 96)).view(16, 256).abs().amax(1)
        torch.testing.assert_close(scales, largest, rtol=0, atol=0)
        block_max = scales.repeat_interleave(256)[:4000].view(40, 100)
        near = exact.abs() > 0.1 * block_max
        assert ((found - exact).abs()[near] <= 0.016 * block_max[near]).all()
        again, same = encode(found, is_signed=is_signed)
        assert torch.equal(again, codes) and torch.equal(same, scales)


def test_eight_bit_adamw_goes_nearly_where_adamw_goes() -> None:
    plain, coded = trainer(), trainer(optimizer={"learning_rate": 1e-3, "type": "adamw8bit"})
    start = {s.name: s.master.clone() for s in plain.engine.slots}
    for seed in range(6):
        plain.update(make_samples(seed=seed))
        coded.update(make_samples(seed=seed))
    for a, b in zip(plain.engine.slots, coded.engine.slots, strict=True):
        moved, apart = (a.master - start[a.name]).norm(), (a.master - b.master).norm()
        assert apart < 0.1 * moved, (a.name, float(apart / moved))
    states = coded.engine.optimizer.state_tensors()
    matrix = states["lm.model.layers.0.mlp.up_proj.weight"]
    assert sum(t.nbytes for t in matrix.values()) < 2.1 * matrix["exp_avg"].numel()
    assert states["lm.model.norm.weight"]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"type": "constant", "warmup_steps": 4}, {0: 0.25, 3: 1.0, 100: 1.0}),
        ({"type": "linear", "total_steps": 10}, {0: 1.0, 5: 0.5, 10: 0.0, 20: 0.0}),
        ({"type": "cosine", "total_steps": 10, "final": 0.1}, {0: 1.0, 5: 0.55, 10: 0.1}),
        (
            {"type": "wsd", "total_steps": 10, "decay_steps": 4, "warmup_steps": 2},
            {0: 0.5, 6: 1.0, 8: 0.5, 10: 0.0},
        ),
    ],
    ids=str,
)
def test_schedules_pass_through_their_points(values: dict[str, Any], expected: dict[int, float]) -> None:
    schedule = Schedule(**values)
    for step, factor in expected.items():
        assert schedule.factor(step) == pytest.approx(factor), step


def test_the_rate_follows_the_schedule_over_optimizer_steps() -> None:
    t = trainer(schedule={"type": "linear", "total_steps": 4}, num_mini_batches=2)
    assert t.learning_rate == pytest.approx(1e-3)
    t.update(make_samples())
    assert t.learning_rate == pytest.approx(0.5e-3)


def test_a_schedule_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ValidationError, match="total_steps"):
        Schedule(type="cosine")
    with pytest.raises(ValidationError, match="decay_steps"):
        Schedule(type="wsd", total_steps=4)
