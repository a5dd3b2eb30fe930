"""OpenEnv's environments, over their own protocol (`pip install "rill[envs]"`); nothing of OpenEnv is needed here.

    [rollout.env]
    type = "openenv"
    url = "http://127.0.0.1:8000"       # of the environment's server, here or in a container
    action = "message"                  # the field of its action that takes the model's answer
    observation = "text"                # the field of its observation that the model is shown

One connection to an episode: the server keeps the state of a session behind it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rill.envs.games import GameEnvironment, Step
from rill.registry import import_extra


class OpenEnvEnvironment(GameEnvironment):
    class Config(GameEnvironment.Config):
        type: Literal["openenv"] = "openenv"
        url: str = Field(pattern=r"^(http|ws)s?://")
        """Of the environment's server."""
        action: str = ""
        """The action's field that takes the whole answer. Empty: the answer holds the action, as a JSON object."""
        observation: str = ""
        """The observation's field that is shown. Empty: all of it, as JSON."""
        arguments: dict[str, Any] = {}
        """Passed to reset, beside the seed."""
        invalid_reward: float = 0.0
        """For an answer without an action, or with one that the server refuses; the episode goes on."""
        step_timeout_s: float = Field(default=60.0, gt=0)
        """For one answer of the server."""

    config: Config

    def game(self) -> OpenEnvGame:
        return OpenEnvGame(self.config)


class Refused(Exception):
    """An action that does not fit the environment's schema."""


class OpenEnvGame:
    """rill.envs.games.Game over one session of a server's."""

    def __init__(self, config: OpenEnvEnvironment.Config) -> None:
        needs = 'OpenEnv servers need websockets: pip install "rill[envs]"'
        self._connect = import_extra("websockets.sync.client", needs).connect
        self._closed: type[Exception] = import_extra("websockets.exceptions", needs).ConnectionClosed
        self._config = config
        self._connection = contextlib.ExitStack()
        self._socket: Any = None
        self._is_closed = False

    def start(self, seed: int) -> Step:
        address = re.sub("^http", "ws", self._config.url.rstrip("/"))
        timeout_s = self._config.step_timeout_s
        try:
            self._socket = self._connection.enter_context(
                self._connect(f"{address}/ws", open_timeout=timeout_s, max_size=1 << 26, proxy=None)
            )
        except OSError as error:
            raise ConnectionError(f"there is no OpenEnv server at {self._config.url}: {error}") from error
        if self._is_closed:  # the episode was ended meanwhile: its session would take a place for ever
            self.close()
            raise ConnectionError("the episode is over")
        return self._step(self._ask("reset", {"seed": seed, **self._config.arguments}))

    def move(self, text: str) -> Step:
        try:
            return self._step(self._ask("step", self._action(text)))
        except Refused as refused:
            said = f"That is no action: {refused}"
            return Step(player="policy", observation=said, rewards={"policy": self._config.invalid_reward})

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(Exception), self._connection:  # it is over, whatever the connection says
            if self._socket is not None:
                self._socket.send(json.dumps({"type": "close"}))

    def _ask(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        # A server that closes has said why: it is read below, where the end of the connection raises otherwise.
        with contextlib.suppress(self._closed):
            self._socket.send(json.dumps({"type": what, "data": data}))
        answer = json.loads(self._socket.recv(self._config.step_timeout_s))
        said = answer.get("data") or {}
        if answer.get("type") != "error":
            return said if isinstance(said, Mapping) else {}
        if said.get("code") == "VALIDATION_ERROR":
            raise Refused(str(said.get("message"))[:500])
        if said.get("code") == "CAPACITY_REACHED":
            raise RuntimeError(
                f"the OpenEnv server's {said.get('max_sessions')} sessions are all taken: raise its "
                "max_concurrent_envs, or lower rollout.max_concurrent"
            )
        raise RuntimeError(f"the OpenEnv server failed: {said.get('message')} ({said.get('code')})")

    def _action(self, text: str) -> Mapping[str, Any]:
        if self._config.action:
            return {self._config.action: text}
        start, end = text.find("{"), text.rfind("}")
        try:
            action = json.loads(text[start : end + 1])
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise Refused("answer with one JSON object")
        return action

    def _step(self, result: Mapping[str, Any]) -> Step:
        seen, field = result.get("observation") or {}, self._config.observation
        if field and isinstance(seen, Mapping):
            if field not in seen:
                raise RuntimeError(
                    f"the observation has no field {field!r}: it has {', '.join(map(str, seen))}"
                )
            shown = str(seen[field])
        else:
            shown = seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)
        reward = result.get("reward")
        return Step(
            player="policy",
            observation=shown,
            rewards={} if reward is None else {"policy": float(reward)},
            is_over=bool(result.get("done")),
        )
