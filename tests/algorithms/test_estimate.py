"""From trajectories to samples with advantages: where rewards land, what failed, who is compared with whom."""

from dataclasses import replace

import numpy as np
import pytest

from rill.algorithms import Algorithm, AlgorithmConfig, DropReason, Need, Scope
from rill.errors import InvalidSampleError
from rill.types import StopReason
from tests.algorithms import reference
from tests.algorithms.batches import Ranks
from tests.algorithms.trajectories import rewards_at, trajectory


def algorithm(**settings):
    return Algorithm(AlgorithmConfig.model_validate(settings))


def filled(algo, *trajectories, greedy=()):
    samples, _ = algo.advantages(algo.as_samples(trajectories, greedy))
    assert [s.trajectory.id for s in samples] == [t.id for t in trajectories]
    return samples


def scalars(samples):
    """The one advantage of each sample, on its trained tokens and nowhere else."""
    found = []
    for s in samples:
        values = set(s.advantages[s.trajectory.loss_mask].tolist())
        assert len(values) <= 1 and not s.advantages[~s.trajectory.loss_mask].any()
        found.append(values.pop() if values else None)
    return found


FAILED = {"error": "the reward timed out"}


def test_what_failed_is_in_no_baseline_and_in_no_loss():
    members = [
        trajectory("a", reward=1.0),
        trajectory("b", reward=0.0),
        trajectory("c", reward=0.0, **FAILED),
    ]
    samples = filled(algorithm(type="grpo"), *members)
    assert scalars(samples)[:2] == pytest.approx(reference.grpo([1.0, 0.0]))
    assert not samples[2].trajectory.loss_mask.any() and not samples[2].advantages.any()


def test_what_failed_is_trained_with_the_reward_it_carries_where_asked():
    shown = trajectory("b", turns=(2, 3), **FAILED)
    shown = replace(shown, loss_mask=shown.loss_mask & (shown.turn_ids == 3))
    members = [trajectory("a", reward=1.0), shown]
    asked = algorithm(type="rloo", filters={"train_failed": True})
    samples = filled(asked, *members)
    assert scalars(samples) == pytest.approx([1.0, -1.0]) and asked.keep(members).keep
    assert samples[1].trajectory.loss_mask.tolist() == shown.loss_mask.tolist(), "and no turn that is not"


def test_the_lone_survivor_of_a_group_is_not_trained_as_if_its_baseline_were_0():
    members = [trajectory("a", reward=1.0), trajectory("b", **FAILED), trajectory("c", **FAILED)]
    assert algorithm(type="grpo").keep(members).reason is DropReason.FAILED
    assert scalars(filled(algorithm(type="grpo"), *members)) == [None] * 3
    # REINFORCE with the reward itself compares nothing and needs no second one.
    alone = algorithm(type="grpo", advantage={"type": "reward"})
    assert alone.keep(members).keep and scalars(filled(alone, *members))[0] == 1.0


def test_a_group_smaller_than_k_by_failures_is_dropped_and_no_traceback():
    members = [*(trajectory(f"t{i}", reward=float(i)) for i in range(3)), trajectory("f", **FAILED)]
    assert algorithm(type="pass_at_k").keep(members).reason is DropReason.FAILED
    assert scalars(filled(algorithm(type="pass_at_k"), *members)) == [None] * 4


def test_dynamic_sampling_looks_at_the_reward_before_the_penalty_for_length():
    """All answers are right and differ in length only: DAPO drops the group, whatever the penalty makes of it."""
    overlong = {"limit_tokens": 4, "buffer_tokens": 4}
    algo = algorithm(type="dapo", filters={"overlong": overlong})
    members = [trajectory("a", reward=1.0, turns=(2,)), trajectory("b", reward=1.0, turns=(4,))]
    assert algo.keep(members).reason is DropReason.EQUAL_REWARDS
    # In the advantage it counts: 1 − 0.5 against 1 − 1.
    assert scalars(filled(algo, *members)) == pytest.approx(reference.grpo([0.5, 0.0]), rel=1e-5)
    assert [t.reward for t in members] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["dr_grpo", "lite_ppo", "return_to_go"])
