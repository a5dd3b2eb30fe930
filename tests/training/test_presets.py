"""Every preset takes a real step: rewards to advantages to weights, in both precisions, on one rank and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rill.algorithms import PRESETS, Algorithm, AlgorithmConfig, Need
from rill.training.parallel import Rendezvous
from rill.training.policy import PolicyTrainer
from rill.training.score import ScoreModel
from rill.training.value import ValueTrainer
from rill.types import Sample, Trajectory
from tests.training.tiny import MODEL, config, make_samples, run_ranks


def rewarded() -> list[Trajectory]:
    """Two groups of four with rewards of two parts, one answer that failed."""
    rng = np.random.default_rng(3)
    found = []
    for index, sample in enumerate(make_samples(8)):
        parts = {"accuracy": float(index % 2), "format": float(rng.normal())}
        error = "the reward hung" if index == 6 else None
        found.append(replace(sample.trajectory, reward=sum(parts.values()), reward_parts=parts, error=error))
    return found


def one_step(name: str, dtype: str, rendezvous: Rendezvous | None = None) -> tuple[dict[str, float], float]:
    """Metrics of a step as a workflow takes it, and how far it moved the weights."""
    algorithm = Algorithm(AlgorithmConfig.model_validate(name))
    trainer = PolicyTrainer(
        config(compute_dtype=dtype, micro_batch_tokens=64), algorithm, rendezvous=rendezvous
    )
    world = trainer.world
    mine = [t for t in rewarded() if world.data_size == 1 or int(t.group_id[1:]) == world.data_rank]
    greedy = [replace(mine[0], reward=0.5)] if Need.GREEDY_BASELINE in algorithm.needs else []
    samples = algorithm.as_samples(mine, greedy)
    if Need.REWARD_LOGPROBS in algorithm.advantage_needs:
        samples = trainer.scored(samples)
    frozen = ScoreModel(ScoreModel.Config(model=MODEL).following(trainer.config))
    scored = [0.9 * x for x in frozen.logprobs(samples, trained_only=True)]
    if Need.REF_LOGPROBS in algorithm.needs:
        samples = [replace(s, ref_logprobs=x) for s, x in zip(samples, scored, strict=True)]
    if Need.TEACHER_LOGPROBS in algorithm.needs:
        samples = [replace(s, teacher_logprobs=x) for s, x in zip(samples, scored, strict=True)]
    critic = None
    if Need.VALUES in algorithm.needs:
        settings: dict[str, Any] = {"model": MODEL, "compute_dtype": dtype, "micro_batch_tokens": 64}
        critic = ValueTrainer(ValueTrainer.Config(**settings), algorithm)
        samples = [replace(s, values=v) for s, v in zip(samples, critic.values(samples), strict=True)]
    samples, metrics = algorithm.advantages(samples, world.sum_over_data)
    check_failed(samples)
    before = [w.float().clone() for _, w in trainer.named_weights()]
    metrics |= trainer.update(samples)
    if critic is not None:
        assert critic.update(samples)["version"] == 1
    moved = max(
        float((w.float() - b).abs().max()) for (_, w), b in zip(trainer.named_weights(), before, strict=True)
    )
    return metrics, moved


def check_failed(samples: list[Sample]) -> None:
    for sample in samples:
        if sample.trajectory.error is not None:
            assert not sample.trajectory.loss_mask.any() and not sample.advantages.any()


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_takes_a_step(name: str, dtype: str) -> None:
    metrics, moved = one_step(name, dtype)
    assert metrics["version"] == 1 and np.isfinite(metrics["loss"]) and 0 < metrics["grad_norm"] < 1e3
    assert moved > 0 and metrics["samples"] + metrics["skipped_samples"] == 8


def steps_on_a_rank(rendezvous: Rendezvous, names: list[str]) -> dict[str, dict[str, float]]:
    return {name: one_step(name, "float32", rendezvous)[0] for name in names}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_preset_takes_the_same_step_on_two_ranks(tmp_path: Path) -> None:
    names = sorted(PRESETS)
    ranks = run_ranks(tmp_path, 2, "tests.training.test_presets:steps_on_a_rank", names, timeout_s=280)
    for name in names:
        wanted, _ = one_step(name, "float32")
        for rank in ranks:
            for key in ("loss", "grad_norm", "samples", "trained_tokens"):
                assert rank[name][key] == pytest.approx(wanted[key], rel=2e-3, abs=1e-5), (name, key)
