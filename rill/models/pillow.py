"""The one door to Pillow: pictures that models read, and films of robots."""

from __future__ import annotations

from typing import Any

from rill.registry import import_extra


def pillow() -> Any:
    """PIL, with Image and ImageDraw."""
    needs = 'Pillow is not installed: pip install "rill[vision]"'
    import_extra("PIL.ImageDraw", needs)  # and Image with it
    return import_extra("PIL", needs)