def test_an_episode_of_several_samples_is_punished_for_its_longest_wherever_that_stands(name):
    """As a whole, like a reward: the summary before an over-long answer led to it."""
    overlong = {"limit_tokens": 8, "buffer_tokens": 4}
    algo = algorithm(type=name, kl={"coefficient": 0.0}, filters={"overlong": overlong})

    def found(*turns):
        members = [trajectory(f"a.{n}", turns=(turn,), episode_id="a") for n, turn in enumerate(turns)]
        return [s.advantages[-1] for s in filled(algo, *members, trajectory("b", reward=0.0))]

    assert found(2, 8) == pytest.approx(found(8, 8)) and found(2, 8)[0] < 0 < found(2, 8)[2]
    assert found(8, 2) == pytest.approx(found(8, 8))
    assert found(3, 3) == [0, 0, 0], "two short ones are no long one"


def test_dynamic_sampling_can_look_at_one_part_of_the_reward():
    members = [
        trajectory("a", reward=1.1, reward_parts={"accuracy": 1.0, "format": 0.1}),
        trajectory("b", reward=1.0, reward_parts={"accuracy": 1.0, "format": 0.0}),
    ]
    assert algorithm(type="dapo").keep(members).keep
    by_accuracy = algorithm(type="dapo", filters={"metric": "accuracy"})
    assert by_accuracy.keep(members).reason is DropReason.EQUAL_REWARDS
    with pytest.raises(InvalidSampleError, match=r"'speed' is no part .*\['accuracy', 'format'\]"):
        algorithm(type="dapo", filters={"metric": "speed"}).keep(members)


def test_a_failed_answer_that_is_trained_on_has_nothing_of_the_parts_that_it_lacks():
    members = [
        trajectory("a", reward=1.1, reward_parts={"accuracy": 1.0, "format": 0.1}),
        trajectory("b", error="the reward hung", reward_parts={"format": 0.1}),
        trajectory("c", error="broken"),
    ]
    filters = {"metric": "accuracy", "train_failed": True}
    assert algorithm(type="dapo", filters=filters).keep(members).keep
    assert algorithm(type="dapo", filters=filters).keep(members[1:]).reason is DropReason.EQUAL_REWARDS
    advantage = {"type": "gdpo", "weights": {"accuracy": 1.0, "format": 1.0}}
    found = filled(algorithm(advantage=advantage, filters=filters), *members)
    assert found[0].advantages[-1] > found[1].advantages[-1] > found[2].advantages[-1]
    # Also where no answer was scored at all.
    for settings in (advantage, {"type": "gdpo"}):
        found = filled(algorithm(advantage=settings, filters=filters), *members[1:])
        assert found[0].advantages[-1] > 0 > found[1].advantages[-1]
        found = filled(algorithm(advantage=settings, filters=filters), *2 * members[2:])
        assert scalars(found) == [0.0, 0.0]


def test_a_group_of_several_agents_is_judged_by_the_first_of_each_episode():
    def member(episode, agent, **parts):
        return trajectory(
            f"{episode}:{agent}", agent=agent, episode_id=episode, reward=0.5, reward_parts=parts
        )

    right, wrong = member("a", "policy", accuracy=1.0), member("b", "policy", accuracy=0.0)
    by_accuracy = algorithm(type="dapo", filters={"metric": "accuracy"})
    assert by_accuracy.keep([right, member("a", "helper"), wrong, member("b", "helper")]).keep
    alike = [right, member("a", "helper"), member("b", "policy", accuracy=1.0), member("b", "helper")]
    assert by_accuracy.keep(alike).reason is DropReason.EQUAL_REWARDS


def test_a_cut_off_answer_is_not_trained_on_and_still_counts_in_the_baseline():
    members = [trajectory("a", reward=1.0), trajectory("b", stop_reason=StopReason.LENGTH)]
    found = scalars(filled(algorithm(type="rloo", filters={"mask_truncated": True}), *members))
    assert found == [1.0, None]
    assert scalars(filled(algorithm(type="rloo"), *members)) == [1.0, -1.0]
    # OPO weighs it by the length it had.
    by_length = algorithm(type="opo", filters={"mask_truncated": True})
    members = [
        trajectory("a", reward=1.0, turns=(1,)),
        trajectory("b", turns=(3,), stop_reason=StopReason.LENGTH),
    ]
    assert scalars(filled(by_length, *members)) == [0.75, None]


