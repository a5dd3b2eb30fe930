"""Problems from the user's own Python: `function = "my_lab.tasks:make"`.

generated   make(index, seed) → a row or a Prompt. Random access, any number, exact resume for free.
stream      make() → an iterator of rows or Prompts. Read forwards only; every call must start the same sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from rill.data.base import Split, check_has_side, content_key, on_side
from rill.data.rows import RowConfig, SequenceConfig, prompt_from_row
from rill.errors import DataError
from rill.registry import load_target
from rill.types import Prompt

STRIDE = 4_096
"""Candidates per problem when one side is wanted: index · STRIDE + attempt."""


class GeneratedDataset:
    class Config(RowConfig):
        type: Literal["generated"] = "generated"
        function: str
        """Where make(index, seed) is, as "module:name"."""
        size: int = Field(default=100_000, ge=1)
        """Problems on each side."""
        seed: int = 0

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        check_has_side(config.function, split, config.held_out)
        self.config = config
        self.split = split
        self._make = _function(config.function)

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> Prompt:
        config = self.config
        if not 0 <= index < config.size:
            raise IndexError(f"{config.function} has {config.size} problems, asked for number {index}")
        if config.held_out == 0.0 or self.split is Split.ALL:
            return self._prompt(index)
        for attempt in range(STRIDE):
            prompt = self._prompt(index * STRIDE + attempt)
            if on_side(content_key(prompt), config.held_out, self.split):
                return prompt
        raise DataError(
            f"{config.function}: {STRIDE} problems in a row were not on the {self.split} side: it makes too few "
            f"different ones for `held_out` = {config.held_out}"
        )

    def _prompt(self, number: int) -> Prompt:
        where = f"{self.config.function}({number}, {self.config.seed})"
        row = self._make(number, self.config.seed)
        return prompt_from_row(row, self.config, where=where, row_id=f"{self.config.function}/{number}")


class GeneratedStream:
    class Config(SequenceConfig):
        type: Literal["stream"] = "stream"
        function: str
        """Where the generator function make() is, as "module:name"."""

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        check_has_side(config.function, split, config.held_out)
        self.config = config
        self.split = split
        self._make = _function(config.function)

    def __iter__(self) -> Iterator[Prompt]:
        return self.part(0, 1)

    def part(self, rank: int, world: int) -> Iterator[Prompt]:
        """Rows of other ranks are made, for a generator cannot skip, but not looked at; unless their side decides which
        rank they belong to."""
        numbered = enumerate(islice(self._make(), self.config.limit or None))
        if self.split is Split.ALL or (self.split is Split.TRAIN and self.config.held_out == 0.0):
            return (self._prompt(number, row) for number, row in islice(numbered, rank, None, world))
        prompts = (self._prompt(number, row) for number, row in numbered)
        on_this_side = (p for p in prompts if on_side(content_key(p), self.config.held_out, self.split))
        return islice(on_this_side, rank, None, world)

    def _prompt(self, number: int, row: Any) -> Prompt:
        where, row_id = f"{self.config.function}, row {number + 1}", f"{self.config.function}/{number}"
        return prompt_from_row(row, self.config, where=where, row_id=row_id)


def _function(target: str) -> Callable[..., Any]:
    function = load_target(target)
    if not callable(function):
        raise DataError(f"{target} is not a function but {type(function).__name__}")
    made: Callable[..., Any] = function
    return made
