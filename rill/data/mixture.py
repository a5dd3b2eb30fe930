"""Several datasets as one, in fixed proportions: problem i comes from the source that the weights give it to."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rill.config import Config as BaseConfig
from rill.config import OneOf, PartConfig
from rill.data.base import DATASETS, DatasetConfig, Split, open_indexed
from rill.types import Prompt

PERIOD = 1_000
"""The proportions hold exactly in every run of so many problems."""


class SourceConfig(BaseConfig):
    dataset: Annotated[PartConfig, OneOf(DATASETS)]
    weight: float = Field(default=1.0, gt=0)
    """Share of this source, relative to the others."""


class MixtureDataset:
    """The sources keep their own `held_out`; a smaller source is read again from its start when it is used up."""

    class Config(DatasetConfig):
        type: Literal["mixture"] = "mixture"
        sources: tuple[SourceConfig, ...]
        size: int = Field(default=0, ge=0)
        """Problems in all. 0: the sources' sizes together."""

        @field_validator("sources")
        @classmethod
        def _some(cls, sources: tuple[SourceConfig, ...]) -> tuple[SourceConfig, ...]:
            if not sources:
                raise ValueError("a mixture needs at least one source")
            return sources

    def __init__(self, config: Config, split: Split = Split.TRAIN) -> None:
        self._sources = [open_indexed(source.dataset, split) for source in config.sources]
        total = sum(source.weight for source in config.sources)
        shares = [round(PERIOD * s / total) for s in accumulate(source.weight for source in config.sources)]
        self._ends = [*shares[:-1], PERIOD]
        self._size = config.size or sum(len(source) for source in self._sources)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._size:
            raise IndexError(f"the mixture has {self._size} problems, asked for number {index}")
        # 389 has no factor in common with the period: neighbours come from different sources.
        turn, place = divmod(index, PERIOD)
        slot = place * 389 % PERIOD
        at = bisect_right(self._ends, slot)
        start = self._ends[at - 1] if at else 0
        within = turn * (self._ends[at] - start) + slot - start
        source = self._sources[at]
        return source[within % len(source)]
