"""A game for two that a policy learns by playing itself: from a heap, take one, two or three; who takes the last wins.

    first     13: │ 1; │ 10: │ 2; │ …        each player reads how many are left, and says how many it takes
    second    12: │ 2; │  8: │ …

Both players are agents of the policy's, with samples and baselines of their own. `opponent = "perfect"` plays against
one that makes no mistake, from heaps that can be won: what self-play is measured by.
"""

from __future__ import annotations

import random
from typing import Literal

from rill.envs.agent import Agent, Agents
from rill.envs.base import Environment
from rill.envs.games import Player
from rill.types import Prompt

MAX_TAKEN = 3
HEAPS = (1, 12)
"""Smallest and largest."""
END = ";"
"""Of a move."""
BLANK = Prompt(id="nim", text="")
"""What players know before they are told of the heap."""


class Nim(Environment):
    class Config(Environment.Config):
        type: Literal["nim"] = "nim"
        opponent: Literal["itself", "perfect"] = "itself"

    config: Config

    async def run(self, task: Prompt, agents: Agents) -> None:
        left = int(str(task.text).removesuffix(":"))
        if self.config.opponent == "perfect":
            agents.policy.reward(await _against_perfect(agents.policy, left))
            return
        mover, other = Player(agents["first"], BLANK), Player(agents["second"], BLANK)
        num_won, num_taken = 0, 0
        while left > 0 and (moved := await _move(mover, left)) is not None:
            num_won += left % (MAX_TAKEN + 1) > 0
            num_taken += moved == left % (MAX_TAKEN + 1)
            left -= moved
            mover, other = other, mover
        other.agent.reward(1.0)  # it took the last one, or was answered by what is no move
        mover.agent.reward(0.0)
        if num_won:
            agents.metrics["best_moves"] = num_taken / num_won


async def _move(player: Player, left: int) -> int | None:
    """How many it takes; None: what it said is no move."""
    text = (await player.answer(f"{left}:", stop=[END])).removesuffix(END)
    return int(text) if text in ("1", "2", "3") and int(text) <= left else None


async def _against_perfect(agent: Agent, left: int) -> float:
    """1: the agent has won."""
    player = Player(agent, BLANK)
    if left % (MAX_TAKEN + 1) == 0:
        left -= 1
    while (moved := await _move(player, left)) is not None:
        left -= moved
        if left == 0:
            return 1.0
        left -= left % (MAX_TAKEN + 1) or 1
        if left == 0:
            return 0.0
    return 0.0


def make(index: int, seed: int) -> Prompt:
    """A heap, and what one side of a game of random moves looks like for a warm-up: data.type = "generated"."""
    rng = random.Random(f"nim/{seed}/{index}")
    heap = left = rng.randint(*HEAPS)
    said = ""
    while left > 0:
        moved = rng.randint(1, min(MAX_TAKEN, left))
        said += f"{left}:{moved}{END}"
        left -= moved
        left -= rng.randint(1, min(MAX_TAKEN, left)) if left else 0
    solution = said.partition(":")[2]
    return Prompt(id=f"nim/{index}", text=f"{heap}:", task="nim", metadata={"solution": solution})
