"""The critic: values of states before tokens, and fitting returns."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.errors import TrainingError
from rill.models.loading import ModelConfig, load_model
from rill.training.value import ValueTrainer
from tests.training.tiny import MODEL, algorithm, make_samples


def critic(**values: Any) -> ValueTrainer:
    values = {"model": MODEL, "micro_batch_tokens": 64, "optimizer": {"learning_rate": 3e-3}, **values}
    return ValueTrainer(ValueTrainer.Config(**values), algorithm(value={"clip": None}))


def test_a_fresh_critic_predicts_zero_and_learns_the_returns() -> None:
    t = critic()
    samples = [
        dataclasses.replace(s, values=np.zeros_like(s.advantages), returns=np.full_like(s.advantages, 0.5))
        for s in make_samples()
    ]
    assert all(not v.any() for v in t.values(samples))
    first = t.update(samples)
    for _ in range(20):
        last = t.update(samples)
    assert last["loss"] < 0.2 * first["loss"]
    found = np.concatenate(
        [v[s.trajectory.loss_mask] for v, s in zip(t.values(samples), samples, strict=True)]
    )
    assert abs(found.mean() - 0.5) < 0.2


@pytest.mark.parametrize("values", [{}, {"micro_batch_tokens": 4096}, {"tree_packing": True}], ids=str)
def test_a_value_is_read_at_the_state_before_its_token(values: dict[str, Any]) -> None:
    t = critic(**values)
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    t.engine.module.value_head.weight.data.copy_(weight)
    model = load_model(MODEL, dtype=torch.float32)
    samples = make_samples(5)
    for sample, found in zip(samples, t.values(samples), strict=True):
        ids = torch.tensor(sample.trajectory.token_ids).long()
        hidden = model.base_model(ids[None]).last_hidden_state[0]
        wanted = (hidden[:-1] @ weight[0]).detach().numpy() * sample.trajectory.loss_mask[1:]
        np.testing.assert_allclose(found[1:], wanted, atol=1e-4)


def test_the_critic_can_be_exported_and_loaded_with_its_head(tmp_path: Path) -> None:
    t = critic()
    samples = [
        dataclasses.replace(s, values=np.zeros_like(s.advantages), returns=np.ones_like(s.advantages))
        for s in make_samples()
    ]
    t.update(samples)
    t.export(tmp_path / "critic")
    again = critic(model=ModelConfig(path=str(tmp_path / "critic")))
    for a, b in zip(t.values(samples), again.values(samples), strict=True):
        assert a.any()
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_returns_that_are_not_finite_change_nothing_and_are_an_error_or_a_counted_skip() -> None:
    (sample,) = make_samples(1)
    bad = [dataclasses.replace(sample, values=sample.advantages, returns=np.nan * sample.advantages)]
    with pytest.raises(TrainingError, match="not finite .*returns"):
        critic().update(bad)
    skipping = critic(on_nonfinite="skip")
    assert skipping.update(bad)["skipped_steps"] == 1 and skipping.version == 0


def test_samples_without_returns_are_refused() -> None:
    with pytest.raises(TrainingError, match="compute advantages first"):
        critic().update(make_samples(1))
