"""Estimators over tokens, groups and the batch, against their papers' formulas in plain Python."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.algorithms import AdvantageBatch, Algorithm, AlgorithmConfig
from rill.algorithms.estimate import advantage_batch
from rill.algorithms.filters import FilterConfig
from rill.errors import InvalidSampleError
from tests.algorithms import reference
from tests.algorithms.batches import Ranks
from tests.algorithms.test_advantages import batch_of, random_rollouts, spread_out, with_end
from tests.algorithms.trajectories import trajectory

seeds = st.integers(0, 10**6)


def algorithm(advantage, **more):
    advantage = advantage if isinstance(advantage, dict) else {"type": advantage}
    return Algorithm(AlgorithmConfig(advantage=advantage, loss="reinforce", **more))


def groups_of(rollouts):
    """Indices by group."""
    found = {}
    for i, r in enumerate(rollouts):
        found.setdefault(r["group"], []).append(i)
    return list(found.values())


def broadcast(rollouts, scalars):
    return [a * m for a, r in zip(scalars, rollouts) for m in r["mask"]]


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_the_group_mean_with_the_batch_deviation_equals_its_formula(seed):
    rollouts = random_rollouts(seed)
    rewards = [r["reward"] for r in rollouts]
    scale = reference.std(rewards) + 1e-6
    expected = [0.0] * len(rollouts)
    for members in groups_of(rollouts):
        centre = reference.mean(rewards[i] for i in members)
        for i in members:
            expected[i] = (rewards[i] - centre) / scale
    found = algorithm("grpo_batch_std").batch_advantages(batch_of(rollouts)).advantages_N
    assert found.tolist() == pytest.approx(broadcast(rollouts, expected), abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_gdpo_standardises_each_part_by_itself_and_then_the_batch(seed):
    rollouts = random_rollouts(seed)
    weights = {"format": 0.5, "accuracy": 2.0}
    total = [0.0] * len(rollouts)
    for name, weight in weights.items():
        for members in groups_of(rollouts):
            values = [rollouts[i]["parts"][name] for i in members]
            if len(set(values)) > 1:
                for i in members:
                    total[i] += (
                        weight
                        * (rollouts[i]["parts"][name] - reference.mean(values))
                        / (reference.std(values) + 1e-6)
                    )
    scale = reference.std(total) + 1e-6
    expected = [(t - reference.mean(total)) / scale for t in total]
    found = algorithm({"type": "gdpo", "weights": weights}).batch_advantages(batch_of(rollouts)).advantages_N
    assert found.tolist() == pytest.approx(broadcast(rollouts, expected), abs=1e-6)


def test_gdpo_tells_apart_what_one_sum_cannot():
    """Two parts, (1, 0) and (0, 1): their sums are equal and GRPO sees nothing; a heavier part decides in GDPO."""
    batch = AdvantageBatch(
        mask_N=torch.ones(2), seq_N=torch.arange(2), num_seqs=2, rewards_S=torch.ones(2),
        group_S=torch.zeros(2, dtype=torch.int64),
        parts_S={"accuracy": torch.tensor([1.0, 0.0]), "format": torch.tensor([0.0, 1.0])},
    )  # fmt: skip
    assert algorithm("grpo").batch_advantages(batch).advantages_N.tolist() == [0, 0]
    weighed = algorithm({"type": "gdpo", "weights": {"accuracy": 2.0, "format": 1.0}})
    found = weighed.batch_advantages(batch).advantages_N
    assert found.tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-4)
    with pytest.raises(InvalidSampleError, match=r"\['speed'\] of the reward, the samples have \['accuracy'"):
        algorithm({"type": "gdpo", "weights": {"speed": 1.0}}).batch_advantages(batch)


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_gpg_makes_up_for_the_groups_that_teach_nothing(seed):
    rollouts = random_rollouts(seed, num_groups=4)
    members = groups_of(rollouts)
    for i in members[0]:
        rollouts[i]["reward"] = 0.3
    rewards = [r["reward"] for r in rollouts]
    alpha = len(rollouts) / (len(rollouts) - len(members[0]))  # B / (B − M)
    expected = [0.0] * len(rollouts)
    for group in members:
        centre = reference.mean(rewards[i] for i in group)
        for i in group:
            expected[i] = 0.0 if group is members[0] else alpha * (rewards[i] - centre) / 2.0
    found = algorithm({"type": "gpg", "scale": 2.0}).batch_advantages(batch_of(rollouts))
    assert found.advantages_N.tolist() == pytest.approx(broadcast(rollouts, expected), abs=1e-7)
    assert float(found.metrics["advantages/alpha"].total) == pytest.approx(alpha)


def turns_of(rollout):
    """[(positions of trained tokens, reward)] of each turn with trained tokens, in order."""
    given, found = with_end(rollout), {}
    for i, m in enumerate(rollout["mask"]):
        if m:
            found.setdefault(rollout["turns"][i], []).append(i)
    return [(places, sum(given[i] for i in places)) for places in found.values()]


def turn_reference(rollouts, form, gamma=1.0, eps=1e-6):
    def standardised(value, values):
        if len(values) == 1:
            return value / (1 + eps)
        return (value - reference.mean(values)) / (reference.std(values) + eps) if np.ptp(values) > 0 else 0.0

    expected = [[0.0] * len(r["mask"]) for r in rollouts]
    for members in groups_of(rollouts):
        turns = {i: turns_of(rollouts[i]) for i in members}
        rewards = {i: [reward for _, reward in turns[i]] for i in members}
        returns = {
            i: [sum(gamma**j * r for j, r in enumerate(rs[k:])) for k in range(len(rs))]
            for i, rs in rewards.items()
        }
        every = [v for vs in (returns if form == "return" else rewards).values() for v in vs]
        for i in members:
            for k, (places, _) in enumerate(turns[i]):
                if form == "process":
                    value = sum(standardised(r, every) for r in rewards[i][k:])
                else:
                    same = [vs[k] for vs in returns.values() if len(vs) > k]
                    value = standardised(returns[i][k], same if len(same) > 1 else every)
                for place in places:
                    expected[i][place] = value
    return [v for row in expected for v in row]


@pytest.mark.parametrize("form", ["return", "process"])
@settings(max_examples=30, deadline=None)
@given(seed=seeds, gamma=st.sampled_from([1.0, 0.5]))
def test_turn_level_advantages_equal_their_formulas(form, seed, gamma):
    rollouts = random_rollouts(seed, group_size=4)
    found = algorithm({"type": "turn", "form": form, "gamma": gamma}).batch_advantages(
        batch_of(rollouts, process=True)
    )
    assert found.advantages_N.tolist() == pytest.approx(turn_reference(rollouts, form, gamma), abs=1e-6)


def returns_of(rollout, gamma):
    rewards = [reward for _, reward in turns_of(rollout)]
    return [sum(gamma**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]


@settings(max_examples=30, deadline=None)
@given(seed=seeds, gamma=st.sampled_from([1.0, 0.5]))
def test_return_to_go_equals_its_formula(seed, gamma):
    rollouts = random_rollouts(seed, group_size=4)
    expected = [[0.0] * len(r["mask"]) for r in rollouts]
    for members in groups_of(rollouts):
        returns = {i: returns_of(rollouts[i], gamma) for i in members}
        whole = {i: returns[i][0] if returns[i] else rollouts[i]["reward"] for i in members}
        for i in members:
            others = [whole[j] for j in members if j != i]
            for (places, _), value in zip(turns_of(rollouts[i]), returns[i]):
                for place in places:
                    expected[i][place] = value - (reference.mean(others) if others else 0.0)
    batch = batch_of(rollouts, process=True)
    found = algorithm({"type": "return_to_go", "gamma": gamma}).batch_advantages(batch).advantages_N
    assert found.tolist() == pytest.approx([v for row in expected for v in row], abs=1e-6)


@pytest.mark.parametrize("kind", ["return_to_go", "turn"])
def test_the_gradient_of_returns_to_go_is_that_of_the_expected_reward(kind):
    """Two choices, by one probability: to go on or not, for 1; having gone on, to be careful or not, for 2. Every pair
    of episodes is played, weighed by its chance. A baseline by the number of the turn has a bias: whoever is alone in
    reaching the second turn is compared with the first turns."""
    p = 0.3
    choices = [("stop",), ("go", "bold"), ("go", "careful")]
    rewards = {"stop": 0.0, "go": 1.0, "bold": 0.0, "careful": 2.0}
    slope = {"stop": -p, "go": 1 - p, "bold": -p, "careful": 1 - p}  # of log π in the logit
    chance = {"stop": 1 - p, "go": p, "bold": 1 - p, "careful": p}
    gradient = 0.0
    for pair in itertools.product(choices, repeat=2):
        moves = [move for episode in pair for move in episode]
        batch = AdvantageBatch(
            mask_N=torch.ones(len(moves)),
            seq_N=torch.tensor([0] * len(pair[0]) + [1] * len(pair[1])),
            num_seqs=2,
            rewards_S=torch.tensor([sum(rewards[m] for m in episode) for episode in pair]),
            group_S=torch.zeros(2, dtype=torch.int64),
            turn_N=torch.tensor([n for episode in pair for n in range(len(episode))]),
            token_rewards_N=torch.tensor([rewards[m] for m in moves]),
        )
        found = algorithm(kind).batch_advantages(batch).advantages_N.tolist()
        weight = math.prod(chance[m] for m in moves)
        gradient += weight * sum(a * slope[m] for a, m in zip(found, moves)) / 2
    # J(θ) = σ(θ) (1 + 2 σ(θ)), both choices by the same logit
    true = p * (1 - p) * (1 + 4 * p)
    assert (gradient == pytest.approx(true, abs=1e-6)) == (kind == "return_to_go")


@settings(max_examples=30, deadline=None)
@given(seed=seeds, scale=st.booleans())
def test_gigpo_compares_turns_that_answer_the_same_observation(seed, scale):
    rollouts, gamma, weight = random_rollouts(seed, group_size=4), 0.5, 2.0
    anchors = [[turn % 2 for turn in r["turns"]] for r in rollouts]

    def against(value, values):
        centred = value - reference.mean(values)
        return centred / (reference.std(values) + 1e-6) if scale and np.ptp(values) > 0 else centred

    expected = [[0.0] * len(r["mask"]) for r in rollouts]
    for members in groups_of(rollouts):
        total = {i: rollouts[i]["reward"] + sum(rollouts[i]["process"]) for i in members}
        totals, met = list(total.values()), {}
        for i in members:
            for (places, _), value in zip(turns_of(rollouts[i]), returns_of(rollouts[i], gamma)):
                met.setdefault(anchors[i][places[0]], []).append((i, places, value))
        for turns in met.values():
            values = [value for _, _, value in turns]
            for i, places, value in turns:
                alone = totals[0] / (1 + 1e-6 * scale)
                whole = against(total[i], totals) if len(totals) > 1 else alone
                for place in places:
                    expected[i][place] = whole + weight * (against(value, values) if len(values) > 1 else 0.0)
    batch = batch_of(rollouts, process=True)
    settings_of = {"type": "gigpo", "gamma": gamma, "weight": weight, "scale": scale}
    found = algorithm(settings_of).batch_advantages(batch).advantages_N
    assert found.tolist() == pytest.approx([v for row in expected for v in row], abs=1e-5)


def test_an_anchor_is_what_lies_before_a_turn_whatever_came_before_it():
    first, second = trajectory("a", turns=(1, 1)), trajectory("b", turns=(1, 1, 1))
    for each, observed in ((first, {3: 7}), (second, {3: 8, 5: 7})):
        for place, token in observed.items():
            each.token_ids[place] = token
    samples = algorithm("gigpo").as_samples([first, second])
    masks = [s.trajectory.loss_mask for s in samples]
    anchors = advantage_batch(samples, masks, FilterConfig()).anchor_N.tolist()
    a, b = anchors[: first.num_tokens], anchors[first.num_tokens :]
    assert a[2] == b[2], "the prompt"
    assert a[4] == b[6] and a[4] != b[4], "the same observation, at another time"


def test_a_turn_is_credited_with_what_came_of_it_and_not_with_what_came_before():
    """Two samples of two turns: rewards (1, 0) and (0, 0). The second turns are alike; only the first differ."""
    batch = AdvantageBatch(
        mask_N=torch.ones(4), seq_N=torch.tensor([0, 0, 1, 1]), num_seqs=2, rewards_S=torch.tensor([1.0, 0.0]),
        group_S=torch.zeros(2, dtype=torch.int64), turn_N=torch.tensor([1, 3, 1, 3]),
        token_rewards_N=torch.tensor([1.0, 0, 0, 0]),
    )  # fmt: skip
    found = algorithm({"type": "turn", "epsilon": 0.0}).batch_advantages(batch).advantages_N
    assert found.tolist() == pytest.approx([math.sqrt(0.5), 0, -math.sqrt(0.5), 0])


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_optimal_token_baselines_weigh_returns_by_the_energy_so_far(seed):
    rollouts = random_rollouts(seed, group_size=4)
    expected = [[0.0] * len(r["mask"]) for r in rollouts]
    for members in groups_of(rollouts):
        on = {i: [p for p, m in enumerate(rollouts[i]["mask"]) if m] for i in members}
        given = {i: with_end(rollouts[i]) for i in members}
        for step in range(max(len(places) for places in on.values())):
            there = [i for i in members if len(on[i]) > step]
            energy = {i: sum(rollouts[i]["energies"][p] for p in on[i][: step + 1]) for i in there}
            to_go = {i: sum(given[i][p] for p in on[i][step:]) for i in there}
            baseline = sum(energy[i] * to_go[i] for i in there) / (sum(energy.values()) + 1e-8)
            for i in there:
                expected[i][on[i][step]] = to_go[i] - baseline
    found = algorithm("optimal_token").batch_advantages(batch_of(rollouts, process=True)).advantages_N
    assert found.tolist() == pytest.approx([v for row in expected for v in row], abs=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, alpha=st.sampled_from([0.05, 0.5, 3.0]))
def test_the_length_adaptive_lambda_and_the_critics_own(seed, alpha):
    rollouts = random_rollouts(seed)
    advantage = {"type": "gae", "length_alpha": alpha, "critic_lam": 1.0, "whiten": False}
    found = algorithm(advantage).batch_advantages(batch_of(rollouts))
    raw, returns = [], []
    for rollout in rollouts:
        rewards = [0.0] * (int(sum(rollout["mask"])) - 1) + [rollout["reward"]]
        values = [v for v, m in zip(rollout["values"], rollout["mask"]) if m]
        lam = max(0.0, 1 - 1 / (alpha * len(values)))
        raw += reference.gae(rewards, values, 0.0, 1.0, lam)
        returns += [rollout["reward"]] * len(values)  # λ = 1, γ = 1: Monte Carlo
    assert found.advantages_N.tolist() == pytest.approx(spread_out(rollouts, raw), abs=1e-7)
    assert found.returns_N.tolist() == pytest.approx(spread_out(rollouts, returns), abs=1e-7)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-sum"])
@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_online_dpo_has_the_gradient_of_dpo_on_the_best_and_the_worst(aggregation, seed):
    """The DPO loss of the pairs, differentiated by autograd, against A · log π."""
    rollouts, beta = random_rollouts(seed, group_size=4), 0.3
    batch = batch_of(rollouts)
    found = algorithm({"type": "online_dpo", "beta": beta}).batch_advantages(batch)
    logp = batch.logprobs_N.clone().requires_grad_()
    ratio = [
        ((logp - batch.ref_logprobs_N) * batch.mask_N)[batch.seq_N == i].sum() for i in range(batch.num_seqs)
    ]
    losses, paired = [], set()
    for members in groups_of(rollouts):
        best = max(members, key=lambda i: rollouts[i]["reward"])
        worst = min(members, key=lambda i: rollouts[i]["reward"])
        paired |= {best, worst}
        losses.append(-torch.nn.functional.logsigmoid(beta * (ratio[best] - ratio[worst])))
    (wanted,) = torch.autograd.grad(torch.stack(losses).mean(), logp)
    assert (~found.left_out_S).nonzero().ravel().tolist() == sorted(paired)
    gradient = -found.advantages_N / len(paired)  # reinforce, divided by the sequences that are trained
    torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=1e-6)


def test_online_dpo_makes_no_pair_of_equal_rewards():
    rollouts = random_rollouts(0, num_groups=1)
    for r in rollouts:
        r["reward"] = 1.0
    found = algorithm("online_dpo").batch_advantages(batch_of(rollouts))
    assert not found.advantages_N.any() and found.left_out_S.all()


def test_online_dpo_makes_no_pair_with_an_answer_that_is_not_trained_on():
    """One cut off and masked has no margin: the best one left would be pushed alone, by a guess."""
    rollouts, beta = random_rollouts(3, num_groups=2, group_size=3), 0.3
    for r, reward in zip(rollouts, [0.0, 1.0, 0.5, 0.0, 1.0, 0.5]):
        r["reward"] = reward
    batch = batch_of(rollouts)
    masked = replace(batch, mask_N=batch.mask_N * (batch.seq_N != 0) * (batch.seq_N < 3))
    found = algorithm({"type": "online_dpo", "beta": beta}).batch_advantages(masked)
    ratio_N = (masked.logprobs_N - masked.ref_logprobs_N) * masked.mask_N
    margin = ratio_N[batch.seq_N == 1].sum() - ratio_N[batch.seq_N == 2].sum()
    push = 2 * beta * torch.sigmoid(-beta * margin)
    assert found.left_out_S.tolist() == [True, False, False, True, True, True]
    for number, wanted in ((1, push), (2, -push)):
        own_N = found.advantages_N[(batch.seq_N == number) & (batch.mask_N > 0)]
        torch.testing.assert_close(own_N, wanted.expand_as(own_N).to(own_N))


def test_rejection_sampling_keeps_the_best_and_forgets_the_rest():
    rollouts = random_rollouts(5, num_groups=2, group_size=4)
    for r, reward in zip(rollouts, [1.0, 0.2, 0.9, 1.0, 0.0, 0.1, 0.2, 0.3]):
        r["reward"] = reward
    every = algorithm({"type": "raft", "threshold": 0.9}).batch_advantages(batch_of(rollouts))
    assert every.left_out_S.tolist() == [False, True, False, False] + [True] * 4
    assert set(every.advantages_N[batch_of(rollouts).mask_N > 0].tolist()) == {0.0, 1.0}
    two = algorithm({"type": "raft", "threshold": 0.0, "keep_best": 2}).batch_advantages(batch_of(rollouts))
    assert two.left_out_S.tolist() == [False, True, True, False, True, True, False, False]


@pytest.mark.parametrize("name", ["grpo_batch_std", "gdpo", "gpg", "turn", "optimal_token", "online_dpo"])
@pytest.mark.parametrize("num_ranks", [2, 4])  # of 4 ranks one has no group
def test_ranks_agree_with_one_process(name, num_ranks):
    rollouts = random_rollouts(9)
    algo = algorithm(name)
    whole = algo.batch_advantages(batch_of(rollouts)).advantages_N
    shares = [[r for r in rollouts if (r["group"] + 3) // 7 % num_ranks == rank] for rank in range(num_ranks)]
    parts = Ranks(num_ranks).run(lambda rank, reduce: algo.batch_advantages(batch_of(shares[rank]), reduce))
    of_whole = {id(r): whole[batch_of(rollouts).seq_N == i].tolist() for i, r in enumerate(rollouts)}
    for share, part in zip(shares, parts):
        for i, r in enumerate(share):
            mine = part.advantages_N[batch_of(share).seq_N == i].tolist()
            assert mine == pytest.approx(of_whole[id(r)], abs=1e-9)
