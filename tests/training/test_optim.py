"""Optimizers, clipping and schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rill.errors import MissingExtraError
from rill.training.optim import Muon, OptimizerConfig, Slot, orthogonalise
from rill.training.schedule import Schedule
from tests.training.tiny import make_samples, trainer


def test_adamw_takes_the_step_of_torchs_own_on_the_clipped_mean_gradient() -> None:
    values = {"learning_rate": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99), "epsilon": 1e-3}
    t = trainer(optimizer=values, max_grad_norm=0.5)
    samples = make_samples()
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
    metrics = t.apply()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for slot in t.engine.slots:
        torch.testing.assert_close(slot.master, copies[slot.name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("values", [{"type": "muon"}, {"type": "sgd"}, {"offload_state": True}], ids=str)
def test_every_optimizer_lowers_the_loss(values: dict[str, Any]) -> None:
    t = trainer(optimizer={"learning_rate": 2e-2, **values}, num_epochs=4)
    samples = [s for s in make_samples() if s.advantages.max() > 0]
    before = sum(v.sum() for v in t.logprobs(samples, trained_only=True))
    t.update(samples)
    assert sum(v.sum() for v in t.logprobs(samples, trained_only=True)) > before


def test_state_kept_on_the_host_changes_nothing() -> None:
    plain, streamed = trainer(), trainer(optimizer={"learning_rate": 1e-3, "offload_state": True})
    for seed in range(2):
        plain.update(make_samples(seed=seed))
        streamed.update(make_samples(seed=seed))
    for (name, a), (_, b) in zip(plain.named_weights(), streamed.named_weights(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


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


def test_eight_bit_state_without_torchao_gives_the_install_line() -> None:
    try:
        import torchao  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtraError, match="pip install torchao"):
            trainer(optimizer={"type": "adamw8bit"})
    else:
        trainer(optimizer={"type": "adamw8bit"}).update(make_samples())


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
    t = trainer(schedule={"type": "linear", "total_steps": 4}, mini_batches=2)
    assert t.learning_rate == pytest.approx(1e-3)
    t.update(make_samples())
    assert t.learning_rate == pytest.approx(0.5e-3)


def test_a_schedule_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ValidationError, match="total_steps"):
        Schedule(type="cosine")
    with pytest.raises(ValidationError, match="decay_steps"):
        Schedule(type="wsd", total_steps=4)
