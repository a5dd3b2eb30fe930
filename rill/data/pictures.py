"""Pictures in conversations: content parts, as the OpenAI API has them, to and from a message's text and files.

Called by whoever takes messages from outside: datasets, agents, the server. A picture comes as a data: URL. Nothing is
fetched: a server that follows addresses of its clients looks into its own network for them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from rill.errors import DataError
from rill.types import PICTURE

KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")


def read_parts(parts: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[bytes, ...]]:
    """(content, pictures) of a message whose content is a list: text and image_url parts."""
    content, pictures = "", []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                content += text
            case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
                pictures.append(read_url(url))
                content += PICTURE
            case _:
                kind = str(part.get("type") if isinstance(part, Mapping) else type(part).__name__)[:64]
                raise DataError(
                    f"a content part of type {kind!r} is not supported: give {{type: text, text}} or "
                    "{type: image_url, image_url: {url}}"
                )
    return content, tuple(pictures)


def read_url(url: str) -> bytes:
    """The file in a data: URL."""
    head, comma, body = url.partition(",")
    if not comma or not head.startswith("data:") or not head.endswith(";base64"):
        raise DataError(
            f"an image_url must be a data: URL with base64, got {url[:40]!r}…: addresses are not fetched"
        )
    if (kind := head[5:].partition(";")[0].lower()) not in KINDS:
        raise DataError(f"pictures of kind {kind[:40]!r} are not read: {', '.join(KINDS)} are")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"the base64 of an image_url is broken: {error}") from error


def template_parts(content: str) -> list[dict[str, str]]:
    """What a chat template is given: the text around the pictures, and a place for each."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(PICTURE)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts
