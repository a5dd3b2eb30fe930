"""reasoning-gym's generators behind one dataset name. The one door for reasoning_gym (its reward uses it too)."""

from __future__ import annotations

import threading
from typing import Any, Literal

from pydantic import Field

from rill.data.base import Split, check_has_side, on_side
from rill.data.rows import QuestionConfig
from rill.errors import DataError
from rill.registry import import_extra, unknown_name_message
from rill.types import Message, Prompt

STRIDE = 1_024
"""Candidates per problem when one side is wanted."""


class ReasoningGymDataset:
    class Config(QuestionConfig):
        type: Literal["reasoning_gym"] = "reasoning_gym"
        name: str
        """A reasoning-gym task, e.g. "leg_counting"."""
        options: dict[str, Any] = {}
        """Options of that task, e.g. {min_animals = 3}. Empty: its defaults."""
        size: int = Field(default=100_000, ge=1)
        """Problems on each side."""
        seed: int = 0

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        check_has_side(config.name, split, config.held_out)
        self.config = config
        self.split = split
        gym = import_gym()
        known = sorted(gym.factory.DATASETS)
        if config.name not in known:
            raise DataError(unknown_name_message("reasoning-gym task", config.name, known))
        try:
            self._entries = gym.create_dataset(
                config.name, size=config.size * STRIDE, seed=config.seed, **config.options
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise DataError(f"reasoning-gym task {config.name!r} refuses its options: {error}") from error
        self._lock = threading.Lock()  # generators of the library keep state between two items

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> Prompt:
        config = self.config
        if not 0 <= index < config.size:
            raise IndexError(f"{config.name} has {config.size} problems, asked for number {index}")
        for attempt in range(STRIDE):
            number = index * STRIDE + attempt
            with self._lock:
                entry = self._entries[number]
            if on_side(entry["question"], config.held_out, self.split):
                return self._prompt(entry, number)
        raise DataError(
            f"reasoning-gym {config.name!r}: {STRIDE} problems in a row were not on the {self.split} side: it has too "
            f"few different ones for `held_out` = {config.held_out}"
        )

    def _prompt(self, entry: dict[str, Any], number: int) -> Prompt:
        config = self.config
        text = config.template.format(question=entry["question"])
        system = (Message(role="system", content=config.system),) if config.system else ()
        is_bare = config.form == "bare"
        return Prompt(
            id=f"{config.name}/{config.seed}/{number}",
            messages=() if is_bare else (*system, Message(role="user", content=text)),
            text=text if is_bare else None,
            answer=entry["answer"],
            task=config.task or config.name,
            metadata={"gym_task": config.name, "gym_entry": entry},
        )


def import_gym() -> Any:
    return import_extra("reasoning_gym", 'reasoning-gym tasks need: pip install "rill[tasks]"')
