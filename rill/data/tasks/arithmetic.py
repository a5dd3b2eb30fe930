"""Arithmetic of growing difficulty: digits, number of terms and operators are the three axes.

The level of a problem is its number of digits. A worked solution shows column sums for one addition or
subtraction, partial products for one multiplication, and one reduction a step for longer expressions:

    27+58=      (7+8+0=15,2+5+1=08)85
    27*58=      (27*8=216,27*50=1350,216+1350=1566)1566
    3+4*2=      (4*2=8,3+8=11)11

Every column takes the same number of characters: its carry is written even where it is 0, its result with two digits.
A small model then finds the digits of a column at a fixed distance and learns the style several times sooner.
"""

from __future__ import annotations

import random
from typing import Literal

from pydantic import model_validator

from rill.data.base import Split
from rill.data.tasks.base import Problem, TaskConfig, TaskDataset
from rill.errors import DataError

MAX_TRIES = 200
OPERATORS = "+-*/"


class ArithmeticDataset(TaskDataset):
    name = "arithmetic"
    default_levels = (2, 2)

    class Config(TaskConfig):
        type: Literal["arithmetic"] = "arithmetic"
        operators: str = "+"
        """Any of + - * / ; each gap between two terms draws one. Divisions come out even."""
        terms: tuple[int, int] = (2, 2)
        """Fewest and most terms of an expression."""
        digits: tuple[int, int] | None = None
        """Fewest and most digits of an operand; another name for `levels`. Unset: `levels`, else two digits."""
        negative: bool = False
        """Allow results, and intermediate results, below zero."""
        reverse_answer: bool = False
        """Write the answer with its lowest digit first, as a column addition finds it."""

        @model_validator(mode="after")
        def _is_possible(self) -> ArithmeticDataset.Config:
            if not self.operators or set(self.operators) - set(OPERATORS):
                raise ValueError(f"`operators` must be one or more of {OPERATORS}, got {self.operators!r}")
            if not 2 <= self.terms[0] <= self.terms[1]:
                raise ValueError(f"`terms` must be (fewest ≥ 2, most), got {self.terms}")
            if self.digits is not None and self.levels is not None:
                raise ValueError("`digits` and `levels` mean the same here: give one of them")
            low, high = self.digits or self.levels or (1, 1)
            if not 1 <= low <= high:
                raise ValueError(f"`digits` must be (fewest ≥ 1, most), got {(low, high)}")
            return self

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        if config.digits is not None:
            config = config.model_copy(update={"levels": config.digits, "digits": None})
        super().__init__(config, split)
        self.config = config

    def make(self, rng: random.Random, level: int) -> Problem:
        config = self.config
        for _ in range(MAX_TRIES):
            num_terms = rng.randint(*config.terms)
            operators = [rng.choice(config.operators) for _ in range(num_terms - 1)]
            operands = self._operands(rng, level, operators)
            steps = reduce_steps(operands, operators)
            if steps is None:
                continue
            if config.negative or min(step[3] for step in steps) >= 0:
                return self._problem(operands, operators, steps, level)
        raise DataError(
            f"arithmetic: {MAX_TRIES} draws with operators {config.operators!r} and {level} digits gave none with "
            f"even divisions and negative={config.negative}: allow more, or use fewer terms"
        )

    def _operands(self, rng: random.Random, level: int, operators: list[str]) -> list[int]:
        low, high = (0 if level == 1 else 10 ** (level - 1)), 10**level - 1
        operands = [rng.randint(low, high) for _ in range(len(operators) + 1)]
        for gap, operator in enumerate(operators):
            if operator == "/":
                operands[gap + 1] = max(operands[gap + 1], 1)
                # Only the first division of a chain can be made even beforehand; reduce_steps rejects the others.
                operands[gap] *= operands[gap + 1]
        if len(operators) == 1 and operators[0] == "-" and not self.config.negative:
            operands.sort(reverse=True)
        return operands

    def _problem(
        self, operands: list[int], operators: list[str], steps: list[tuple[int, str, int, int]], level: int
    ) -> Problem:
        config = self.config
        parts = [str(operands[0])]
        for operator, operand in zip(operators, operands[1:], strict=True):
            parts += [operator, str(operand)]
        answer = str(steps[-1][3])
        if config.reverse_answer:
            answer = answer[::-1]
        return Problem(
            question="".join([*parts, "="]),
            instruction=f"What is {' '.join(parts)}?",
            answer=answer,
            steps=worked_steps(operands, operators, steps),
            difficulty=float(level + len(operators) - 1 + sum(o in "*/" for o in operators)),
        )


def reduce_steps(operands: list[int], operators: list[str]) -> list[tuple[int, str, int, int]] | None:
    """The reductions (left, operator, right, result), × and ÷ first. None when a division is not even."""
    values, pending, steps = list(operands), list(operators), []
    while pending:
        at = next((i for i, operator in enumerate(pending) if operator in "*/"), 0)
        left, operator, right = values[at], pending[at], values[at + 1]
        if operator == "/" and (right == 0 or left % right):
            return None
        result = {"+": left + right, "-": left - right, "*": left * right}.get(operator)
        result = left // right if result is None else result
        steps.append((left, operator, right, result))
        values[at : at + 2] = [result]
        del pending[at]
    return steps


def worked_steps(
    operands: list[int], operators: list[str], steps: list[tuple[int, str, int, int]]
) -> tuple[str, ...]:
    if len(steps) == 1:
        left, right = operands
        match operators[0]:
            case "+":
                return tuple(_addition_columns(left, right))
            case "-" if left >= right:
                return tuple(_subtraction_columns(left, right))
            case "*":
                return tuple(_partial_products(left, right))
    return tuple(f"{left}{operator}{right}={result}" for left, operator, right, result in steps)


def _addition_columns(left: int, right: int) -> list[str]:
    width, carry, columns = max(len(str(left)), len(str(right))), 0, []
    for a, b in zip(reversed(f"{left:0{width}}"), reversed(f"{right:0{width}}"), strict=True):
        total = int(a) + int(b) + carry
        columns.append(f"{a}+{b}+{carry}={total:02}")
        carry = total // 10
    return columns


def _subtraction_columns(left: int, right: int) -> list[str]:
    width, borrow, columns = len(str(left)), 0, []
    for a, b in zip(reversed(str(left)), reversed(f"{right:0{width}}"), strict=True):
        top, taken = int(a), int(b) + borrow
        lent = 10 if top < taken else 0
        columns.append(f"{top + lent:02}-{b}-{borrow}={top + lent - taken}")
        borrow = 1 if lent else 0
    return columns


def _partial_products(left: int, right: int) -> list[str]:
    parts = [int(digit) * 10**place for place, digit in enumerate(reversed(str(right)))]
    steps, total = [], None
    for part in parts:
        steps.append(f"{left}*{part}={left * part}")
        if total is not None:
            steps.append(f"{total}+{left * part}={total + left * part}")
        total = left * part if total is None else total + left * part
    return steps
