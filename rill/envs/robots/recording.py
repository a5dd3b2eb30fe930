"""An episode while it is played, and what becomes of it; an expert's episodes as chunks to imitate.

Called by rill.workers.robots.env, and by the actor for its warm start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rill.envs.robots.bank import Begin, Played, Scenes
from rill.envs.robots.process import SimulatorProcess
from rill.types import (
    Bits,
    Decision,
    EmbodiedTrajectory,
    Floats,
    InitialState,
    Observation,
    Observations,
    Pixels,
    PolicyVersion,
)


class Choice(NamedTuple):
    """One row of a policy's decision."""

    decision: Decision
    row: int
    version: PolicyVersion


class Recording:
    """One episode under way."""

    def __init__(self, name: str, group_id: str, start: InitialState, first: Played) -> None:
        self.name = name
        self.group_id = group_id
        self.start = start
        self._seen: list[Observation] = []
        self._choices: list[Choice] = []
        self._played: list[Played] = []
        self._last = first
        self.pictures: list[Pixels] = list(first.pictures)

    @property
    def observation(self) -> Observation:
        """What the next chunk is decided on."""
        assert self._last.observation is not None and not self._last.is_over, "the episode is over"
        return self._last.observation

    @property
    def num_chunks(self) -> int:
        return len(self._choices)

    @property
    def is_over(self) -> bool:
        return self._last.is_over

    def add(self, choice: Choice, played: Played) -> None:
        self._seen.append(self.observation)
        self._choices.append(choice)
        self._played.append(played)
        self._last = played
        self.pictures += played.pictures

    def lose(self, reason: str) -> None:
        """The simulator is gone."""
        self._last = Played.failed(reason)

    def trajectory(self) -> EmbodiedTrajectory:
        """Of an episode that is over. One that failed keeps what was played, for those who look into it."""
        last = self._last
        seen = self._seen
        final = last.observation or (seen[-1] if seen else Observation(state=np.zeros(0, np.float32)))
        whole = [i for i, played in enumerate(self._played) if played.error is None]
        choices, played_C = [self._choices[i] for i in whole], [self._played[i] for i in whole]
        return EmbodiedTrajectory(
            id=self.name,
            group_id=self.group_id,
            start=self.start,
            observations=Observations.of([seen[i] for i in whole]),
            final=final,
            actions_CJA=_stacked([c.decision.actions_BJA[c.row] for c in choices]),
            executed_CJ=_stacked([p.executed_J for p in played_C]),
            latents={
                name: np.stack([c.decision.latents[name][c.row] for c in choices])
                for name in (choices[0].decision.latents if choices else ())
            },
            logprobs_CJ=_stacked([c.decision.logprobs_BJ[c.row] for c in choices]),
            values_C=np.array([c.decision.values_B[c.row] for c in choices], np.float32),
            versions_C=np.array([c.version for c in choices], np.int32),
            rewards_CJ=_stacked([p.rewards_J for p in played_C]),
            terminated=last.terminated,
            truncated=last.truncated,
            success=last.success,
            clipped=float(np.mean([c.decision.clipped_B[c.row] for c in choices])) if choices else 0.0,
            error=last.error,
        )


class Shown(NamedTuple):
    """What an expert did: at every moment, its next chunk of actions."""

    observations: list[Observation]
    actions_BJA: Floats
    mask_BJ: Bits
    num_episodes: int


def demonstrate(
    simulators: Scenes | SimulatorProcess, size: int, starts: Sequence[InitialState], chunk: int
) -> Shown:
    """Let the expert play from every start, `size` at a time. Episodes in which it fails are left out."""
    episodes: list[tuple[list[Observation], list[Floats] | Floats]] = []
    for first in range(0, len(starts), size):
        some = starts[first : first + size]
        last = simulators.reset({slot: Begin(start) for slot, start in enumerate(some)})
        seen: dict[int, list[Observation]] = {slot: [] for slot in last}
        done: dict[int, list[Floats]] = {slot: [] for slot in last}
        while going := [slot for slot, played in last.items() if not played.is_over]:
            for slot in going:
                seen[slot].append(last[slot].observation)  # type: ignore[arg-type]
            shown = simulators.show(dict.fromkeys(going, 1))
            for slot, played in shown.items():
                if played.expert_JA is not None:
                    done[slot].append(played.expert_JA[0])
            last |= shown
        episodes += [(seen[slot], done[slot]) for slot, played in last.items() if played.success]
    return shown_of(episodes, chunk)


def shown_of(episodes: Sequence[tuple[list[Observation], list[Floats] | Floats]], chunk: int) -> Shown:
    """Whole episodes, each what was seen and what was done then."""
    observations: list[Observation] = []
    chunks: list[Floats] = []
    masks: list[Bits] = []
    for seen, done in episodes:
        for t, observation in enumerate(seen):
            actions_JA = np.zeros((chunk, len(done[0])), np.float32)
            following = done[t : t + chunk]
            actions_JA[: len(following)] = following
            observations.append(observation)
            chunks.append(actions_JA)
            masks.append(np.arange(chunk) < len(following))
    return Shown(observations, _stacked(chunks), _stacked(masks), len(episodes))


def _stacked(rows: Sequence[Any]) -> Any:
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)
