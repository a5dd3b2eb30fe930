"""Several datasets as one, in fixed proportions: problem i comes from the source that the weights give it to.

Ids begin with the source's number: two sources may well call different problems alike.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rill.config import Config as BaseConfig
from rill.config import OneOf, PartConfig
from rill.data.base import DATASETS, CheckedDataset, EditableDataset, Split, open_indexed
from rill.types import Prompt

PERIOD = 1_000
"""The proportions hold exactly in every run of so many problems."""


class SourceConfig(BaseConfig):
    dataset: Annotated[PartConfig, OneOf(DATASETS)]
    weight: float = Field(default=1.0, gt=0)
    """Share of this source, relative to the others."""


class MixtureDataset:
    """A smaller source is read again from its start when it is used up."""

    class Config(PartConfig):
        type: Literal["mixture"] = "mixture"
        sources: tuple[SourceConfig, ...] = Field(min_length=1)
        """Each with its own `held_out`."""
        size: int = Field(default=0, ge=0)
        """Problems in all. 0: the sources' sizes together."""

        @model_validator(mode="after")
        def _everyone_has_a_turn(self) -> MixtureDataset.Config:
            for number, (start, end) in enumerate(pairwise([0, *_ends(self.sources)])):
                if start == end:
                    raise ValueError(
                        f"source {number} has a weight of {self.sources[number].weight:g}, less than a {PERIOD}th of "
                        "the sum: it would never have a turn"
                    )
            return self

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        self._sources = [open_indexed(source.dataset, split) for source in config.sources]
        self.digests: dict[str, str] = {}
        for source in self._sources:
            self.digests |= source.digests if isinstance(source, EditableDataset) else {}
        ends = _ends(config.sources)
        # 389 has no factor in common with the period: neighbours come from different sources.
        owners = [bisect_right(ends, place * 389 % PERIOD) for place in range(PERIOD)]
        self._num_turns = [0] * len(self._sources)
        """Of each source in a period."""
        self._turns: list[tuple[int, int]] = []
        """By place in the period: whose turn it is, and which one of its turns."""
        for at in owners:
            self._turns.append((at, self._num_turns[at]))
            self._num_turns[at] += 1
        self._size = config.size or sum(len(source) for source in self._sources)

    def check_every(self, check: Callable[[Prompt], object]) -> None:
        for source in self._sources:
            if isinstance(source, CheckedDataset):
                source.check_every(check)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"the mixture has {self._size} problems, asked for number {index}")
        period, place = divmod(index, PERIOD)
        at, turn = self._turns[place]
        source = self._sources[at]
        prompt = source[(period * self._num_turns[at] + turn) % len(source)]
        return replace(prompt, id=f"{at}/{prompt.id}")


def _ends(sources: Sequence[SourceConfig]) -> list[int]:
    """Up to where of a period each source has its turns."""
    sums = list(accumulate(source.weight for source in sources))
    return [round(PERIOD * s / sums[-1]) for s in sums]
