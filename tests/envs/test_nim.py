from __future__ import annotations

import re

import pytest

from rill.data.base import DATASETS, open_indexed
from rill.types import Prompt
from tests.envs.scripted import Scripted, environment, play


def heap(count: int) -> Prompt:
    return Prompt(id="p", text=f"{count}:")


def perfect(seen: str) -> str:
    left = int(re.findall(r"(\d+):$", seen)[0])
    return f"{left % 4 or 1};"


async def test_both_sides_are_the_policys_and_have_samples_and_rewards_of_their_own() -> None:
    episode = await play(environment("nim"), Scripted("1;", "3;", "1;", "1;", "2;"), heap(8))
    first, second = episode.samples
    assert episode.rewards == {"first": 1.0, "second": 0.0}
    assert episode.metrics["best_moves"] == pytest.approx(2 / 3), "of 7, 3 and 2, which can be won"
    assert (first.agent, second.agent) == ("first", "second")
    assert [turn.text for turn in second.turns[1:]] == ["3;", "3:", "1;"]
    assert first.turns[2].text == "4:" and first.turns[2].role == "user"
    for sample in episode.samples:
        for turn in sample.turns:
            assert sample.loss_mask[turn.start : turn.end].all() == (turn.role == "assistant")


@pytest.mark.parametrize("said", ["0;", "4;", "x", "3;"])
async def test_what_is_no_move_loses(said: str) -> None:
    episode = await play(environment("nim"), Scripted("3;", said), heap(5))
    assert episode.rewards == {"first": 1.0, "second": 0.0}
    alone = await play(environment("nim"), Scripted("9;"), heap(5))
    assert alone.rewards == {"first": 0.0} and len(alone.samples) == 1


@pytest.mark.parametrize("count", range(5, 21))
async def test_who_makes_no_mistake_wins_every_heap_against_a_perfect_opponent(count: int) -> None:
    env = environment("nim", opponent="perfect")
    assert (await play(env, Scripted(perfect), heap(count))).reward == 1.0
    greedy = (await play(env, Scripted(lambda seen: "1;"), heap(count))).reward
    assert greedy == 0.0 or count in (5, 8), "taking one by one wins nothing but by chance"


def test_a_warm_up_shows_games_of_legal_moves() -> None:
    rows = open_indexed(DATASETS.load("generated").Config(function="rill.envs.nim:make", form="bare"))
    for prompt in (rows[i] for i in range(50)):
        said = f"{prompt.text}{prompt.metadata['solution']}"
        moves = [(int(left), int(taken)) for left, taken in re.findall(r"(\d+):(\d);", said)]
        assert "".join(f"{left}:{taken};" for left, taken in moves) == said
        assert all(1 <= taken <= min(3, left) for left, taken in moves)
