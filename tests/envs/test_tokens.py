from __future__ import annotations

import numpy as np
import pytest

from rill.envs.tokens import TokenTree
from rill.errors import InvalidSampleError
from rill.inference.base import Completion
from rill.types import Trajectory
from tests.envs.scripted import completion


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def samples(tree: TokenTree) -> list[Trajectory]:
    return tree.rewarded(tree.samples("s", group_id="g", prompt_id="p"))


def test_observations_stay_out_of_the_loss() -> None:
    tree = TokenTree()
    root = tree.observe(None, ids(1, 2), role="prompt")
    asked = tree.sample(root, completion([3, 4], version=5), "ask", is_trained=True)
    told = tree.observe(asked, ids(7, 8, 9), role="tool", text="told")
    tree.sample(told, completion([5], version=6), "answer", is_trained=True)
    (sample,) = samples(tree)
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 7, 8, 9, 5]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert sample.versions.tolist() == [-1, -1, 5, 5, -1, -1, -1, 6]
    assert sample.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, 0, -0.5]
    assert sample.turn_ids.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]
    assert [(t.role, t.start, t.end, t.text) for t in sample.turns] == [
        ("prompt", 0, 2, ""), ("assistant", 2, 4, "ask"), ("tool", 4, 7, "told"), ("assistant", 7, 8, "answer"),
    ]  # fmt: skip


def test_a_sampled_node_that_two_branches_share_trains_once() -> None:
    tree = TokenTree()
    first = tree.sample(tree.observe(None, ids(1), role="prompt"), completion([2]), "a", is_trained=True)
    for token in (3, 4):
        tree.sample(tree.observe(first, ids(token), role="user"), completion([9]), "b", is_trained=True)
    one, other = samples(tree)
    assert (one.id, other.id) == ("s.0", "s.1")
    assert one.token_ids.tolist() == [1, 2, 3, 9] and one.loss_mask.tolist() == [0, 1, 0, 1]
    assert other.token_ids.tolist() == [1, 2, 4, 9] and other.loss_mask.tolist() == [0, 0, 0, 1]


def test_an_observation_that_nobody_answered_is_no_sample_of_its_own() -> None:
    tree = TokenTree()
    first = tree.sample(tree.observe(None, ids(1), role="prompt"), completion([2]), "a", is_trained=True)
    tree.observe(first, ids(3), role="tool")
    (sample,) = samples(tree)
    assert sample.token_ids.tolist() == [1, 2]


def test_token_ids_are_found_again_wherever_they_go_on() -> None:
    tree = TokenTree()
    root = tree.grow(ids(1, 2))
    assert tree.grow(ids(1, 2)) is root
    said = tree.sample(root, completion([3, 4]), "", is_trained=True)
    after = tree.grow(ids(1, 2, 3, 4, 5))
    assert after.parent is said and after.token_ids.tolist() == [5] and tree.num_rewritten == 0
    tree.sample(after, completion([6]), "", is_trained=True)
    changed = tree.grow(ids(1, 2, 3, 9, 9))
    assert changed.parent is root and changed.token_ids.tolist() == [3, 9, 9] and tree.num_rewritten == 1
    assert tree.grow(ids(8, 8)).parent is None


def test_the_digest_is_of_the_tokens_and_not_of_how_they_were_cut() -> None:
    one, other = TokenTree(), TokenTree()
    whole = one.observe(None, ids(1, 2, 3, 4), role="prompt")
    said = other.sample(other.observe(None, ids(1, 2), role="prompt"), completion([3]), "", is_trained=True)
    assert other.observe(said, ids(4), role="tool").digest == whole.digest
    assert other.observe(said, ids(5), role="tool").digest != whole.digest


