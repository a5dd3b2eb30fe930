from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rill.algorithms.embodied import EmbodiedAlgorithmConfig, Estimator
from rill.errors import CheckpointError, InvalidSampleError
from rill.policies import open_policy
from rill.policies.tokens import TokenPolicy
from rill.training.robots import RobotTrainer
from rill.types import EmbodiedTrajectory, InitialState, Observation, Observations, RobotSpec

SPEC = RobotSpec(state_size=2, action_size=1)
CONFIG = TokenPolicy.Config(chunk=2, bins=3, width=32, depth=1)


def trainer_of(algorithm: EmbodiedAlgorithmConfig | None = None, **config: float) -> RobotTrainer:
    policy = open_policy(CONFIG, SPEC, seed=1)
    wanted = {"learning_rate": 1e-2, "num_epochs": 2, "num_mini_batches": 2} | config
    return RobotTrainer(RobotTrainer.Config(**wanted), algorithm or EmbodiedAlgorithmConfig(), policy, seed=0)


def episode(
    trainer: RobotTrainer, number: int, *, group: str = "", rewards: bool = True
) -> EmbodiedTrajectory:
    """Two chunks, the last action of which was never executed; paid for tokens that mean "to the right"."""
    rng = np.random.default_rng(number)
    seen = [Observation(state=rng.standard_normal(2).astype(np.float32)) for _ in range(3)]
    decision = trainer.policy.act(seen[:2], [2 * number, 2 * number + 1])
    executed = np.array([[True, True], [True, False]])
    paid = (decision.actions_BJA[..., 0] > 0.5) & executed & rewards
    return EmbodiedTrajectory(
        id=f"e{number}",
        group_id=group or f"g{number}",
        start=InitialState("point", "right", number),
        observations=Observations.of(seen[:2]),
        final=seen[2],
        actions_CJA=decision.actions_BJA,
        executed_CJ=executed,
        latents=decision.latents,
        logprobs_CJ=decision.logprobs_BJ,
        values_C=decision.values_B,
        versions_C=np.ones(2, np.int32),
        rewards_CJ=paid.astype(np.float32),
        terminated=number % 2 == 0,
        truncated=number % 2 == 1,
        success=bool(paid.any()),
    )


@pytest.mark.parametrize("estimator", list(Estimator))
def test_actions_that_are_paid_for_become_likelier(estimator: Estimator) -> None:
    trainer = trainer_of(EmbodiedAlgorithmConfig(estimator=estimator, gamma=0.9), num_epochs=3)

    def share_right() -> float:
        seen = [
            Observation(state=np.random.default_rng(n).standard_normal(2).astype(np.float32))
            for n in range(200)
        ]
        return float((trainer.policy.act(seen, range(200)).actions_BJA > 0.5).mean())

    before = share_right()
    for step in range(8):
        batch = [episode(trainer, 100 * step + n, group=f"{step}/{n // 8}") for n in range(32)]
        metrics = trainer.update(batch)
        assert metrics["mismatch/abs_mean"] == 0.0
    assert share_right() > before + 0.2


def test_what_was_not_executed_changes_nothing() -> None:
    learned = []
    for hidden in (0, 2):
        trainer = trainer_of(num_epochs=1)
        batch = [episode(trainer, n) for n in range(4)]
        for each in batch:
            each.latents["tokens"][1, 1] = hidden
        trainer.update(batch)
        learned.append([parameter.detach().clone() for parameter in trainer.policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*learned, strict=True))


def test_a_batch_of_fewer_chunks_than_mini_batches_is_trained_on() -> None:
    trainer = trainer_of(num_mini_batches=8, num_epochs=1)
    before = [parameter.clone() for parameter in trainer.policy.parameters()]
    metrics = trainer.update([episode(trainer, 0)])
    assert metrics["policy/updates"] == 2 and np.isfinite(list(metrics.values())).all()
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


def test_a_failed_episode_is_never_trained_on() -> None:
    trainer = trainer_of()
    with pytest.raises(InvalidSampleError, match="never trained on"):
        trainer.update([replace(episode(trainer, 0), error="the simulator died")])


def test_a_trainer_that_was_loaded_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = trainer_of()
    first.update([episode(first, n) for n in range(8)])
    first.save(str(tmp_path))
    second = trainer_of()
    second.load(str(tmp_path))
    batch = [episode(first, n) for n in range(8, 16)]
    for trainer in (first, second):
        trainer.update(batch)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(CheckpointError, match="cannot be read"):
        second.load(str(tmp_path / "nothing"))
