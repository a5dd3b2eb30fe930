"""The one door to Pillow: pictures that models read, and films of robots."""

from __future__ import annotations

from typing import Any

from rill.errors import MissingExtraError


def pillow() -> Any:
    """PIL, with Image and ImageDraw."""
    try:
        import PIL.Image
        import PIL.ImageDraw
    except ImportError as error:
        raise MissingExtraError('Pillow is not installed: pip install "rill[vision]"') from error
    return PIL
