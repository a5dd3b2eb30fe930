"""Simulators in a process of their own: what crashes or hangs there costs its own episodes and nothing else.

    parent: SimulatorProcess ── ("play", chunks) ──▶ child: Scenes ── {slot: Played}, packed ──▶ parent

One request at a time (rill.envs.child); numbers of all slots travel as one array each. A child that is gone, or has not
answered in time, is killed, and the caller gets SimulatorLostError: the episodes it played are lost and must be
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rill.config import PartConfig
from rill.envs.child import START_S, Child, ChildDiedError, ChildRaisedError
from rill.envs.robots.bank import Begin, Played, open_scenes, uses_device
from rill.errors import ConfigError, RunError
from rill.types import Bits, Floats, Observation, RobotSpec


class SimulatorLostError(RunError):
    """The process of some simulators died or hung. It was killed; `restart` brings a new one."""


class PackedPlays(NamedTuple):
    """What came of chunks that lasted alike, without pictures: pickling every array by itself takes a tenth of the time
    that a simulator of a small scene does."""

    slots: list[int]
    instructions: list[str]
    states_NS: Floats
    rewards_NJ: Floats
    executed_NJ: Bits
    ends_N3: Bits
    """Terminated, truncated, success."""
    others: dict[int, Played]
    """Those that had more to tell."""

    @classmethod
    def pack(cls, played: dict[int, Played]) -> PackedPlays | dict[int, Played]:
        plain = {slot: each for slot, each in played.items() if _is_plain(each)}
        if len(plain) < 2 or len({len(each.rewards_J) for each in plain.values()}) > 1:
            return played
        rows = list(plain.values())
        seen = [each.observation for each in rows if each.observation is not None]
        return cls(
            slots=list(plain),
            instructions=[observation.instruction for observation in seen],
            states_NS=np.stack([observation.state for observation in seen]),
            rewards_NJ=np.stack([each.rewards_J for each in rows]),
            executed_NJ=np.stack([each.executed_J for each in rows]),
            ends_N3=np.array([(each.terminated, each.truncated, each.success) for each in rows]),
            others={slot: each for slot, each in played.items() if slot not in plain},
        )

    def unpack(self) -> dict[int, Played]:
        found = dict(self.others)
        columns = (self.states_NS, self.rewards_NJ, self.executed_NJ, self.ends_N3.tolist())
        for slot, instruction, state, rewards_J, executed_J, ends in zip(
            self.slots, self.instructions, *columns, strict=True
        ):
            seen = Observation(state=state, images={}, instruction=instruction)
            found[slot] = Played(seen, rewards_J, executed_J, *ends)
        return found


def _is_plain(played: Played) -> bool:
    has_more = played.pictures or played.expert_JA is not None or played.error is not None
    return not has_more and played.observation is not None and not played.observation.images


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
        """One chunk [J, A] each, all of one length."""
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
        slots, values = list(asked), list(asked.values())
        given = np.stack(values) if what == "play" else values
        played = self._told(lambda: self._child.ask((what, slots, given), timeout_s))
        self._compiled.add(what)
        return played.unpack() if isinstance(played, PackedPlays) else dict(played)

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


def open_in_child(setup: tuple[PartConfig, int]) -> tuple[Callable[[Any], Any], RobotSpec]:
    """The scenes that answer, and what they are."""
    scenes = open_scenes(*setup)

    def handle(request: tuple[str, list[int], Any]) -> PackedPlays | dict[int, Played]:
        what, slots, given = request
        played = getattr(scenes, what)(dict(zip(slots, given, strict=True)))  # reset, play, show
        return PackedPlays.pack(played)

    return handle, scenes.spec
