from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rill.algorithms.embodied import EmbodiedAlgorithmConfig
from rill.errors import ConfigError
from rill.policies import open_policy
from rill.policies.gaussian import GaussianPolicy
from rill.policies.squashed import SquashedPolicy
from rill.training.sac import ReplayBuffer, SACTrainer, transitions
from rill.types import EmbodiedTrajectory, InitialState, Observation, Observations, RobotSpec

SPEC = RobotSpec(state_size=2, action_size=1)


def trainer_of(**config: float) -> SACTrainer:
    policy = open_policy(SquashedPolicy.Config(width=32), SPEC, seed=0)
    wanted = {"learning_rate": 1e-2, "warm_up": 50, "batch_size": 64, "updates_per_action": 0.5} | config
    return SACTrainer(SACTrainer.Config(**wanted), EmbodiedAlgorithmConfig(gamma=0.9), policy, seed=0)


def episode(trainer: SACTrainer, number: int, *, terminated: bool = True) -> EmbodiedTrajectory:
    """Three actions; each is paid by how close it comes to 0.7."""
    rng = np.random.default_rng(number)
    seen = [Observation(state=rng.standard_normal(2).astype(np.float32)) for _ in range(4)]
    decision = trainer.policy.act(seen[:3], [3 * number, 3 * number + 1, 3 * number + 2])
    return EmbodiedTrajectory(
        id=f"e{number}",
        group_id=f"g{number}",
        start=InitialState("point", "right", number),
        observations=Observations.of(seen[:3]),
        final=seen[3],
        actions_CJA=decision.actions_BJA,
        executed_CJ=np.ones((3, 1), bool),
        latents=decision.latents,
        logprobs_CJ=decision.logprobs_BJ,
        values_C=decision.values_B,
        versions_C=np.ones(3, np.int32),
        rewards_CJ=1.0 - np.abs(decision.actions_BJA[..., 0] - 0.7),
        terminated=terminated,
        truncated=not terminated,
        success=False,
    )


def test_sac_finds_the_action_that_pays() -> None:
    trainer = trainer_of()
    seen = [
        Observation(state=np.random.default_rng(n).standard_normal(2).astype(np.float32)) for n in range(64)
    ]
    before = trainer.policy.act(seen, range(64), greedy=True).actions_BJA
    for step in range(6):
        metrics = trainer.update([episode(trainer, 100 * step + n) for n in range(16)])
    after = trainer.policy.act(seen, range(64), greedy=True).actions_BJA
    assert np.abs(after - 0.7).mean() < 0.25 < np.abs(before - 0.7).mean()
    assert metrics["replay/size"] == 6 * 16 * 3 and metrics["policy/updates"] == 24.0


def test_only_termination_ends_a_value_and_the_last_step_leads_to_the_final_observation() -> None:
    trainer = trainer_of()
    whole, cut = episode(trainer, 0), episode(trainer, 1, terminated=False)
    rows = transitions([whole, cut], SPEC)
    assert rows["ends"].tolist() == [0, 0, 1, 0, 0, 0]
    assert np.array_equal(rows["next_states"][2], whole.final.state)
    assert np.array_equal(rows["next_states"][0], whole.observations[1].state)
    assert np.array_equal(rows["next_states"][5], cut.final.state)


def test_a_full_buffer_forgets_the_oldest() -> None:
    trainer = trainer_of()
    buffer = ReplayBuffer(4, SPEC, 16)
    rows = transitions([episode(trainer, 0), episode(trainer, 1)], SPEC)
    buffer.add(rows)
    assert buffer.size == 4 and np.array_equal(
        np.sort(buffer.columns["rewards"]), np.sort(rows["rewards"][2:])
    )


def test_a_squashed_logprob_is_the_density_of_the_action() -> None:
    policy = open_policy(SquashedPolicy.Config(width=32), RobotSpec(state_size=2, action_size=1), seed=0)
    decision = policy.act([Observation(state=np.zeros(2, np.float32))] * 8_000, range(8_000))
    actions, logprobs = decision.actions_BJA.ravel(), decision.logprobs_BJ.ravel()
    counts, edges = np.histogram(actions, bins=10, range=(-0.9, 0.9))
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        inside = (actions >= low) & (actions < high)
        assert count / len(actions) == pytest.approx(np.exp(logprobs[inside]).mean() * (high - low), rel=0.15)


@pytest.mark.parametrize("capacity", [200_000, 50], ids=["with room", "full"])
def test_a_loaded_trainer_goes_on_bit_for_bit_with_its_buffer(tmp_path: Path, capacity: int) -> None:
    first = trainer_of(capacity=capacity)
    first.update([episode(first, n) for n in range(20)])
    first.save(str(tmp_path))
    second = trainer_of(capacity=capacity)
    second.load(str(tmp_path))
    batch = [episode(first, n) for n in range(20, 24)]
    for trainer in (first, second):
        torch.manual_seed(1)
        trainer.update(batch)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("capacity", [3, 8])
def test_a_buffer_that_is_loaded_into_one_of_another_size_keeps_the_newest(
    tmp_path: Path, capacity: int
) -> None:
    first = trainer_of(capacity=5, warm_up=0)
    episodes = [episode(first, n) for n in range(3)]
    first.update(episodes)
    first.save(str(tmp_path))
    second = trainer_of(capacity=capacity, warm_up=0)
    second.load(str(tmp_path))
    rewards = transitions(episodes, SPEC)["rewards"][-5:][-capacity:]
    assert second.buffer is not None and second.buffer.size == len(rewards)
    assert sorted(second.buffer.columns["rewards"][: len(rewards)]) == sorted(rewards)


def test_a_policy_that_sac_cannot_learn_is_refused() -> None:
    policy = open_policy(GaussianPolicy.Config(), SPEC)
    with pytest.raises(ConfigError, match="policy.type = 'squashed'"):
        SACTrainer(SACTrainer.Config(), EmbodiedAlgorithmConfig(), policy)


def test_a_buffer_that_never_gets_warm_is_refused() -> None:
    with pytest.raises(ValueError, match="warm_up 1000 is above capacity 500"):
        SACTrainer.Config(capacity=500)


def test_an_update_that_is_not_finite_changes_nothing_and_shows() -> None:
    trainer = trainer_of(warm_up=0)
    endless = np.full_like(episode(trainer, 0).rewards_CJ, np.inf)
    metrics = trainer.update([replace(episode(trainer, n), rewards_CJ=endless) for n in range(4)])
    assert not np.isfinite(metrics["grad_norm"])
    for module in (trainer.policy, trainer.critics, trainer.targets):
        assert all(torch.isfinite(p).all() for p in module.parameters())
