"""What is in the picture? Coloured shapes on grey, drawn when asked for; the words alone say nothing of the answer.

The level is the number of shapes where they are to be counted; one shape is drawn where its colour is asked.
"""

from __future__ import annotations

import hashlib
import random
import struct
import zlib
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from rill.data.tasks.base import Problem, TaskConfig, TaskDataset
from rill.types import Pixels

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 210, 40),
    "white": (245, 245, 245),
    "black": (20, 20, 20),
}
CELLS = 3
"""Shapes to be counted lie in a grid of so many rows and columns."""


class ShapesDataset(TaskDataset):
    name = "shapes"
    default_levels = (1, 4)

    class Config(TaskConfig):
        type: Literal["shapes"] = "shapes"
        form: Literal["bare", "chat"] = "chat"
        asks: Literal["colour", "count"] = "colour"
        """What is asked: the colour of the one shape there is, or how many there are."""
        side: int = Field(default=32, ge=12, le=1024)
        """Pixels of the picture's side."""

        @model_validator(mode="after")
        def _is_chat(self) -> ShapesDataset.Config:
            if self.form == "bare":
                raise ValueError("shapes are shown in messages: leave form as chat")
            return self

    def make(self, rng: random.Random, level: int) -> Problem:
        config = self.settings
        assert isinstance(config, ShapesDataset.Config)
        pixels: Pixels = np.full((config.side, config.side, 3), rng.randint(90, 150), dtype=np.uint8)
        if config.asks == "colour":
            answer = rng.choice(list(COLOURS))
            size = rng.randint(config.side // 3, config.side // 2)
            corner = [rng.randint(0, config.side - size) for _ in range(2)]
            draw(pixels, rng.choice(KINDS), COLOURS[answer], corner[0], corner[1], size)
            instruction = "What colour?"
        else:
            answer, cell = str(level), config.side // CELLS
            for place in rng.sample(range(CELLS * CELLS), level):
                top, left = (1 + cell * n for n in divmod(place, CELLS))
                draw(pixels, rng.choice(KINDS), COLOURS[rng.choice(list(COLOURS))], top, left, cell - 2)
            instruction = "How many?"
        picture = png(pixels)
        return Problem(
            question=hashlib.blake2b(picture, digest_size=8).hexdigest(),
            instruction=instruction,
            answer=answer,
            difficulty=float(level),
            picture=picture,
        )


Kind = Literal["square", "disc", "triangle"]
KINDS: tuple[Kind, ...] = ("square", "disc", "triangle")


def draw(pixels: Pixels, kind: Kind, colour: tuple[int, int, int], top: int, left: int, size: int) -> None:
    """Into the square of `size` pixels at (top, left)."""
    y, x = np.mgrid[0:size, 0:size] + 0.5
    middle = size / 2
    inside = {
        "square": np.ones((size, size), dtype=np.bool_),
        "disc": (x - middle) ** 2 + (y - middle) ** 2 <= middle**2,
        "triangle": abs(x - middle) <= y / 2,
    }[kind]
    pixels[top : top + size, left : left + size][inside] = colour


def png(pixels: Pixels) -> bytes:
    """A file of 8-bit RGB pixels [height, width, 3]."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 6)),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