def test_a_group_of_an_agent_that_is_not_trained_ends_no_run():
    """Another model's answers are data: they weigh nothing, and nothing is compared with them."""
    mask = np.zeros(5, bool)
    members = [
        trajectory("a", reward=1.0),
        trajectory("b", reward=0.0),
        trajectory("a'", reward=2.0, agent="helper", loss_mask=mask),
        trajectory("b'", reward=3.0, agent="helper", loss_mask=mask),
    ]
    assert scalars(filled(algorithm(type="opo"), *members)) == [0.5, -0.5, None, None]


def test_an_episode_of_several_samples_counts_once_and_all_of_them_get_its_advantage():
    members = [
        trajectory("a", reward=1.0, episode_id="e0", turns=(2,)),
        trajectory("b", reward=1.0, episode_id="e0", turns=(5,)),
        trajectory("c", reward=0.0, episode_id="e1"),
    ]
    assert scalars(filled(algorithm(type="dr_grpo"), *members)) == [0.5, 0.5, -0.5]
    # OPO's length of an episode is that of all its samples: baseline 7/10.
    assert scalars(filled(algorithm(type="opo"), *members)) == pytest.approx([0.3, 0.3, -0.7])
    batch_std = scalars(filled(algorithm(type="lite_ppo"), *members))
    assert batch_std == pytest.approx(
        [0.5 / np.std([1, 0], ddof=1)] * 2 + [-0.5 / np.std([1, 0], ddof=1)], rel=1e-5
    )
    equal = [replace(t, reward=1.0) for t in members]
    assert algorithm(type="dapo").keep(equal).reason is DropReason.EQUAL_REWARDS


@pytest.mark.parametrize("name", ["dr_grpo", "gpg", "lite_ppo", "gigpo"])
def test_an_episode_pays_for_the_kl_of_all_its_samples_on_all_of_them(name):
    settings = {"gigpo": {"advantage": {"scale": False, "weight": 0.0}}}.get(name, {})
    algo = algorithm(type=name, kl={"coefficient": 0.5, "place": "reward", "estimator": "k1"}, **settings)
    members = [
        trajectory("a", reward=1.0, episode_id="e0"),
        trajectory("b", reward=1.0, episode_id="e0"),
        trajectory("c", reward=0.0, episode_id="e1"),
    ]
    samples = []
    for s, kl in zip(algo.as_samples(members), (0.0, 0.2, 0.0), strict=True):
        zeros = np.zeros(5, np.float32)
        samples.append(replace(s, old_logprobs=zeros, ref_logprobs=zeros - np.float32(kl)))
    found, _ = algo.advantages(samples)
    # 1 − ½ · 3 · 0.2 against 0
    scale = 1.0 if name != "lite_ppo" else np.std([0.7, 0.0], ddof=1)
    assert scalars(found) == pytest.approx(np.array([0.35, 0.35, -0.35]) / scale, rel=1e-5)


def test_agents_of_one_group_have_baselines_of_their_own():
    members = [
        trajectory("a", reward=1.0, agent="seller"),
        trajectory("b", reward=0.0, agent="seller"),
        trajectory("c", reward=10.0, agent="buyer"),
        trajectory("d", reward=20.0, agent="buyer"),
    ]
    assert scalars(filled(algorithm(type="dr_grpo"), *members)) == [0.5, -0.5, -5.0, 5.0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "name", ["grpo", "return_to_go", "gigpo", "reinforce_pp_baseline", "lite_ppo", "gpg"]
)
def test_two_agents_of_an_episode_each_count_once_in_their_own_group(name, size):
    """Not half each: two episodes would be a group of one, which has no baseline."""
    algo = algorithm(type=name, kl={"coefficient": 0.0})
    rewards = np.random.default_rng(2).normal(size=(size, 2))

    def found(**episodes):
        members = [
            trajectory(
                f"{e}:{agent}", reward=float(rewards[e, a]), agent=agent, episode_id=f"{e}{episodes[agent]}"
            )
            for e in range(size)
            for a, agent in enumerate(("one", "two"))
        ]
        return scalars(filled(algo, *members))

    assert found(one="", two="") == pytest.approx(found(one="", two="'s own"), abs=1e-6)
    if name == "return_to_go":
        of_one = found(one="", two="")[::2]
        assert of_one == pytest.approx(reference.rloo(rewards[:, 0].tolist()), abs=1e-6)


