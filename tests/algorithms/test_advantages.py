import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rill.algorithms import ADVANTAGES, AdvantageBatch, Algorithm, AlgorithmConfig, Need
from rill.errors import InvalidSampleError, TrainingError
from tests.algorithms import reference
from tests.algorithms.batches import Ranks

rewards_lists = st.lists(st.floats(-5, 5).map(lambda x: round(x, 3)), min_size=1, max_size=8)
GROUP_SCOPED = ["grpo", "dr_grpo", "rloo", "opo", "remax", "pass_at_k", "reward"]
QUIET = {"coefficient": 0.0}


def algorithm(advantage, **more):
    advantage = advantage if isinstance(advantage, dict) else {"type": advantage}
    return Algorithm(AlgorithmConfig(advantage=advantage, loss="clip", **more))


@settings(max_examples=60, deadline=None)
@given(rewards=rewards_lists, seed=st.integers(0, 99))
def test_group_estimators_equal_their_formulas(rewards, seed):
    lengths = [int(n) for n in np.random.default_rng(seed).integers(1, 50, len(rewards))]
    expected = {
        "grpo": reference.grpo(rewards),
        "dr_grpo": reference.dr_grpo(rewards),
        "rloo": reference.rloo(rewards),
        "opo": reference.opo(rewards, lengths),
        "reward": rewards,
        "remax": [r - 0.25 for r in rewards],
    }
    for name, values in expected.items():
        if name == "grpo" and len(rewards) > 1 and np.ptp(rewards) < 1e-3:
            continue  # rounding error over ε; the exact case has its own test
        found = algorithm(name).group_advantages(rewards, lengths, greedy_reward=0.25)
        assert found.tolist() == pytest.approx(values, rel=1e-5, abs=1e-5), name


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=7), k=st.integers(2, 4))
def test_max_at_k_equals_the_sum_over_all_subsets(rewards, k):
    k = min(k, len(rewards))
    found = algorithm({"type": "pass_at_k", "form": "max", "k": k}).group_advantages(rewards)
    assert found.tolist() == pytest.approx(reference.max_at_k(rewards, k), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8), k=st.integers(2, 4))
def test_pass_at_k_training_equals_the_mean_over_all_subsets(rewards, k):
    k = min(k, len(rewards))
    found = algorithm({"type": "pass_at_k", "form": "training", "k": k}).group_advantages(rewards)
    assert found.tolist() == pytest.approx(reference.pass_at_k_training(rewards, k), abs=1e-5)


def test_pass_at_k_best_pushes_only_the_best():
    found = algorithm({"type": "pass_at_k", "form": "best", "epsilon": 0.0}).group_advantages([0.0, 3.0, 1.0])
    assert found.tolist() == pytest.approx([0.0, 2.0 / np.std([0, 3, 1], ddof=1), 0.0])
    assert algorithm({"type": "pass_at_k", "form": "best"}).group_advantages([1.0, 1.0]).tolist() == [
        0.0,
        0.0,
    ]


def test_grpo_by_hand():
    """Rewards 1, 0, 0, 1: mean ½, unbiased standard deviation √(1/3)."""
    found = algorithm({"type": "grpo", "epsilon": 0.0}).group_advantages([1, 0, 0, 1])
    assert found.tolist() == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "pass_at_k"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.3])
def test_equal_rewards_teach_nothing(name, value):
    found = algorithm(name).group_advantages([value] * 6, [3, 1, 4, 1, 5, 9])
    assert np.abs(found).max() < 1e-12


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo"])
def test_a_group_of_one_has_mean_0_and_deviation_1(name):
    assert algorithm(name).group_advantages([2.5], [7]).tolist() == pytest.approx([2.5], rel=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=2, max_size=8),
    shift=st.floats(-3, 3),
)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    for name in ("dr_grpo", "rloo", "opo"):
        algo = algorithm(name)
        moved, lengths = [r + shift for r in rewards], range(3, 3 + len(rewards))
        assert algo.group_advantages(moved, lengths).tolist() == pytest.approx(
            algo.group_advantages(rewards, lengths).tolist(), abs=1e-5
        )


@pytest.mark.parametrize("bad", [[], [1.0, float("nan")], [float("inf"), 0.0], [[1.0], [2.0]]])
def test_bad_rewards_are_refused(bad):
    with pytest.raises(InvalidSampleError, match="reward"):
        algorithm("grpo").group_advantages(bad)


