from __future__ import annotations

import pytest

from rill.types import Episode, Message, Prompt
from tests.data.templates import HERMES, tokenizer_for
from tests.envs.scripted import Scripted, environment, play

pytest.importorskip("textarena")

TASK = Prompt(id="p", messages=(Message(role="user", content="Play to win."),))


async def played(*replies: str, **settings: object) -> Episode:
    policy = Scripted(*replies, tokenizer=tokenizer_for(HERMES), ends="<|im_end|>")
    return await play(environment("textarena", policy.tokenizer, **settings), policy, TASK)


async def test_a_policy_plays_against_itself_and_each_side_has_its_reward() -> None:
    moves = ("[0]", "[3]", "[1]", "[4]", "[2]")
    episode = await played(*moves, id="TicTacToe-v0", players=["policy", "other"])
    first, second = episode.samples
    assert (first.agent, first.reward, second.agent, second.reward) == ("policy", 1.0, "other", -1.0)
    assert len([turn for turn in first.turns if turn.role == "assistant"]) == 3
    text = tokenizer_for(HERMES).decode(first.token_ids.tolist())
    assert text.count("Play to win.") == 1 and text.count("You are Player 0") == 1, "nothing is told twice"
    assert episode.metrics["rewritten"] == 0


async def test_a_game_for_one_ends_by_its_rules_or_is_cut_off() -> None:
    guesses = [f"[{n}]" for n in range(1, 21)]
    episode = await played(*guesses, id="GuessTheNumber-v0", max_turns=3)
    assert [sample.agent for sample in episode.samples] == ["policy"] and episode.failure is None