def test_return_to_go_compares_with_other_episodes_as_a_whole_however_many_samples_they_gave():
    """A branch begins late and earns what came then; neither it nor its siblings are in its own baseline."""
    given = rewards_at(6, at3=1.0, at5=1.0)
    first = trajectory("x.0", reward=2.0, turns=(2, 1), episode_id="x", rewards=given)
    branch = trajectory(
        "x.1", reward=2.0, turns=(2, 1), episode_id="x", rewards=given, loss_mask=np.arange(6) == 5
    )
    samples = filled(algorithm(type="return_to_go"), first, branch, trajectory("y", reward=0.5))
    assert samples[0].advantages.tolist() == [0, 0, 2 - 0.5, 2 - 0.5, 0, 1 - 0.5]
    assert samples[1].advantages.tolist() == [0, 0, 0, 0, 0, 1 - 0.5]
    assert samples[2].advantages.tolist() == [0, 0, *[0.5 - 2] * 3]


def test_rewards_land_on_the_last_trained_token_up_to_where_they_were_given():
    """Tokens: 2 of the prompt, a turn at 2–4, an observation at 5, a turn at 6–7. The observation's reward belongs to
    the first turn; what was given before the first trained token to nobody here."""
    member = trajectory("a", turns=(3, 2), reward=7.0, rewards=rewards_at(8, at1=1.0, at5=2.0, at7=4.0))
    plain = algorithm(type="reinforce_pp", kl={"coefficient": 0.0}, advantage={"gamma": 1.0})
    batch = plain.batch_advantages  # the whitened values hide the sums: look at the batch itself
    from rill.algorithms.estimate import advantage_batch

    made = advantage_batch(plain.as_samples([member]), [member.loss_mask], plain.config.filters)
    assert made.token_rewards_N.tolist() == [0, 0, 0, 0, 2, 0, 0, 4]
    assert made.rewards_S.tolist() == [7.0] and batch(made).advantages_N.shape == (8,)
    second_branch = replace(member, loss_mask=np.array([0, 0, 0, 0, 0, 0, 1, 1], bool))
    made = advantage_batch(plain.as_samples([second_branch]), [second_branch.loss_mask], plain.config.filters)
    assert made.token_rewards_N.tolist() == [0, 0, 0, 0, 0, 0, 0, 4]


def test_gae_sees_rewards_by_turn():
    zeros = np.zeros(8, np.float32)
    member = trajectory("a", turns=(3, 2), reward=6.0, rewards=rewards_at(8, at4=2.0, at7=4.0))
    algo = algorithm(type="ppo", kl={"coefficient": 0.0}, advantage={"lam": 1.0, "whiten": False})
    samples = [replace(s, values=zeros) for s in algo.as_samples([member])]
    (sample,), _ = algo.advantages(samples)
    assert sample.advantages.tolist() == [0, 0, 6, 6, 6, 0, 4, 4]
    assert sample.returns.tolist() == sample.advantages.tolist()
    assert algo.scope is Scope.SAMPLE and algo.advantage_needs == {Need.VALUES} and not algo.is_group_scoped


def test_a_chunk_with_nothing_to_train_on_is_no_error():
    """A rank may have no part of a chunk, or only what failed."""
    for name in ("ppo", "grpo", "turn", "raft"):
        more = {"advantage": {"whiten": False}, "kl": {"coefficient": 0.0}} if name == "ppo" else {}
        algo = algorithm(type=name, **more)
        assert algo.advantages([])[0] == []
        failed = [
            replace(s, values=np.zeros(5, np.float32)) for s in algo.as_samples([trajectory("a", **FAILED)])
        ]
        (sample,), _ = algo.advantages(failed)
        assert not sample.advantages.any() and not sample.trajectory.loss_mask.any()