def test_mismatched_lengths_missing_baselines_and_small_groups_are_refused():
    with pytest.raises(InvalidSampleError, match="3 rewards but 2 lengths"):
        algorithm("opo").group_advantages([1, 2, 3], [1, 2])
    with pytest.raises(InvalidSampleError, match="give lengths_G"):
        algorithm("opo").group_advantages([1, 2, 3])
    with pytest.raises(InvalidSampleError, match="greedy"):
        algorithm("remax").group_advantages([1.0, 2.0])
    with pytest.raises(InvalidSampleError, match="at least 4 samples, got 2"):
        algorithm({"type": "pass_at_k", "k": 4}).group_advantages([1.0, 2.0])
    with pytest.raises(InvalidSampleError, match="form 'max'"):
        algorithm({"type": "pass_at_k", "form": "training", "k": 2}).group_advantages([0.5, 1.0])


def test_a_kl_penalty_in_the_reward_needs_more_than_its_group():
    assert algorithm("grpo").is_group_scoped
    assert not algorithm("grpo", kl={"coefficient": 0.1, "place": "reward"}).is_group_scoped


# --- over the batch ---------------------------------------------------------------------------------------


def random_rollouts(seed, num_groups=3, group_size=3):
    rng = np.random.default_rng(seed)
    rollouts = []
    for group in range(num_groups):
        for _ in range(group_size):
            length = int(rng.integers(1, 8))
            mask = (rng.random(length) < 0.75).astype(float)
            mask[rng.integers(length)] = 1.0
            rollouts.append(
                {
                    "group": group * 7 - 3,
                    "reward": float(rng.normal()),
                    "greedy": float(group),
                    "mask": mask.tolist(),
                    "process": (rng.normal(size=length) * mask).tolist(),
                    "values": rng.normal(size=length).tolist(),
                    "logp": (-rng.random(length)).tolist(),
                    "ref": (-rng.random(length)).tolist(),
                    "turns": (np.cumsum(rng.random(length) < 0.3)).tolist(),
                    "energies": rng.random(length).tolist(),
                    "parts": {"format": float(rng.integers(2)), "accuracy": float(rng.integers(2))},
                }
            )
    return rollouts


def batch_of(rollouts, process=False):
    """With `process` the reward is what was given by token, the rest of it at the end."""
    tensor = lambda name: torch.tensor([v for r in rollouts for v in r[name]], dtype=torch.float64)  # noqa: E731
    return AdvantageBatch(
        mask_N=tensor("mask"),
        seq_N=torch.tensor([i for i, r in enumerate(rollouts) for _ in r["mask"]], dtype=torch.int64),
        num_seqs=len(rollouts),
        rewards_S=torch.tensor(
            [r["reward"] + process * sum(r["process"]) for r in rollouts], dtype=torch.float64
        ),
        group_S=torch.tensor([r["group"] for r in rollouts], dtype=torch.int64),
        greedy_rewards_S=torch.tensor([r["greedy"] for r in rollouts], dtype=torch.float64),
        token_rewards_N=torch.tensor([v for r in rollouts for v in with_end(r)], dtype=torch.float64)
        if process
        else None,
        turn_N=tensor("turns").long(),
        anchor_N=tensor("turns").long() % 2,
        energies_N=tensor("energies"),
        parts_S={
            name: torch.tensor([r["parts"][name] for r in rollouts], dtype=torch.float64)
            for name in ("format", "accuracy")
        },
        logprobs_N=tensor("logp"),
        ref_logprobs_N=tensor("ref"),
        values_N=tensor("values"),
    )


def with_end(rollout):
    last = max((i for i, m in enumerate(rollout["mask"]) if m), default=None)
    return [v + (rollout["reward"] if i == last else 0.0) for i, v in enumerate(rollout["process"])]


def token_rewards(rollout, beta, process):
    """Rewards of the trained tokens alone."""
    on = [i for i, m in enumerate(rollout["mask"]) if m]
    rewards = [
        (rollout["process"][i] if process else 0.0) - beta * (rollout["logp"][i] - rollout["ref"][i])
        for i in on
    ]
    rewards[-1] += rollout["reward"]
    return rewards


