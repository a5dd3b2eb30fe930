"""Initial states of a robot's tasks, by name: what an embodied run learns from, and what it is evaluated on.

    [data]
    type = "initial_states"
    tasks = ["red", "blue"]
    held_out = 0.1

A state lies on one side for every task: an evaluation never sees a scene that was trained on. Called by the loader and
the evaluation like any dataset; the prompt's metadata has the state's name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rill.data.base import DatasetConfig, Split, on_side
from rill.types import InitialState, Prompt


class InitialStates:
    class Config(DatasetConfig):
        type: Literal["initial_states"] = "initial_states"
        suite: str = ""
        """The simulator's type unless it is given."""
        tasks: tuple[str, ...] = Field(default=("default",), min_length=1)
        """Names as the simulator knows them; they take turns."""
        num_states: int = Field(default=20_000, ge=1)
        """State ids 0 … num_states − 1 of every task, both sides together."""
        held_out: float = Field(default=0.1, ge=0.0, lt=1.0)
        """Share of the states kept away from training, by a hash of the id. 0: none."""

    def __init__(self, config: Config, split: Split) -> None:
        self._config = config
        self._ids = [n for n in range(config.num_states) if on_side(f"state {n}", config.held_out, split)]

    def __len__(self) -> int:
        return len(self._ids) * len(self._config.tasks)

    def __getitem__(self, index: int) -> Prompt:
        place, number = divmod(index, len(self._config.tasks))
        task = self._config.tasks[number]
        start = InitialState(self._config.suite, task, self._ids[place])
        return Prompt(id=start.name, text=start.name, task=task, metadata={"start": tuple(start)})


def start_of(prompt: Prompt) -> InitialState:
    return InitialState(*prompt.metadata["start"])
