"""Transform a word by a rule. The level is its length minus one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from pydantic import Field, field_validator

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def caesar(word: str, shift: int) -> str:
    return "".join(LETTERS[(LETTERS.index(letter) + shift) % 26] for letter in word)


RULES: dict[str, tuple[str, Callable[[str], str]]] = {
    "reverse": ("Write the word backwards", lambda word: word[::-1]),
    "upper": ("Write the word in capital letters", str.upper),
    "double": ("Write every letter of the word twice", lambda word: "".join(c + c for c in word)),
    "rotate": ("Move the first letter of the word to its end", lambda word: word[1:] + word[:1]),
    "evens": ("Write only the 2nd, 4th, 6th … letter of the word", lambda word: word[1::2]),
    "sort": ("Write the letters of the word in alphabetical order", lambda word: "".join(sorted(word))),
    "vowels": (
        "Write the word without its vowels",
        lambda word: "".join(c for c in word if c not in "aeiou"),
    ),
}
HARDER = {"reverse": 1.0, "caesar": 2.0, "sort": 1.0}


class StringsDataset(TaskDataset):
    name = "strings"
    default_levels = (2, 6)

    class Config(TaskConfig):
        type: Literal["strings"] = "strings"
        rules: tuple[str, ...] = ("reverse", "upper", "caesar")
        """Which transforms are drawn from: reverse, upper, caesar, double, rotate, evens, sort, vowels."""
        max_shift: int = Field(default=5, ge=1, le=25)
        """Largest shift of the caesar rule."""

        @field_validator("rules")
        @classmethod
        def _known(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
            unknown = sorted(set(rules) - set(RULES) - {"caesar"})
            if unknown or not rules:
                raise ValueError(f"unknown rules {unknown}: choose from {', '.join([*RULES, 'caesar'])}")
            return rules

    def make(self, rng: random.Random, level: int) -> Problem:
        config = self.settings
        assert isinstance(config, StringsDataset.Config)
        rule = rng.choice(config.rules)
        word = "".join(rng.choice(LETTERS) for _ in range(level + 1))
        if rule == "caesar":
            shift = rng.randint(1, config.max_shift)
            short, said, answer = (
                f"caesar{shift}",
                f"Shift every letter of the word {shift} forward",
                caesar(word, shift),
            )
        else:
            said, transform = RULES[rule]
            while not transform(word):  # nothing but vowels: there must be something to write
                word = word[1:] + rng.choice(LETTERS)
            short, answer = rule, transform(word)
        return Problem(
            question=f"{short} {word}=",
            instruction=f"{said}: {word}",
            answer=answer,
            steps=tuple(word),
            difficulty=float(level) + HARDER.get(rule, 0.0),
        )
