from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rill.config import PartConfig
from rill.errors import ConfigError, ModelError
from rill.policies import Policy, open_policy
from rill.policies.base import load_policy
from rill.policies.draws import Draws
from rill.policies.flow import FlowPolicy
from rill.policies.gaussian import GaussianPolicy
from rill.policies.inputs import read, words_of
from rill.policies.squashed import SquashedPolicy
from rill.policies.tokens import TokenPolicy
from rill.types import Observation, RobotSpec

STATE = RobotSpec(state_size=5, action_size=2)
SEEING = RobotSpec(state_size=5, action_size=2, cameras=("front",), image_size=16)
SMALL = {"width": 32, "depth": 1}

POLICIES = {
    "tokens": (TokenPolicy.Config(**SMALL), STATE),
    "tokens, images": (TokenPolicy.Config(**SMALL), SEEING),
    "transformer": (TokenPolicy.Config(body="transformer", **SMALL), SEEING),
    "gaussian": (GaussianPolicy.Config(chunk=3, **SMALL), STATE),
    "squashed": (SquashedPolicy.Config(**SMALL), STATE),
    "flow, sde": (FlowPolicy.Config(chunk=3, **SMALL), STATE),
    "flow, learned noise": (FlowPolicy.Config(chunk=3, noise="learned", **SMALL), STATE),
}


def seen(spec: RobotSpec, count: int, seed: int = 0) -> list[Observation]:
    rng = np.random.default_rng(seed)
    size = spec.image_size
    return [
        Observation(
            state=rng.standard_normal(spec.state_size).astype(np.float32),
            images={name: rng.integers(0, 256, (size, size, 3), np.uint8) for name in spec.cameras},
            instruction=f"go {'left' if n % 2 else 'right'}",
        )
        for n in range(count)
    ]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> Policy:
    config, spec = POLICIES[request.param]
    return open_policy(config, spec, seed=3)


def tensors(latents: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in latents.items()}


def test_the_trainers_logprobs_are_the_rollouts_bit_for_bit_whoever_was_batched_with_whom(
    policy: Policy,
) -> None:
    observations = seen(policy.spec, 70)
    acted = [policy.act(observations[a:b], range(a, b)) for a, b in ((0, 5), (5, 40), (40, 70))]
    told = np.concatenate([decision.logprobs_BJ for decision in acted])
    values = np.concatenate([decision.values_B for decision in acted])
    names = acted[0].latents
    latents = {name: np.concatenate([decision.latents[name] for decision in acted]) for name in names}
    order = np.random.default_rng(0).permutation(70)
    inputs = read([observations[n] for n in order], policy.spec)
    again = policy.evaluate_as_drawn(inputs, tensors({n: latents[n][order] for n in names}))
    assert np.array_equal(again.logprobs_BJ.numpy(), told[order])
    assert np.array_equal(again.values_B.numpy(), values[order])
    assert np.array_equal(policy.values_as_drawn(inputs).numpy(), values[order])


def test_what_is_drawn_depends_on_its_own_seed_and_greedy_on_none(policy: Policy) -> None:
    observations = seen(policy.spec, 4)
    first, same, other = (
        policy.act(observations, seeds) for seeds in ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8])
    )
    assert np.array_equal(first.actions_BJA, same.actions_BJA)
    assert not np.array_equal(first.actions_BJA, other.actions_BJA)
    greedy = [policy.act(observations, seeds, greedy=True).actions_BJA for seeds in ([1] * 4, [2] * 4)]
    if not isinstance(policy, FlowPolicy):  # which begins with noise, also where it follows the field
        assert np.array_equal(*greedy)
    assert np.abs(first.actions_BJA).max() <= 1.0


