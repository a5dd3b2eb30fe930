"""Checkpoints of a whole run: one folder a step, one manifest that names every part, whole or not at all.

checkpoints/step-000020/
  actor/            one folder per worker group, written by its ranks
  loop.json         admission, data position: what the driver holds
  manifest.json     written last, with the checksum of loop.json; a folder without it does not count
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rill.errors import CheckpointError
from rill.runtime.group import WorkerGroup
from rill.telemetry.run import Run, write_atomically

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "loop.json"


class RunCheckpoints:
    """Saves and loads a run's groups together; every group has `save(folder)` and `load(folder)`."""

    def __init__(self, run: Run, groups: Mapping[str, WorkerGroup[Any]], keep: int, timeout_s: float) -> None:
        self._run = run
        self._folder = run.checkpoints_dir
        self._groups = dict(groups)
        self._keep = keep
        self._timeout_s = timeout_s

    def save(self, *, step: int, state: Mapping[str, Any]) -> Path:
        folder = self._folder / f"step-{step:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        handles = {name: group.save(str(folder / name)) for name, group in self._groups.items()}
        for handle in handles.values():
            handle.wait(timeout_s=self._timeout_s)
        text = json.dumps({"step": step, **state})
        write_atomically(folder / STATE, text)
        manifest = {"step": step, "groups": sorted(self._groups), "state_sha256": _sha256(text)}
        write_atomically(folder / MANIFEST, json.dumps(manifest))
        self._drop_old()
        return folder

    def load_latest(self) -> dict[str, Any] | None:
        """The state of the newest whole checkpoint, its groups loaded; None when there is none.

        Damaged ones are passed over, with a word in the log; where nothing else is left that is an error, because the
        run would otherwise begin anew without saying so.
        """
        found = whole_checkpoints(self._run)
        for folder in reversed(found):
            state = _read_state(folder)
            if state is None:
                log.warning("%s is damaged: passed over", folder)
                continue
            handles = [group.load(str(folder / name)) for name, group in self._groups.items()]
            for handle in handles:
                handle.wait(timeout_s=self._timeout_s)
            return state
        if found:
            raise CheckpointError(
                f"all {len(found)} checkpoints in {self._folder} are damaged: start the run anew"
            )
        return None

    def _drop_old(self) -> None:
        for folder in whole_checkpoints(self._run)[: -self._keep]:
            (folder / MANIFEST).unlink()  # first: a half-removed checkpoint must not look whole
            shutil.rmtree(folder)


def _read_state(folder: Path) -> dict[str, Any] | None:
    """None where the checkpoint is damaged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        text = (folder / STATE).read_text(encoding="utf-8")
        missing = [name for name in manifest["groups"] if not (folder / name).is_dir()]
    except (OSError, ValueError, KeyError):
        return None
    if missing or _sha256(text) != manifest["state_sha256"]:
        return None
    state: dict[str, Any] = json.loads(text)
    return state


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def whole_checkpoints(run: Run) -> list[Path]:
    """The folders that count, oldest first."""
    return sorted(path.parent for path in run.checkpoints_dir.glob(f"step-*/{MANIFEST}"))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def require_checkpoint(run: Run) -> None:
    """A resume of a run without a checkpoint would start from nothing without saying so."""
    if not whole_checkpoints(run):
        raise CheckpointError(
            f"{run.path} has no whole checkpoint to resume from: start it anew, with `loop.checkpoint_every` set"
        )
