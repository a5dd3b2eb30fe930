"""The built page is checked in, so that neither a user nor CI needs Node; this holds it to its sources."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import rill.dashboard

ROOM = Path(rill.dashboard.__file__).parent
STATIC, WEB = ROOM / "static", ROOM / "web"
BUILD = json.loads((STATIC / "build.json").read_text())


def sum_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_built_page_is_that_of_the_sources() -> None:
    stale = [
        name
        for name, known in BUILD["sources"].items()
        if not (WEB / name).exists() or sum_of(WEB / name) != known
    ]
    added = {f"src/{path.name}" for path in (WEB / "src").iterdir()} - set(BUILD["sources"])
    assert not stale and not added, f"{stale or added} changed since the page was built: run `make web`"


def test_the_built_page_was_not_edited_by_hand() -> None:
    assert {name: sum_of(STATIC / name) for name in BUILD["built"]} == BUILD["built"], "run `make web`"


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text()


def test_the_page_is_small_enough_to_be_mailed_inside_every_report() -> None:
    assert sum((STATIC / name).stat().st_size for name in BUILD["built"]) < 250_000
