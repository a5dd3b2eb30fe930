"""Episodes as moving pictures: a GIF with the instruction above it."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rill.models.pillow import pillow
from rill.types import Pixels

FRAME_MS, LAST_FRAME_MS = 140, 1400
BAR_PIXELS = 18
GREEN, RED = (32, 128, 64), (160, 48, 40)


def gif(pictures: Sequence[Pixels], instruction: str, *, success: bool) -> bytes:
    """One GIF; the bar over the last picture is green where the episode succeeded, red where it did not."""
    pil, frames = pillow(), []
    for number, picture in enumerate(pictures):
        height, width = picture.shape[:2]
        frame = pil.Image.new("RGB", (width, height + BAR_PIXELS), (28, 30, 34))
        if number == len(pictures) - 1:
            frame.paste(GREEN if success else RED, (0, 0, width, BAR_PIXELS))
        pil.ImageDraw.Draw(frame).text((5, 3), instruction, fill=(245, 245, 245))
        frame.paste(pil.Image.fromarray(picture), (0, BAR_PIXELS))
        frames.append(frame.quantize(64))
    held = [FRAME_MS] * (len(frames) - 1) + [LAST_FRAME_MS]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=held, loop=0)
    return file.getvalue()
