"""Which runs are shown, each under a key of its own, and what is known of each without opening its logs.

A key is looked up among the folders that were found, so no path comes from a request. Folders are looked for again
every time, so a run that starts later appears. A link that leads out of the folder of runs is not followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rill.dashboard.figures import Figures, FollowedFigures
from rill.errors import UserError
from rill.telemetry.guards import GUARDS_FILE, Finding, read_findings
from rill.telemetry.run import Run

HEADLINES = ("eval/accuracy", "reward/mean", "sft/loss", "dpo/loss", "reward_model/loss", "eval/loss")
MAX_FINDINGS = 1000


def find_runs(folders: Sequence[Path], root: Path) -> list[Path]:
    """The run folders themselves, or all under `root` when none is named; the newest first."""
    if folders:
        found = [folder for folder in folders if (folder / "status.json").is_file()]
    else:
        inside = root.resolve()
        found = [
            path.parent
            for path in root.glob("*/status.json")
            if not any(_leads_out(link, inside) for link in (path.parent, path))
        ]
    return sorted(found, key=_started_s, reverse=True)


class Catalog:
    def __init__(self, folders: Sequence[Path], root: Path) -> None:
        self.folders = [folder.resolve() for folder in folders]
        self.root = root
        self._figures: dict[Path, FollowedFigures] = {}

    def runs(self) -> dict[str, Path]:
        """key -> folder, the newest first. The key is the folder's name, with a number where two share it."""
        keys: dict[str, Path] = {}
        for path in find_runs(self.folders, self.root):
            name, key, number = path.name, path.name, 1
            while key in keys:
                number += 1
                key = f"{name}~{number}"
            keys[key] = path
        return keys

    def open(self, key: str) -> Run:
        folder = self.runs().get(key)
        if folder is None:
            raise UserError(f"there is no run {key!r} here (any more): go back to the list")
        return Run(folder)

    def figures(self, run: Run) -> Figures:
        return self._figures.setdefault(run.path, FollowedFigures(run.path)).now()

    def summary(self, key: str, run: Run) -> dict[str, Any]:
        state, figures = run.state(), self.figures(run)
        headline = next((name for name in HEADLINES if figures.last(name) is not None), "")
        steps = figures.steps
        return {
            "key": key,
            "name": run.name,
            "status": state.status.value,
            "message": state.message,
            "step": max(steps[-1], 0) if steps else 0,  # a warm-up counts up to 0
            "headline": headline,
            "value": figures.last(headline) if headline else None,
            "started_s": state.created_s,
            "lasted_s": max(0.0, state.lasted_s(figures.last_time_s)),
            "version": figures.version,
        }


def findings(run: Run) -> list[Finding]:
    """What the guards found, oldest first."""
    if (run.path / GUARDS_FILE).is_symlink():
        return []
    return list(islice(read_findings(run.path), MAX_FINDINGS))


def _leads_out(path: Path, folder: Path) -> bool:
    return path.is_symlink() and not path.resolve().is_relative_to(folder)


def _started_s(folder: Path) -> float:
    try:
        return Run(folder).created_s
    except OSError:
        return 0.0
