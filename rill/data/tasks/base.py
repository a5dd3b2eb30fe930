"""What the built-in tasks share: problem number i is a pure function of (seed, i) and lies on the right side.

A task subclasses TaskDataset and writes one method, `make(rng, level)`. Everything a Prompt carries besides the
problem (template, chat form, worked solution, difficulty) is done here.
"""

from __future__ import annotations

import random
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rill.data.base import DatasetConfig, Share, Split, check_has_side, check_template, on_side
from rill.data.rows import CHOSEN, MARGIN, REJECTED
from rill.errors import DataError
from rill.types import PICTURE, Message, Prompt

MAX_DRAWS = 2_000
"""Draws until a problem falls on the wanted side. At held_out = 0.05 the chance to miss is below 1e-44."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One verifiable problem, before it is dressed as a prompt."""

    question: str
    """The problem, as short as it can be said: "27+58="."""
    instruction: str
    """The problem as one would ask a person: "What is 27 + 58?"."""
    answer: str
    steps: tuple[str, ...] = ()
    """Intermediate results on the way to the answer, for worked solutions."""
    difficulty: float = 0.0
    picture: bytes = b""
    """What the problem is about, shown before the instruction. Empty: words say all of it."""


class TaskConfig(DatasetConfig):
    """What every built-in task has."""

    size: int = Field(default=100_000, ge=1)
    """Problems in the training side. They are made when asked for: a large number costs nothing."""
    held_out: Share = 0.1
    """Share of the problem space kept for evaluation, chosen by a hash of the problem. 0: none."""
    held_out_size: int = Field(default=512, ge=1)
    """Problems in the held-out side."""
    seed: int = 0
    """Problem i of one seed is always the same."""
    levels: tuple[int, int] | None = None
    """Lowest and highest level drawn, both included, from 1 up. Unset: the task's own range."""
    form: Literal["bare", "chat"] = "bare"
    """bare: the short question as plain text. chat: the instruction as a user message."""
    template: str = "{question}"
    """How the question is written; `{question}` (chat: the instruction) and `{short}` are filled in."""
    system: str = ""
    """A system message for the chat form. Empty: none."""
    worked: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the problems whose `metadata["solution"]`, the target of an SFT warm-up, shows the steps before the
    answer. 0: none, 1: all."""
    worked_template: str = "({steps}){answer}"
    """How a worked solution is written; steps are joined by `step_separator`."""
    step_separator: str = ","
    pairs: bool = False
    """Give every problem a `chosen` answer, the worked solution, and a `rejected` one with a mistake, half of them
    without the steps: what reward models and DPO learn from."""

    @model_validator(mode="after")
    def _templates_have_their_fields(self) -> TaskConfig:
        check_template("template", self.template, ("question", "short"), ("question", "short"))
        check_template("worked_template", self.worked_template, ("steps", "answer"), ("answer",))
        if self.levels is not None and not 1 <= self.levels[0] <= self.levels[1]:
            raise ValueError(f"`levels` must be (lowest ≥ 1, highest), got {self.levels}")
        return self


class TaskDataset(ABC):
    """An indexable, endless-in-principle source of problems of one task."""

    name: ClassVar[str]
    default_levels: ClassVar[tuple[int, int]] = (1, 5)

    def __init__(self, config: Any, split: Split = Split.TRAIN) -> None:
        self.settings: TaskConfig = config
        self.split = split
        check_has_side(self.name, split, self.settings.held_out)

    @abstractmethod
    def make(self, rng: random.Random, level: int) -> Problem:
        """One problem of this level. All randomness comes from rng."""

    def __len__(self) -> int:
        return self.settings.held_out_size if self.split is Split.HELD_OUT else self.settings.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} problems, asked for number {index}")
        problem, level = self.problem(index)
        return self._dress(problem, level, index)

    def problem(self, index: int) -> tuple[Problem, int]:
        """Problem and level number `index` of this side."""
        settings = self.settings
        low, high = settings.levels or self.default_levels
        rng = random.Random(f"{self.name}/{settings.seed}/{self.split}/{index}")
        for _ in range(MAX_DRAWS):
            level = rng.randint(low, high)
            problem = self.make(rng, level)
            if on_side(f"{self.name}/{problem.question}", settings.held_out, self.split):
                return problem, level
        raise DataError(
            f"{self.name}: {MAX_DRAWS} draws gave no {self.split} problem: its problem space is too small for "
            f"`held_out` = {settings.held_out}; raise the level (digits, length …) or the share"
        )

    def _dress(self, problem: Problem, level: int, index: int) -> Prompt:
        settings = self.settings
        is_chat = settings.form == "chat"
        text = settings.template.format(
            question=problem.instruction if is_chat else problem.question, short=problem.question
        )
        system = (Message(role="system", content=settings.system),) if settings.system else ()
        pictures = (problem.picture,) if problem.picture else ()
        asked = Message(role="user", content=PICTURE * len(pictures) + text, pictures=pictures)
        return Prompt(
            id=f"{self.name}/{self.split}/{index}",
            messages=(*system, asked) if is_chat else (),
            text=None if is_chat else text,
            answer=problem.answer,
            task=self.name,
            difficulty=problem.difficulty,
            metadata={
                "level": level,
                "solution": self.solution(problem, index),
                **(self.pair(problem, index) if settings.pairs else {}),
            },
        )

    def solution(self, problem: Problem, index: int) -> str:
        """What an expert would write after the prompt."""
        settings = self.settings
        is_worked = random.Random(f"worked/{settings.seed}/{index}").random() < settings.worked
        return self._worked(problem, problem.answer) if is_worked else problem.answer

    def pair(self, problem: Problem, index: int) -> dict[str, Any]:
        """A preference, as rows of files have it."""
        rng = random.Random(f"pair/{self.settings.seed}/{self.split}/{index}")
        wrong = with_mistake(problem.answer, rng)
        rejected = self._worked(problem, wrong) if rng.random() < 0.5 else wrong
        return {CHOSEN: self._worked(problem, problem.answer), REJECTED: rejected, MARGIN: 0.0}

    def _worked(self, problem: Problem, answer: str) -> str:
        if not problem.steps:
            return answer
        steps = self.settings.step_separator.join(problem.steps)
        return self.settings.worked_template.format(steps=steps, answer=answer)


def with_mistake(answer: str, rng: random.Random) -> str:
    """The answer with one digit or letter, where it has one, changed into another of its kind."""
    places = [i for i, character in enumerate(answer) if character.isalnum()]
    if not places:
        return answer + "0"
    at = rng.choice(places)
    kind = string.digits if answer[at].isdigit() else string.ascii_lowercase
    other = rng.choice([character for character in kind if character != answer[at].lower()])
    return answer[:at] + other + answer[at + 1 :]
