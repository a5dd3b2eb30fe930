"""A formula that is to become a program: it reads a number and prints what the formula makes of it. The tests, pairs
of input and output for the reward `code`, are not in the question.

    7n+3?    print(int(input())*7+3)        a program
    7n+3?    print(24)                      a guess: right for one number at most

`worked` is the share of the warm-up's examples that are programs. The level is the number of digits of the factor.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Literal

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset
from rill.types import Prompt

NUMBERS = (3, 11)
"""What a program is tried with."""


class ProgramsDataset(TaskDataset):
    name = "programs"
    default_levels = (1, 2)

    class Config(TaskConfig):
        type: Literal["programs"] = "programs"

    def make(self, rng: random.Random, level: int) -> Problem:
        factor, summand = rng.randint(2, 10**level - 1), rng.randint(1, 99)
        return Problem(
            question=f"{factor}n+{summand}?",
            instruction=f"Write a program that reads a number n and prints {factor} * n + {summand}.",
            answer=str(factor * rng.randint(1, 9) + summand),
            steps=(f"int(input())*{factor}+{summand}",),
            difficulty=float(level),
        )

    def solution(self, problem: Problem, index: int) -> str:
        is_program = super().solution(problem, index) != problem.answer
        return f"print({problem.steps[0] if is_program else problem.answer})"

    def __getitem__(self, index: int) -> Prompt:
        prompt = super().__getitem__(index)
        factor, _, summand = self.problem(index)[0].question.rstrip("?").partition("n+")
        tests = {
            "inputs": [f"{n}\n" for n in NUMBERS],
            "outputs": [f"{int(factor) * n + int(summand)}\n" for n in NUMBERS],
        }
        return replace(prompt, answer=None, metadata={**prompt.metadata, "tests": tests})
