"""How often does a letter occur? The level is the length of the word divided by two."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset


class CountingDataset(TaskDataset):
    name = "counting"
    default_levels = (2, 6)

    class Config(TaskConfig):
        type: Literal["counting"] = "counting"
        alphabet: str = Field(default="abcdefgh", min_length=2)
        """Letters that words are made of; few letters make large counts."""

    def make(self, rng: random.Random, level: int) -> Problem:
        config = self.settings
        assert isinstance(config, CountingDataset.Config)
        word = "".join(rng.choice(config.alphabet) for _ in range(2 * level))
        letter = rng.choice(config.alphabet)
        seen, steps = 0, []
        for character in word:
            seen += character == letter
            steps.append(f"{character}{seen}")
        return Problem(
            question=f"#{letter} in {word}=",
            instruction=f'How many times does the letter "{letter}" occur in "{word}"? Answer with a number.',
            answer=str(seen),
            steps=tuple(steps),
            difficulty=float(level),
        )