def test_gradients_reach_every_parameter(policy: Policy) -> None:
    observations = seen(policy.spec, 6)
    decision = policy.act(observations, range(6))
    now = policy.evaluate(read(observations, policy.spec), tensors(decision.latents))
    (now.logprobs_BJ.sum() + now.entropies_BJ.sum() + now.values_B.sum()).backward()
    without = [name for name, parameter in policy.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize("name", ["tokens", "squashed", "flow, sde"])
def test_imitation_brings_the_policy_to_the_expert(name: str) -> None:
    torch.manual_seed(0)
    policy = open_policy(*POLICIES[name], seed=3)
    observations = seen(policy.spec, 16)
    inputs = read(observations, policy.spec)
    chunk, size = policy.config.chunk, policy.spec.action_size
    sides = torch.tensor([0.8 if "left" in o.instruction else -0.8 for o in observations])
    actions = sides[:, None, None].expand(16, chunk, size).contiguous()
    mask = torch.ones(16, chunk)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(200 if isinstance(policy, FlowPolicy) else 40):
        optimizer.zero_grad()
        (policy.imitation_loss(inputs, actions, mask) / 16).backward()
        optimizer.step()
    acted = policy.act(observations, range(16), greedy=True).actions_BJA
    assert np.abs(acted - actions.numpy()).mean() < 0.2


def test_tokens_have_the_probability_that_they_are_drawn_with() -> None:
    policy = open_policy(TokenPolicy.Config(chunk=1, bins=3, **SMALL), RobotSpec(state_size=5, action_size=1))
    with torch.no_grad():
        policy.body.logits.weight.mul_(200.0)  # type: ignore[union-attr, operator]
    (one,) = seen(STATE, 1)
    decision = policy.act([one] * 4000, range(4000))
    tokens = decision.latents["tokens"].ravel()
    for token in range(3):
        chosen = tokens == token
        probability = np.exp(decision.logprobs_BJ.ravel()[chosen][0]) if chosen.any() else 0.0
        assert abs(chosen.mean() - probability) < 0.03
    assert np.exp([decision.logprobs_BJ.ravel()[tokens == t][0] for t in set(tokens)]).sum() == pytest.approx(
        1, abs=1e-3
    )


def test_a_saved_policy_comes_back_and_another_robots_is_refused(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path)
    loaded = load_policy(tmp_path, policy.spec)
    observations = seen(policy.spec, 3)
    acted = [p.act(observations, range(3)).actions_BJA for p in (policy, loaded)]
    assert np.array_equal(*acted)
    with pytest.raises(ConfigError, match="another robot's: its action_size is 2"):
        load_policy(
            tmp_path,
            RobotSpec(
                state_size=5, action_size=7, cameras=policy.spec.cameras, image_size=policy.spec.image_size
            ),
        )
    with pytest.raises(ConfigError, match="states of 5 numbers"):
        policy.act([Observation(state=np.zeros(9, np.float32))], [0])
    with pytest.raises(ModelError, match="holds no policy"):
        load_policy(tmp_path / "nothing")


def test_words_are_looked_up_by_hash_whatever_their_case() -> None:
    assert np.array_equal(words_of("Touch the RED block"), words_of("touch the red block"))
    assert not np.array_equal(words_of("touch the red block"), words_of("touch the blue block"))


def test_a_policy_is_opened_by_its_type() -> None:
    config: PartConfig = GaussianPolicy.Config()
    assert isinstance(open_policy(config, STATE), GaussianPolicy)


class GaussianField(FlowPolicy):
    """The exact field of actions drawn from N(0.5, 0.3²)."""

    def velocity(self, encoded: torch.Tensor, x_BJA: torch.Tensor, time_B: torch.Tensor) -> torch.Tensor:
        t = time_B[:, None, None]
        spread = t**2 + (1 - t) ** 2 * 0.3**2
        off = x_BJA - (1 - t) * 0.5
        noise, action = t * off / spread, 0.5 + (1 - t) * 0.3**2 * off / spread
        return noise - action


def test_the_noisy_step_of_flow_sde_keeps_the_distribution_of_the_flow() -> None:
    config = FlowPolicy.Config(chunk=1, num_steps=50, eta=0.5, **SMALL)
    policy = GaussianField(config, RobotSpec(state_size=5, action_size=1))
    (one,) = seen(STATE, 1)
    encoded = policy.encode(read([one] * 4000, policy.spec))
    actions = policy.decide(encoded, Draws(range(4000)), greedy=False)[0]
    assert actions.mean().item() == pytest.approx(0.5, abs=0.02)
    assert actions.std().item() == pytest.approx(0.3, abs=0.02)


def test_flow_sdes_step_is_the_formula() -> None:
    # t = 0.5, δ = 0.25, η = 0.5: σ = 0.5; x = 1, v = 2: x̂0 = 0, x̂1 = 2;
    # μ = 0.75·0 + (0.25 − 0.25·0.25/1)·2 = 0.375; std = 0.5·√0.25 = 0.25.
    policy = open_policy(
        FlowPolicy.Config(chunk=1, num_steps=4, **SMALL), RobotSpec(state_size=5, action_size=1)
    )
    assert isinstance(policy, FlowPolicy)
    mean, std = policy.step(torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.tensor([0.5]))
    assert (mean.item(), std.item()) == pytest.approx((0.375, 0.25))
    # t = 1: the next t, 0.75, in the denominator: σ = 0.5·√(1/0.25) = 1; x̂0 = −1, x̂1 = 1; μ = −0.25 + (0.75 − 0.125).
    mean, std = policy.step(torch.ones(1, 1, 1), torch.full((1, 1, 1), 2.0), torch.tensor([1.0]))
    assert (mean.item(), std.item()) == pytest.approx((0.375, 0.5))


def test_a_state_that_was_seen_once_has_no_spread_to_be_scaled_by() -> None:
    policy = open_policy(*POLICIES["gaussian"], seed=3)
    states_NS = read(seen(policy.spec, 1), policy.spec).states_BS
    policy.set_normaliser(states_NS, torch.zeros(1, 2))
    decision = policy.act(seen(policy.spec, 4), range(4))
    assert np.isfinite(decision.logprobs_BJ).all() and np.isfinite(decision.actions_BJA).all()