def spread_out(rollouts, values):
    """Values of trained tokens back among zeros."""
    out, source = [], iter(values)
    for rollout in rollouts:
        out += [next(source) if m else 0.0 for m in rollout["mask"]]
    return out


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    process=st.booleans(),
    whiten=st.booleans(),
)
def test_gae_equals_the_backward_recursion(seed, gamma, lam, process, whiten):
    rollouts = random_rollouts(seed)
    kl = {"coefficient": 0.3, "place": "reward", "estimator": "k1"}
    algo = algorithm({"type": "gae", "gamma": gamma, "lam": lam, "whiten": whiten}, kl=kl)
    found = algo.batch_advantages(batch_of(rollouts, process))
    raw, returns = [], []
    for rollout in rollouts:
        values = [v for v, m in zip(rollout["values"], rollout["mask"]) if m]
        one = reference.gae(token_rewards(rollout, 0.3, process), values, 0.0, gamma, lam)
        raw += one
        returns += [a + v for a, v in zip(one, values)]
    advantages = reference.whiten(raw) if whiten else raw
    assert found.advantages_N.tolist() == pytest.approx(spread_out(rollouts, advantages), abs=1e-7)
    assert found.returns_N.tolist() == pytest.approx(spread_out(rollouts, returns), abs=1e-7)


def test_gae_by_hand():
    """Rewards 0, 0, 1; values ½ each; γ = 1, λ = ½: δ = 0, 0, ½ and A = ⅛, ¼, ½."""
    batch = AdvantageBatch(
        mask_N=torch.ones(3),
        seq_N=torch.zeros(3, dtype=torch.int64),
        num_seqs=1,
        rewards_S=torch.tensor([1.0]),
        values_N=torch.full((3,), 0.5),
    )
    found = algorithm({"type": "gae", "gamma": 1.0, "lam": 0.5, "whiten": False}).batch_advantages(batch)
    assert found.advantages_N.tolist() == [0.125, 0.25, 0.5]
    assert found.returns_N.tolist() == [0.625, 0.75, 1.0]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_both_forms_of_reinforce_pp_equal_their_formulas(seed, gamma):
    rollouts = random_rollouts(seed)
    kl = {"coefficient": 0.2, "place": "reward", "estimator": "k1"}
    found = algorithm({"type": "reinforce_pp", "gamma": gamma}, kl=kl).batch_advantages(batch_of(rollouts))
    raw = [v for r in rollouts for v in reference.reward_to_go(token_rewards(r, 0.2, False), gamma)]
    assert found.advantages_N.tolist() == pytest.approx(spread_out(rollouts, reference.whiten(raw)), abs=1e-7)

    found = algorithm("reinforce_pp_baseline").batch_advantages(batch_of(rollouts))
    centred = []
    for r in rollouts:
        mean = reference.mean(o["reward"] for o in rollouts if o["group"] == r["group"])
        centred += [r["reward"] - mean] * int(sum(r["mask"]))
    assert found.advantages_N.tolist() == pytest.approx(
        spread_out(rollouts, reference.whiten(centred)), abs=1e-7
    )


@pytest.mark.parametrize("name", GROUP_SCOPED)
def test_over_the_batch_group_estimators_give_what_they_give_group_by_group(name):
    rollouts = random_rollouts(4, group_size=5)
    order = np.random.default_rng(0).permutation(len(rollouts))
    rollouts = [rollouts[i] for i in order]
    algo = algorithm(name)
    found = algo.batch_advantages(batch_of(rollouts)).advantages_N
    batch = batch_of(rollouts)
    for group in {r["group"] for r in rollouts}:
        members = [i for i, r in enumerate(rollouts) if r["group"] == group]
        lengths = [sum(rollouts[i]["mask"]) for i in members]
        scalars = algo.group_advantages(
            [rollouts[i]["reward"] for i in members], lengths, rollouts[members[0]]["greedy"]
        )
        for i, scalar in zip(members, scalars):
            mine = found[batch.seq_N == i]
            assert mine.tolist() == pytest.approx([scalar * m for m in rollouts[i]["mask"]], abs=1e-5)