class TestRewards:
    def two_turns(self) -> TokenTree:
        tree = TokenTree()
        first = tree.sample(
            tree.observe(None, ids(1), role="prompt"), completion([2, 3]), "", is_trained=True
        )
        tree.reward(0.25)
        tree.sample(tree.observe(first, ids(4), role="tool"), completion([5]), "", is_trained=True)
        return tree

    def test_a_reward_at_the_end_needs_no_tokens(self) -> None:
        tree = TokenTree()
        tree.sample(tree.observe(None, ids(1), role="prompt"), completion([2]), "", is_trained=True)
        tree.reward(1.0)
        (sample,) = samples(tree)
        assert sample.reward == 1.0 and sample.rewards is None

    def test_what_stands_behind_a_token_is_what_came_after_it(self) -> None:
        tree = self.two_turns()
        tree.reward(1.0)
        (sample,) = samples(tree)
        assert sample.reward == 1.25 and sample.rewards is not None
        assert sample.rewards.tolist() == [0, 0, 0.25, 0, 1.0]

    def test_a_turn_can_be_rewarded_later(self) -> None:
        tree = self.two_turns()
        tree.reward(2.0, at=tree.nodes[1])
        (sample,) = samples(tree)
        assert sample.rewards is not None and sample.rewards.tolist() == [0, 0, 2.25, 0, 0]

    def test_a_history_that_goes_on_elsewhere_earns_what_came_then(self) -> None:
        tree = self.two_turns()
        summary = tree.observe(None, ids(7), role="prompt")
        tree.sample(summary, completion([8]), "", is_trained=True)
        tree.reward(1.0)
        before, after = samples(tree)
        assert before.reward == after.reward == 1.25
        assert before.rewards is not None and before.rewards.tolist() == [0, 0, 0.25, 0, 1.0]
        assert after.rewards is not None and after.rewards.tolist() == [0.25, 1.0], (
            "0.25 came before its turn"
        )


def test_what_no_engine_may_say_is_refused() -> None:
    def sampled(said: Completion) -> None:
        tree = TokenTree()
        tree.sample(tree.observe(None, ids(1), role="prompt"), said, "", is_trained=True)
        samples(tree)

    with pytest.raises(InvalidSampleError, match="version -1"):
        sampled(completion([2], version=-1))
    bad = completion([2, 3])
    object.__setattr__(bad, "logprobs", np.array([0.0, np.nan], dtype=np.float32))
    with pytest.raises(InvalidSampleError, match="not finite"):
        sampled(bad)
    object.__setattr__(bad, "logprobs", np.zeros(1, dtype=np.float32))
    with pytest.raises(InvalidSampleError, match="1 log-probabilities"):
        sampled(bad)


def test_paths_that_part_leave_each_others_tokens_alone() -> None:
    tree = TokenTree()
    prompt = ids(1, 2)
    root = tree.observe(None, prompt, role="prompt")
    one = tree.observe(root, ids(3), role="user")
    seen = one.all_ids()
    other = tree.observe(root, ids(4), role="user")
    ends = [tree.observe(node, ids(*range(10, 10 + 400)), role="user") for node in (one, other, one)]
    assert seen.tolist() == one.all_ids().tolist() == [1, 2, 3] and prompt.tolist() == [1, 2]
    assert [end.all_ids().tolist()[:4] for end in ends] == [[1, 2, 3, 10], [1, 2, 4, 10], [1, 2, 3, 10]]
    assert all(end.all_ids().tolist()[3:] == list(range(10, 410)) for end in ends)


def test_routed_experts_are_laid_along_the_tokens() -> None:
    tree = TokenTree()
    first = completion([3, 4])
    object.__setattr__(first, "routed_experts", np.full((4, 2, 1), 7, dtype=np.int16))  # prompt included
    said = tree.sample(tree.observe(None, ids(1, 2), role="prompt"), first, "", is_trained=True)
    tree.sample(tree.observe(said, ids(9), role="tool"), completion([5]), "", is_trained=True)
    experts = samples(tree)[0].routed_experts
    assert experts is not None and experts[:, 0, 0].tolist() == [7, 7, 7, 7, -1, -1]
