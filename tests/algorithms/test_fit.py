"""What cannot run is refused at configuration time, in one line that says how to mend it."""

import pytest

from rill.algorithms import PRESETS, Algorithm, AlgorithmConfig, Need
from rill.algorithms.fit import check_run
from rill.errors import ConfigError
from rill.types import SamplingParams

WITHOUT_CRITIC = frozenset(
    {
        Need.REF_LOGPROBS,
        Need.REWARD_LOGPROBS,
        Need.TEACHER_LOGPROBS,
        Need.FULL_VOCABULARY_TEACHER,
        Need.GREEDY_BASELINE,
    }
)


def check(algorithm, *, provides=WITHOUT_CRITIC, group_size=8, **more):
    built = Algorithm(AlgorithmConfig.model_validate(algorithm))
    check_run(built, workflow="grpo", provides=provides, group_size=group_size, **more)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_runs_with_or_without_a_critic_and_is_refused_in_the_other(name):
    has_critic = name in ("ppo", "vapo")
    check(name, provides=WITHOUT_CRITIC | {Need.VALUES} if has_critic else WITHOUT_CRITIC)
    with pytest.raises(ConfigError, match="use workflow = 'ppo'" if has_critic else "never asks it"):
        check(name, provides=WITHOUT_CRITIC if has_critic else WITHOUT_CRITIC | {Need.VALUES})


@pytest.mark.parametrize(
    ("algorithm", "lacking", "message"),
    [
        ("reinforce_pp", Need.REWARD_LOGPROBS, "algorithm.kl.place = 'loss'"),
        ({"type": "grpo", "kl": {"coefficient": 0.1}}, Need.REF_LOGPROBS, "algorithm.kl.coefficient = 0"),
        ("distill", Need.TEACHER_LOGPROBS, r"\[\[teachers\]\]"),
        ("remax", Need.GREEDY_BASELINE, "a greedy answer"),
        ("otb", Need.REWARD_LOGPROBS, "scores samples"),
    ],
)
def test_a_workflow_that_lacks_something_says_what_and_how_to_mend_it(algorithm, lacking, message):
    check(algorithm)
    with pytest.raises(ConfigError, match=message):
        check(algorithm, provides=WITHOUT_CRITIC - {lacking})


@pytest.mark.parametrize(
    ("algorithm", "smallest"),
    [("grpo", 2), ("pass_at_k", 4), ({"type": "pass_at_k", "advantage": {"k": 6}}, 6), ("raft", 1)],
)
def test_a_group_too_small_for_its_advantage_is_refused(algorithm, smallest):
    check(algorithm, group_size=smallest)
    if smallest > 1:
        with pytest.raises(ConfigError, match=f"at least {smallest} answers .* group_size is {smallest - 1}"):
            check(algorithm, group_size=smallest - 1)


def test_an_advantage_of_the_first_step_only_is_refused_with_several():
    check("online_dpo", num_steps=1)
    with pytest.raises(ConfigError, match="one optimizer step per batch, got 2"):
        check("online_dpo", num_steps=2)


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}])
def test_sampling_from_less_than_the_whole_distribution_is_refused_in_training(cut):
    check("grpo", sampling=SamplingParams(temperature=0.7))
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(cut))} = "):
        check("grpo", sampling=SamplingParams(**cut))
