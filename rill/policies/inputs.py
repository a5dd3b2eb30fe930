"""Observations as tensors.

Words of an instruction are looked up by a hash, so that there is no vocabulary to carry about: a new word is a new row.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rill.errors import ConfigError
from rill.types import Observation, Observations, RobotSpec

NUM_WORDS = 512
"""Rows of a table of words; 0 is no word."""
MAX_WORDS = 16
FEATURES = "features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A batch. Axes: B observation, S number of the state, W word."""

    states_BS: Tensor
    words_BW: Tensor
    images: Mapping[str, Tensor]
    """By camera: [B, height, width, 3], 0 … 255; or FEATURES of all of them, from a frozen vision tower: [B, …]."""

    def __len__(self) -> int:
        return len(self.states_BS)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(
            states_BS=change(self.states_BS),
            words_BW=change(self.words_BW),
            images={name: change(image) for name, image in self.images.items()},
        )

    def rows(self, index: Tensor | slice) -> Self:
        return self.mapped(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Self:
        return self.mapped(lambda tensor: tensor.to(device))

    def blocks(self, size: int) -> list[Self]:
        """Of so many observations each, padded."""
        return [
            self.mapped(partial(padded_rows, first=first, size=size)) for first in range(0, len(self), size)
        ]


def padded_rows(rows: Tensor, first: int, size: int) -> Tensor:
    """Rows from `first` on, `size` of them: where there are fewer, with the last one again."""
    found = rows[first : first + size]
    missing = size - len(found)
    return found if missing == 0 else torch.cat([found, rows[-1:].expand(missing, *rows.shape[1:])])


@lru_cache(maxsize=4096)
def words_of(instruction: str) -> npt.NDArray[np.int64]:
    """The rows of its words, the first MAX_WORDS of them."""
    found = [
        1 + zlib.crc32(word.encode()) % (NUM_WORDS - 1)
        for word in re.findall(r"\w+", instruction.lower())[:MAX_WORDS]
    ]
    return np.array(found + [0] * (MAX_WORDS - len(found)), np.int64)


def read(
    observations: Sequence[Observation],
    spec: RobotSpec,
    words: Callable[[str], npt.NDArray[np.int64]] = words_of,
) -> Inputs:
    """Observations of the robot that the policy was made for. `words`: an instruction's tokens, always as many."""
    seen = Observations.of(observations)
    if seen.states_NS.shape[1] != spec.state_size:
        raise ConfigError(
            f"the policy was made for states of {spec.state_size} numbers, the simulator gives "
            f"{seen.states_NS.shape[1]}: start from a policy of this robot"
        )
    places = {text: place for place, text in enumerate(dict.fromkeys(seen.instructions))}
    rows = [places[text] for text in seen.instructions]
    return Inputs(
        states_BS=torch.from_numpy(seen.states_NS),
        words_BW=torch.from_numpy(np.stack([words(text) for text in places])[rows]),
        images={name: torch.from_numpy(seen.images[name]) for name in spec.cameras},
    )
