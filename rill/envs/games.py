"""Games by turns: an observation in text, an answer in text, a reward for every step.

Owned here: how a game is told to a model. Its adapters (gymnasium.py, textarena.py) make a `Game` of a library's
environment; nim.py asks its players itself. Each step runs in a thread, as libraries block.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pydantic import Field

from rill.envs.agent import Agent, Agents
from rill.envs.base import Environment
from rill.envs.reply import Reply
from rill.envs.threads import in_thread
from rill.types import Message, Prompt

SEED = "seed"
"""In a prompt's metadata: of the game. Unset: the group's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the players see after a move."""

    player: str
    """Who is to move next: the name of an agent."""
    observation: str
    """What that player is told: since its last move, or from the start before its first."""
    rewards: Mapping[str, float]
    """By agent, for the move."""
    is_over: bool = False
    is_cut_off: bool = False
    """Over because of a limit and not by the rules."""


class Game(Protocol):
    """One game of one episode."""

    def start(self, seed: int) -> Step: ...

    def move(self, text: str) -> Step:
        """With the answer of the player whose turn it was."""
        ...

    def close(self) -> None: ...


class GameEnvironment(Environment):
    """An environment whose episodes are games."""

    class Config(Environment.Config):
        max_turns: int = Field(default=32, ge=1)
        """Moves of one episode, of all players together; it then ends as cut off."""

    config: Config

    @abstractmethod
    def game(self) -> Game: ...

    async def run(self, task: Prompt, agents: Agents) -> None:
        """Rewards go to the agents as they come. The episodes of a group begin with the same state, by the task's seed
        or the group's: what differs is what the policy does."""
        by_group = hashlib.blake2b(agents.group_id.encode(), digest_size=4).digest()
        seed = int(task.metadata.get(SEED, int.from_bytes(by_group, "little") >> 1))
        game, players = self.game(), dict[str, Player]()
        try:
            step = await in_thread(game.start, seed)
            for _ in range(self.config.max_turns):
                player = players.get(step.player)
                if player is None:
                    player = players[step.player] = Player(agents[step.player], task)
                answer = await player.answer(step.observation)
                step = await in_thread(game.move, answer)
                for name, value in step.rewards.items():
                    agents[name].reward(value)
                if step.is_over:
                    break
            agents.setting.counts.is_cut_off |= step.is_cut_off or not step.is_over
            for agent in agents.values():
                agent.reward(0.0)  # a game without a reward is a game that earned nothing
        finally:
            await in_thread(game.close)


class Player:
    """One side of a game: its conversation, or its text where the task is plain text."""

    def __init__(self, agent: Agent, task: Prompt) -> None:
        self.agent = agent
        self._task = task
        self._messages: list[Message] = list(task.messages)
        self._last: Reply | None = None

    async def answer(self, observation: str, **sampling: Any) -> str:
        if self._messages:
            if self._last is None and self._messages[-1].role == "user":  # roles alternate in most templates
                first = self._messages[-1]
                self._messages[-1] = replace(first, content=f"{first.content}\n\n{observation}")
            else:
                self._messages.append(Message(role="user", content=observation))
            self._last = await self.agent.say(self._messages, **sampling)
            self._messages.append(self._last.message)
        elif self._last is None:
            first_seen = replace(self._task, text=f"{self._task.text}{observation}")
            self._last = await self.agent.generate(first_seen, **sampling)
        else:
            self._last = await self.agent.generate(self._last.then(observation, role="user"), **sampling)
        return self._last.text
