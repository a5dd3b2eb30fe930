"""Pictures and videos of rollouts: files under `media/` in a run folder, handed out by name and nothing else.

A name is refused when it leaves the folder, goes through a link, or is of a kind that a browser could run.
"""

from __future__ import annotations

from pathlib import Path

from rill.errors import UserError

MEDIA_FOLDER = "media"
KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
}


def media_file(run: Path, name: str) -> tuple[Path, str]:
    """(path, content type) of a picture or video of the run."""
    folder = (run / MEDIA_FOLDER).resolve()
    path = folder / name
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise UserError(f"{name!r}: only {', '.join(sorted(KINDS))} are shown")
    if not folder.is_relative_to(run.resolve()) or "\x00" in name:
        raise UserError(f"{name!r} lies outside the run folder")
    resolved = path.resolve()
    if not resolved.is_relative_to(folder) or resolved != path or not resolved.is_file():
        raise UserError(f"there is no {name!r} in {MEDIA_FOLDER}/ of this run")
    return resolved, kind