def test_failed_samples_have_returns_too_so_that_a_critic_takes_the_batch_as_it_is():
    algo = algorithm(type="ppo", kl={"coefficient": 0.0})
    members = [trajectory("a", reward=1.0), trajectory("b", reward=0.5), trajectory("c", **FAILED)]
    samples = [replace(s, values=np.zeros(5, np.float32)) for s in algo.as_samples(members)]
    found, metrics = algo.advantages(samples)
    assert not found[2].returns.any() and not found[2].trajectory.loss_mask.any()
    assert "value/explained_variance" in metrics


def test_the_greedy_baseline_pays_for_its_length_as_the_answers_do():
    overlong = {"limit_tokens": 4, "buffer_tokens": 4}
    members = [trajectory("a", reward=1.0, turns=(1,)), trajectory("b", reward=0.0, turns=(2,))]
    greedy = [trajectory("greedy", reward=1.0, turns=(4,))]
    remax = algorithm(type="remax", filters={"overlong": overlong})
    # 1 − ¼ and 0 − ½ against 1 − 1.
    assert scalars(filled(remax, *members, greedy=greedy)) == pytest.approx([0.75, -0.5])
    in_reward = algorithm(type="remax", kl={"coefficient": 0.1, "place": "reward"})
    assert not in_reward.is_group_scoped and in_reward.scope is Scope.GROUP
    zeros = [np.zeros(len(t.token_ids), np.float32) for t in members]
    samples = [
        replace(s, old_logprobs=z, ref_logprobs=z)
        for s, z in zip(in_reward.as_samples(members, greedy), zeros, strict=True)
    ]
    found, metrics = in_reward.advantages(samples)
    assert scalars(found) == [0.0, -1.0] and metrics["policy/kl_ref"] == 0.0


def test_advantages_over_ranks_are_those_of_one_process_and_metrics_are_means_over_all():
    rng = np.random.default_rng(0)
    members = [
        trajectory(f"t{i}", reward=float(rng.normal()), group=f"g{i // 3}", turns=(int(rng.integers(1, 6)),))
        for i in range(12)
    ]
    algo = algorithm(type="reinforce_pp", kl={"coefficient": 0.2})
    samples = []
    for s in algo.as_samples(members):
        length = s.num_tokens
        samples.append(
            replace(
                s,
                old_logprobs=-rng.random(length).astype("f4"),
                ref_logprobs=-rng.random(length).astype("f4"),
            )
        )
    whole, wanted = algo.advantages(samples)
    shares = [samples[:3], [], samples[3:]]
    parts = Ranks(3).run(lambda rank, reduce: algo.advantages(shares[rank], reduce))
    found = [s for share, _ in parts for s in share]
    for a, b in zip(found, whole, strict=True):
        np.testing.assert_allclose(a.advantages, b.advantages, atol=1e-6)
    assert all(metrics["policy/kl_ref"] == pytest.approx(wanted["policy/kl_ref"]) for _, metrics in parts)


def test_advantages_of_a_group_do_not_depend_on_the_chunk_it_comes_in():
    rng = np.random.default_rng(1)
    groups = [[trajectory(f"{g}{i}", reward=float(rng.normal()), group=g) for i in range(4)] for g in "abc"]
    for name in ("grpo", "dr_grpo", "opo", "turn", "raft", "pass_at_k"):
        algo = algorithm(type=name)
        assert algo.is_group_scoped, name
        together = filled(algo, *(t for g in groups for t in g))
        apart = [s for g in groups for s in filled(algo, *g)]
        for a, b in zip(together, apart, strict=True):
            np.testing.assert_array_equal(a.advantages, b.advantages)
            np.testing.assert_array_equal(a.trajectory.loss_mask, b.trajectory.loss_mask)


def test_estimators_that_whiten_declare_the_batch():
    for name in ("ppo", "reinforce_pp", "reinforce_pp_baseline", "gdpo", "gpg", "lite_ppo"):
        assert algorithm(type=name).scope is Scope.BATCH, name
