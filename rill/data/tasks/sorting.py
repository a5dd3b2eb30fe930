"""Put numbers or words in order. The level is the number of items minus one."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SortingDataset(TaskDataset):
    name = "sorting"
    default_levels = (2, 5)

    class Config(TaskConfig):
        type: Literal["sorting"] = "sorting"
        items: Literal["numbers", "words"] = "numbers"
        item_length: int = Field(default=2, ge=1, le=12)
        """Most digits of a number, or letters of a word."""

    def make(self, rng: random.Random, level: int) -> Problem:
        config = self.settings
        assert isinstance(config, SortingDataset.Config)
        if config.items == "numbers":
            numbers = [rng.randrange(10**config.item_length) for _ in range(level + 1)]
            items, in_order = [str(n) for n in numbers], [str(n) for n in sorted(numbers)]
        else:
            items = [
                "".join(rng.choice(LETTERS) for _ in range(config.item_length)) for _ in range(level + 1)
            ]
            in_order = sorted(items)
        what = "in increasing order" if config.items == "numbers" else "alphabetically"
        return Problem(
            question=f"sort {' '.join(items)}=",
            instruction=f"Sort {what} and answer with the items separated by spaces: {' '.join(items)}",
            answer=" ".join(in_order),
            steps=tuple(f"{k + 1}:{item}" for k, item in enumerate(in_order)),
            difficulty=float(level),
        )
