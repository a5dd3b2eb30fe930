from __future__ import annotations

import re

import pytest

from rill.data.base import DATASETS, Split, open_indexed, prompts_of
from rill.envs.gymnasium import find_action
from rill.types import Episode, Failure, Message, Prompt
from tests.data.templates import HERMES, tokenizer_for
from tests.envs.scripted import Scripted, environment, play

pytest.importorskip("gymnasium")

LAKE = {
    "id": "FrozenLake-v1",
    "arguments": {"is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
WAY = ["down", "down", "right", "right", "down", "right"]


async def played(*replies: str, task: Prompt | None = None, **settings: object) -> tuple[Episode, Scripted]:
    policy = Scripted(*replies, tokenizer=tokenizer_for(HERMES), ends="<|im_end|>")
    env = environment("gymnasium", policy.tokenizer, **{**LAKE, **settings})
    return await play(env, policy, task or Prompt(id="p", text="Walk to G.")), policy


async def test_a_game_is_won_step_by_step_in_plain_text() -> None:
    episode, policy = await played(*WAY)
    (sample,) = episode.samples
    assert episode.reward == 1.0 and episode.metrics["turns"] == 6 and not sample.is_truncated
    assert "Walk to G.\n\n[S]FFF" in policy.tokenizer.decode(policy.seen[0])
    assert "(Down)\nSFFF\n[F]HFH" in sample.turns[2].text
    for turn in sample.turns:
        assert sample.loss_mask[turn.start : turn.end].all() == (turn.role == "assistant")


async def test_the_same_as_a_conversation() -> None:
    task = Prompt(id="p", messages=(Message(role="user", content="Walk to G."),))
    episode, policy = await played(*WAY, task=task)
    assert episode.reward == 1.0 and len(episode.samples) == 1 and episode.metrics["rewritten"] == 0
    assert policy.tokenizer.decode(policy.seen[0]).count("<|im_start|>") == 2, "one question with its picture"


async def test_an_answer_that_names_no_action_is_told_and_rewarded_as_set() -> None:
    episode, _ = await played("fly", *WAY, invalid_reward=-0.5)
    sample = episode.samples[0]
    assert episode.reward == 0.5 and "Answer with left, down, right, up" in sample.turns[2].text
    assert sample.rewards is not None and sample.rewards[sample.turns[1].end - 1] == -0.5
    assert sample.rewards.sum() == 0.5


async def test_moves_that_lead_nowhere_are_cut_off() -> None:
    episode, _ = await played(*["up"] * 9, max_turns=5)
    assert episode.samples[0].is_truncated and episode.reward == 0.0 and episode.failure is None


async def test_a_game_that_cannot_be_played_says_why() -> None:
    for settings, said in [
        ({"actions": ["left"]}, "has 4 actions, `actions` names 1"),
        ({"id": "NoSuchGame-v0"}, "NoSuchGame"),
        ({"id": "Pendulum-v1", "arguments": {}, "observation": "value"}, "no numbered actions"),
    ]:
        episode, _ = await played("x", **settings)
        assert episode.failure is Failure.ENVIRONMENT and said in str(episode.error), said


@pytest.mark.parametrize(
    ("text", "names", "action"),
    [
        ("left, no: RIGHT.", ("left", "right"), 1),
        ("leftover", ("left", "right"), None),
        ("turn left", ("left", "turn left"), 1),
        ("I take 3", (), 3),
        ("4", (), None),
        ("", (), None),
    ],
)
def test_the_last_action_that_is_named_counts(text: str, names: tuple[str, ...], action: int | None) -> None:
    assert find_action(text, names, 4) == action


def test_its_data_set_has_seeds_on_two_sides_and_a_warm_up_of_random_games() -> None:
    settings = {**LAKE, "observation": "value", "template": "{observation}:", "form": "bare", "num_seeds": 50}
    config = DATASETS.load("gymnasium").Config(instruction="lake ", end=";", **settings)
    train, held_out = open_indexed(config), open_indexed(config, Split.HELD_OUT)
    seeds = {prompt.metadata["seed"] for side in (train, held_out) for prompt in prompts_of(side)}
    assert len(train) + len(held_out) == len(seeds) == 50
    assert train[0].text == "lake " and train[0] == open_indexed(config)[0]
    assert re.fullmatch(r"0:(left|down|right|up);(\d+:(left|down|right|up);)*", train[3].metadata["solution"])
    one = open_indexed(DATASETS.load("gymnasium").Config(**settings))[3].metadata["solution"]
    assert train[3].metadata["solution"].startswith(f"{one};"), "where nothing but its end ends an answer"


async def test_the_seed_of_a_task_is_that_of_its_game() -> None:
    starts = {
        "arguments": {"is_slippery": False, "desc": ["SSSS", "SHSH", "SSSH", "HSSG"]},
        "observation": "value",
    }
    shown = []
    for seed in (0, 0, 1):
        task = Prompt(id="p", text="Walk.", metadata={"seed": seed})
        _, policy = await played("up", task=task, max_turns=1, **starts)
        shown.append(policy.tokenizer.decode(policy.seen[0]))
    assert shown[0] == shown[1] != shown[2]
