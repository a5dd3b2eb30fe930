"""Simulators in a process of their own: what crashes or hangs there costs its own episodes and nothing else.

    parent: SimulatorProcess ── ("play", chunks) ──▶ child: Scenes ── {slot: Played} ──▶ parent

One request at a time (rill.envs.child). A child that is gone, or has not answered in time, is killed, and the caller
gets SimulatorLostError: the episodes it played are lost and must be counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rill.config import PartConfig
from rill.envs.child import START_S, Child, ChildDiedError, ChildRaisedError
from rill.envs.robots.bank import Begin, Played, open_scenes, uses_device
from rill.errors import ConfigError, RunError
from rill.types import Floats, RobotSpec


class SimulatorLostError(RunError):
    """The process of some simulators died or hung. It was killed; `restart` brings a new one."""


class SimulatorProcess:
    """`size` simulators. Not for several threads at once."""

    def __init__(self, config: PartConfig, size: int, *, timeout_s: float) -> None:
        """`timeout_s`: for a chunk of all simulators."""
        self._config = config
        self._size = size
        self._timeout_s = timeout_s
        self._spec: RobotSpec | None = None
        self.num_restarts = 0
        self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def spec(self) -> RobotSpec:
        """Waits until the simulators are open. ConfigError: they cannot be."""
        if self._spec is None:
            self._spec = self._told(self._child.first)
        return self._spec

    def reset(self, begins: Mapping[int, Begin]) -> dict[int, Played]:
        return self._ask("reset", begins)

    def play(self, chunks: Mapping[int, Floats]) -> dict[int, Played]:
        return self._ask("play", chunks)

    def show(self, slots: Mapping[int, int]) -> dict[int, Played]:
        return self._ask("show", slots)

    def restart(self) -> None:
        """After SimulatorLostError."""
        self._start()
        self.num_restarts += 1

    def close(self) -> None:
        self._child.kill()

    # --- inside -------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._child = Child(open_in_child, (self._config, self._size))
        self._compiled: set[str] = set()
        self._spec = None

    def _ask(self, what: str, asked: Mapping[int, Any]) -> dict[int, Played]:
        if not asked:
            return {}
        self.spec()
        compiles = uses_device(self._config) and what not in self._compiled
        timeout_s = self._timeout_s + (START_S if compiles else 0.0)
        played: dict[int, Played] = self._told(lambda: self._child.ask((what, dict(asked)), timeout_s))
        self._compiled.add(what)
        return played

    def _told(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except ChildRaisedError as error:
            if error.is_users or self._spec is None:
                raise ConfigError(str(error)) from None
            self._child.kill()
            raise self._lost(error) from error
        except (ChildDiedError, TimeoutError) as error:
            raise self._lost(error) from error

    def _lost(self, how: Exception) -> SimulatorLostError:
        return SimulatorLostError(f"the process of {self._size} {self._config.type!r} simulators {how}")


def open_in_child(setup: tuple[PartConfig, int]) -> tuple[Callable[[Any], dict[int, Played]], RobotSpec]:
    """The scenes that answer, and what they are."""
    scenes = open_scenes(*setup)

    def handle(request: tuple[str, Any]) -> dict[int, Played]:
        what, asked = request
        played: dict[int, Played] = getattr(scenes, what)(asked)  # reset, play, show
        return played

    return handle, scenes.spec
