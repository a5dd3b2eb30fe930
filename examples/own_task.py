"""A task of your own: problems that are made when they are asked for, each with its answer.

    rill train demo data.type=examples.own_task:Reversal

The base class does the rest: the seed, the held-out side that training never sees, levels for a curriculum, chat form,
worked solutions for a warm-up. Problems that you have in a file need no code: `[data] type = "jsonl"`, `path = "…"`.
"""

import random

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset


class Reversal(TaskDataset):
    name = "reversal"
    default_levels = (2, 5)

    class Config(TaskConfig):
        alphabet: str = "0123456789"
        """What is reversed is made of these."""

    def make(self, rng: random.Random, level: int) -> Problem:
        assert isinstance(self.settings, Reversal.Config)
        word = "".join(rng.choice(self.settings.alphabet) for _ in range(level))
        return Problem(
            question=f"{word}>",
            instruction=f"Write {word} backwards.",
            answer=word[::-1],
            steps=tuple(reversed(word)),
            difficulty=float(level),
        )