@pytest.mark.parametrize("name", ["gae", "reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])  # of 4 ranks one has no group
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


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_what_untrained_tokens_hold_does_not_matter(name):
    rollouts = random_rollouts(2, group_size=4)
    dirty = [
        {
            **r,
            **{
                field: [v if m else float("nan") for v, m in zip(r[field], r["mask"])]
                for field in ("values", "logp", "ref", "energies")
            },
        }
        for r in rollouts
    ]
    kl = (
        {} if name == "gdpo" else {"kl": {"coefficient": 0.1, "place": "reward"}}
    )  # it does not read the reward
    algo = algorithm(name, **kl)
    clean = algo.batch_advantages(batch_of(rollouts)).advantages_N
    assert torch.equal(algo.batch_advantages(batch_of(dirty)).advantages_N, clean)
    assert clean[batch_of(rollouts).mask_N == 0].abs().sum() == 0


def test_nonsense_batches_are_refused():
    rollouts = random_rollouts(1)
    rollouts[0]["reward"] = float("nan")
    with pytest.raises(InvalidSampleError, match="rewards_S must be finite"):
        algorithm("gae").batch_advantages(batch_of(rollouts))
    rollouts = random_rollouts(1)
    rollouts[0]["values"] = [float("nan")] * len(rollouts[0]["values"])
    with pytest.raises(TrainingError, match="values_N"):
        algorithm("gae").batch_advantages(batch_of(rollouts))
    rollouts = random_rollouts(1)
    rollouts[0]["mask"][-1], rollouts[0]["process"][-1] = 0.0, 1.0
    with pytest.raises(InvalidSampleError, match="untrained token"):
        algorithm("gae").batch_advantages(batch_of(rollouts, process=True))
    rollouts = random_rollouts(1)
    for rollout in rollouts:
        rollout["mask"] = [0.0] * len(rollout["mask"])
    with pytest.raises(TrainingError, match="nothing to whiten"):
        algorithm("reinforce_pp").batch_advantages(batch_of(rollouts))
    with pytest.raises(TrainingError, match="needs values_N"):
        algorithm("gae").batch_advantages(
            AdvantageBatch(
                mask_N=torch.ones(1),
                seq_N=torch.zeros(1, dtype=torch.int64),
                num_seqs=1,
                rewards_S=torch.ones(1),
            )
        )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_a_masked_answer_still_counts_in_its_groups_baseline(name):
    rollouts = random_rollouts(3, num_groups=1, group_size=4)
    rollouts[0]["mask"] = [0.0] * len(rollouts[0]["mask"])
    batch = batch_of(rollouts)
    found = algorithm(name).batch_advantages(batch).advantages_N
    rewards = [r["reward"] for r in rollouts]
    if name == "reinforce_pp_baseline":
        centred = [r - reference.mean(rewards) for r in rewards]
        raw = [c for c, r in zip(centred, rollouts) for m in r["mask"] if m]
        expected = spread_out(rollouts, reference.whiten(raw))
    else:
        scalars = getattr(reference, name)(rewards)
        expected = [a * m for a, r in zip(scalars, rollouts) for m in r["mask"]]
    assert found.tolist() == pytest.approx(expected, abs=1e-7)


def test_interleaved_or_unknown_sequences_are_refused():
    def batch(seq):
        return AdvantageBatch(
            mask_N=torch.ones(4),
            seq_N=torch.tensor(seq),
            num_seqs=2,
            rewards_S=torch.ones(2),
            values_N=torch.ones(4),
        )

    with pytest.raises(InvalidSampleError, match="one after another"):
        algorithm("gae").batch_advantages(batch([0, 1, 0, 1]))
    with pytest.raises(
        InvalidSampleError, match="by their numbers"
    ):  # places in a turn or a group go by them
        algorithm("gae").batch_advantages(batch([1, 1, 0, 0]))
    with pytest.raises(InvalidSampleError, match=r"\[0, 2\), got 0 to 2"):
        algorithm("gae").batch_advantages(batch([0, 0, 1, 2]))


def test_needs_name_what_an_estimator_cannot_do_without():
    assert Need.VALUES in algorithm("gae").needs
    assert Need.GREEDY_BASELINE in algorithm("remax").needs
    assert {Need.REF_LOGPROBS, Need.REWARD_LOGPROBS} <= algorithm(
        "grpo", kl={"coefficient": 1, "place": "reward"}
    ).needs
