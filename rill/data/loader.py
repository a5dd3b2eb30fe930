"""Reads a dataset in a global, reproducible order; each data-parallel rank reads only its part.

Callers: the loop (prompts) and SFT (examples). Guarantees:
- Epoch e is one permutation of all indices, a pure function of (seed, e): the same for every number of ranks.
- Position p of that order belongs to rank p mod world. No rank reads another's rows.
- An epoch's tail that does not divide by the world size goes on into the next epoch: nothing is dropped and no rank
  ever waits for another. Ranks that have read equally often differ by no more than one position.
- `state()` is a few integers; after `load_state()` the reading goes on exactly where it stood, also when the
  world size has changed (then from the whole run's position). Rows that were edited since are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from rill.config import Config
from rill.data.base import Dataset, EditableDataset, PartedStream, StreamDataset
from rill.errors import CheckpointError, DataError
from rill.types import Prompt


class PromptSource(Protocol):
    """What the loop draws prompts from: a Loader, a StreamLoader or a Curriculum."""

    def next(self, count: int) -> list[Prompt]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class LoaderConfig(Config):
    shuffle: bool = True
    """Off: rows in the order of the dataset, every epoch."""
    seed: int = 0
    """Decides the order. Independent of the task's own seed."""
    shuffle_buffer: int = Field(default=1_024, ge=1)
    """Streams only: prompts held back to be mixed. 1: off."""


class Loader:
    """Endless reading of an indexable dataset.

    >>> loader = Loader(dataset, LoaderConfig(seed=3), rank=0, world=4)
    >>> loader.next(8)
    """

    def __init__(
        self, dataset: Dataset, config: LoaderConfig | None = None, *, rank: int = 0, world: int = 1
    ) -> None:
        if not 0 <= rank < world:
            raise DataError(f"loader: rank {rank} does not lie in a world of {world}")
        if len(dataset) == 0:
            raise DataError("loader: the dataset is empty")
        self.config = config or LoaderConfig()
        self.dataset = dataset
        self.rank = rank
        self.world = world
        self._position = (
            0  # how many this rank has read; its next global position is _position · world + rank
        )
        self._order_epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def next(self, count: int) -> list[Prompt]:
        """The rank's next prompts. Never ends: epochs follow one another."""
        return [self.dataset[self.next_index()] for _ in range(count)]

    def next_index(self) -> int:
        epoch, offset = divmod(self._position * self.world + self.rank, len(self.dataset))
        self._position += 1
        return int(self._order_of(epoch)[offset])

    def state(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "world": self.world,
            "seed": self.config.seed,
            "shuffle": self.config.shuffle,
            "size": len(self.dataset),
            "digests": dict(self.dataset.digests) if isinstance(self.dataset, EditableDataset) else {},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        mine = self.state()
        for key in ("seed", "shuffle", "size"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the loader was saved with {key} = {state[key]!r}, this run has {mine[key]!r}: its position "
                    "means nothing for another order; start without resuming, or restore that setting"
                )
        read = state.get("digests", {})  # not there where an older rill saved it
        for name, digest in mine["digests"].items():
            if read.get(name, digest) != digest:
                raise CheckpointError(
                    f"{name} has other rows than the loader had read when it was saved: restore it; or give what it is "
                    "now another name, and resume with that"
                )
        # Rounded up, so that a change of the world size never reads a row twice in one epoch.
        self._position = -(-int(state["position"]) * int(state["world"]) // self.world)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._order_epoch:
            size = len(self.dataset)
            if self.config.shuffle:
                self._order = np.random.default_rng([self.config.seed, epoch]).permutation(size)
            else:
                self._order = np.arange(size, dtype=np.int64)
            self._order_epoch = epoch
        return self._order


class StreamLoader:
    """Endless reading of a stream: the rank keeps every world-th prompt and mixes inside a small buffer.

    Resuming reads the stream again up to where it stood, which is exact but takes as long as reading does.
    """

    def __init__(
        self, dataset: StreamDataset, config: LoaderConfig | None = None, *, rank: int = 0, world: int = 1
    ) -> None:
        if not 0 <= rank < world:
            raise DataError(f"loader: rank {rank} does not lie in a world of {world}")
        self.config = config or LoaderConfig()
        self.dataset = dataset
        self.rank = rank
        self.world = world
        self._restart()

    def next(self, count: int) -> list[Prompt]:
        return [self._one() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        return {
            "num_read": self._num_read,
            "world": self.world,
            "rank": self.rank,
            "seed": self.config.seed,
            "shuffle": self.config.shuffle,
            "shuffle_buffer": self.config.shuffle_buffer,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        mine = self.state()
        for key in ("world", "rank", "seed", "shuffle", "shuffle_buffer"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the stream loader was saved with {key} = {state[key]!r}, this run has {mine[key]!r}: a stream "
                    "resumes only under the settings it was read with"
                )
        self._restart()
        for _ in range(int(state["num_read"])):
            self._one()

    def _restart(self) -> None:
        self._num_read = 0
        self._rng = np.random.default_rng([self.config.seed, self.rank])
        self._prompts = self._own_part()
        self._buffer: list[Prompt] = []

    def _one(self) -> Prompt:
        room = self.config.shuffle_buffer if self.config.shuffle else 1
        while len(self._buffer) < room:
            prompt = next(self._prompts, None)
            if prompt is None:
                if self._buffer:
                    break  # the end of an epoch empties the buffer, so that epochs do not mix
                self._prompts = self._own_part()
                prompt = next(self._prompts, None)
                if prompt is None:
                    raise DataError(f"loader: the stream gave rank {self.rank} of {self.world} no prompt")
            self._buffer.append(prompt)
        at = int(self._rng.integers(len(self._buffer))) if self.config.shuffle else 0
        self._buffer[at], self._buffer[-1] = self._buffer[-1], self._buffer[at]
        self._num_read += 1
        return self._buffer.pop()

    def _own_part(self) -> Iterator[Prompt]:
        if isinstance(self.dataset, PartedStream):
            return self.dataset.part(self.rank, self.world)
        return islice(self.dataset, self.rank, None, self.world)


def open_loader(
    dataset: Dataset | StreamDataset, config: LoaderConfig | None = None, *, rank: int = 0, world: int = 1
) -> Loader | StreamLoader:
    if isinstance(dataset, Dataset):
        return Loader(dataset, config, rank=rank, world=world)
    return StreamLoader(dataset, config, rank=rank, world=world)
