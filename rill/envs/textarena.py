"""TextArena's games for one or several players (`pip install "rill[envs]"`): every player is an agent, so that a policy
plays against itself, or against another model.

    [rollout.env]
    type = "textarena"
    id = "TicTacToe-v0"
    players = ["policy", "other"]
    [rollout.env.agents.other]          # leave it out for self-play: both sides are then trained
    is_trained = false
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rill.envs.games import GameEnvironment, Step
from rill.registry import import_extra


class TextArenaEnvironment(GameEnvironment):
    class Config(GameEnvironment.Config):
        type: Literal["textarena"] = "textarena"
        id: str
        """Of a registered game, e.g. "TicTacToe-v0"."""
        players: tuple[str, ...] = Field(default=("policy",), min_length=1)
        """The agents, in the order of play."""
        arguments: dict[str, Any] = {}
        """Passed to textarena.make."""
        max_turns: int = Field(default=64, ge=1)

    config: Config

    def game(self) -> ArenaGame:
        return ArenaGame(self.config)


class ArenaGame:
    """rill.envs.games.Game over one game of TextArena's."""

    def __init__(self, config: TextArenaEnvironment.Config) -> None:
        textarena = import_extra("textarena", 'textarena is not installed: pip install "rill[envs]"')
        self._players = config.players
        # Without the wrappers that repeat the history in every observation: a conversation has it already.
        name = config.id if config.id.endswith("-raw") else f"{config.id}-raw"
        self._env: Any = textarena.make(name, **config.arguments)
        self._is_over = False

    def start(self, seed: int) -> Step:
        self._env.reset(num_players=len(self._players), seed=seed)
        return self._next()

    def move(self, text: str) -> Step:
        self._is_over, _ = self._env.step(text)
        if not self._is_over:
            return self._next()
        rewards, _ = self._env.close()
        given = {self._players[int(player)]: float(value) for player, value in (rewards or {}).items()}
        return Step(player=self._players[0], observation="", rewards=given, is_over=True)

    def close(self) -> None:
        if not self._is_over:
            self._env.close()

    def _next(self) -> Step:
        player, messages = self._env.get_observation()
        said = "\n".join(str(text) for sender, text, *_ in messages if sender != player)  # not its own words
        return Step(player=self._players[int(player)], observation=said, rewards={})
