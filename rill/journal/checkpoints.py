"""Checkpoints of a whole run: one folder a step, one manifest that names every part, whole or not at all.

checkpoints/step-000020/
  actor/            one folder per worker group, written by its ranks
  controller/       the position in the data, and the groups begun and not yet trained on
  manifest.json     written last; a folder without it does not count. It names the checksum of every file that has no
                    manifest of its own, and of those manifests (a trainer's names its own files)

Supervised steps before RL count up to 0, as in the metrics: a checkpoint of step -250 was taken 250 of them before the
first step, and holds the actor alone.

`save` returns when training may go on; files are written behind it, and the manifest when all of them are there, which
the next `save`, or leaving the block, makes sure of.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rill.errors import CheckpointError, RillError, WorkerError
from rill.journal.compaction import Compaction
from rill.journal.reader import CONTROLLER
from rill.runtime.group import WorkerGroup
from rill.runtime.handle import Handle
from rill.telemetry.run import Run, sync, write_atomically

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(-?\d+)")
SETTLE_S = 30.0
"""How long a run that fails waits for the files of its last checkpoint."""
DAMAGED = "manifest.damaged.json"
"""What becomes of the manifest of one that could not be loaded."""


class RunCheckpoints:
    """Saves and loads a run's groups together; every group has `save(folder)`, `wait_saved` and `load(folder)`."""

    def __init__(
        self,
        run: Run,
        groups: Mapping[str, WorkerGroup[Any]],
        keep: int,
        timeout_s: float,
        *,
        compacts: bool = True,
        is_warm_up: bool = False,
    ) -> None:
        """`compacts`: the token log is removed as far as no checkpoint needs it. `is_warm_up`: of the steps before the
        first; else those are not looked at."""
        self._run = run
        self._folder = run.checkpoints_dir
        self._groups = dict(groups)
        self._keep = keep
        self._is_warm_up = is_warm_up
        self._timeout_s = timeout_s
        self._newest_step: int | None = None
        """Saved or loaded by this object."""
        self.has_passed_over = False
        """A newer one, which is damaged, when it loaded."""
        self._scores: dict[int, float] = {}
        self._unsettled: tuple[int, list[Handle]] | None = None
        """The step whose files are being written, and the calls that wait for them."""
        self._compaction = Compaction(run.path) if compacts else None
        self._tidying: threading.Thread | None = None
        self._doomed: list[Path] = []
        """Folders that do not count any more, and take room."""

    def save(self, step: int, score: float | None = None) -> None:
        """`score`: of what loop.keep_best names; the checkpoint with the highest is kept beside the newest.

        Raises CheckpointError where it, or the one before, cannot be written; those before it stay as they are. What is
        saved already is left alone: a run that is killed while its last checkpoint is written a second time would have
        lost it.
        """
        if step == self._newest_step:
            return
        self.settle()
        if score is not None:
            self._scores[step] = score
        folder = self._folder / f"step-{step:06d}"
        with self._told(step):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for handle in [group.save(str(folder / name)) for name, group in self._groups.items()]:
                handle.wait(timeout_s=self._timeout_s)
        self._unsettled = (step, [group.wait_saved(self._timeout_s) for group in self._groups.values()])
        self._newest_step = step

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for the files of the last `save`; from then on it counts."""
        if self._unsettled is None:
            return
        (step, handles), self._unsettled = self._unsettled, None
        folder = self._folder / f"step-{step:06d}"
        with self._told(step):
            for handle in handles:
                handle.wait(timeout_s=self._timeout_s if timeout_s is None else timeout_s)
            manifest = {
                "step": step,
                "groups": sorted(self._groups),
                "score": self._scores.get(step),
                "files": (files := checksums(folder)),
            }
            for name in files:
                sync(folder / name)
            write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1))
            for place in (folder, self._folder):  # it is found after a loss of power: those before it may go
                sync(place)
        self._doom_old()
        self._tidy()

    def settle_if_done(self) -> None:
        """As `settle`, without waiting."""
        if self._unsettled is not None and all(handle.done() for handle in self._unsettled[1]):
            self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """However the run ends, a checkpoint that is being written counts if it can."""
        if error is None:
            self.settle()
        else:
            with suppress(RillError):  # what goes wrong is told by the error that is under way
                self.settle(SETTLE_S)
        self._end_tidying()

    @contextmanager
    def _told(self, step: int) -> Iterator[None]:
        """What goes wrong while a checkpoint is written, in words that help."""
        try:
            yield
        except (OSError, WorkerError) as error:
            free_mb = shutil.disk_usage(self._folder).free / 1e6
            # Half a checkpoint only takes room.
            shutil.rmtree(self._folder / f"step-{step:06d}", ignore_errors=True)
            whole = whole_checkpoints(self._run)
            kept = f"the one of {place_of(whole[-1])} is whole" if whole else "there is none before it"
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self._folder} with {free_mb:,.0f} MB free "
                f"({str(error).splitlines()[0]}); {kept}. Make room or lower loop.keep_checkpoints, then resume"
            ) from error

    def load_latest(self) -> int | None:
        """Load the newest whole checkpoint into the groups; the step that it holds, None when there is none.

        Damaged ones are passed over, with a word in the log, and do not count any more once an older one is loaded: the
        run goes on from there, and what it saves then is the newest. Where nothing else is left that is an error,
        because the run would otherwise begin anew without saying so. What a kill has left of one that was being
        written, or removed, goes: it only takes room.
        """
        for folder in _folders(self._run):
            if not any((folder / name).exists() for name in (MANIFEST, DAMAGED)):
                shutil.rmtree(folder, ignore_errors=True)
        found = [
            folder for folder in whole_checkpoints(self._run) if (step_of(folder) < 0) == self._is_warm_up
        ]
        damaged: dict[Path, str] = {}
        for folder in reversed(found):
            damage = self._load(folder)
            if not damage:
                for other in damaged:
                    (other / MANIFEST).rename(other / DAMAGED)
                self.has_passed_over = bool(damaged)
                self._newest_step = step_of(folder)
                return self._newest_step
            log.warning("%s cannot be loaded (%s): passed over", folder, damage)
            damaged[folder] = damage
        if damaged:
            newest = next(iter(damaged.values()))
            raise CheckpointError(
                f"none of the {len(found)} checkpoints in {self._folder} can be loaded; the newest: {newest}. If a "
                "changed configuration does not fit them, resume without the change; else start the run anew"
            )
        return None

    def _load(self, folder: Path) -> str:
        """What is wrong with it; empty when every group has taken its part."""
        try:
            parts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["groups"]
        except (OSError, ValueError, KeyError) as error:
            return f"{MANIFEST}: {error}"
        if problem := damage_of(folder):
            return problem
        if parts != sorted(self._groups):
            return f"it holds {', '.join(parts)}, the run has {', '.join(sorted(self._groups))}"
        handles = [group.load(str(folder / name)) for name, group in self._groups.items()]
        try:
            for handle in handles:
                handle.wait(timeout_s=self._timeout_s)  # not for ranks that wait for a lost one
        except WorkerError as error:
            if not isinstance(error.__cause__, CheckpointError):
                raise
            return str(error.__cause__)
        return ""

    def _doom_old(self) -> None:
        whole = whole_checkpoints(self._run)
        scores = {folder: score for folder in whole if (score := score_of(folder)) is not None}
        best = max(scores, key=lambda folder: (scores[folder], folder), default=None)
        for folder in whole[: -self._keep]:
            if folder != best:
                (folder / MANIFEST).unlink()  # a half-removed checkpoint must not look whole
                self._doomed.append(folder)

    def _tidy(self) -> None:
        """Behind the run's back: the folders, and the log of what the oldest checkpoint that is kept has trained on, or
        dropped. Where that takes longer than a checkpoint, the next one goes on with it."""
        if self._tidying is not None and self._tidying.is_alive():
            return
        doomed, self._doomed = self._doomed, []
        needed = needed_groups(whole_checkpoints(self._run)[-self._keep :][0])
        self._tidying = threading.Thread(target=self._remove, args=(doomed, needed), name="tidy", daemon=True)
        self._tidying.start()

    def _remove(self, doomed: Sequence[Path], needed: Callable[[str], bool] | None) -> None:
        for folder in doomed:
            shutil.rmtree(folder, ignore_errors=True)
        if self._compaction is not None and needed is not None:
            self._compaction.run(needed)

    def _end_tidying(self) -> None:
        if self._tidying is not None:
            self._tidying.join(SETTLE_S)
        self._remove(self._doomed, None)


def needed_groups(checkpoint: Path) -> Callable[[str], bool] | None:
    """Whether a run that goes on from this checkpoint may need what the token log has of a group; None: it cannot be
    told, or the run has no groups."""
    try:
        state = json.loads((checkpoint / CONTROLLER / "state.json").read_text(encoding="utf-8"))
        next_index, untrained = int(state["next_index"]), set(state["untrained"])
    except (OSError, ValueError, KeyError):
        return None

    def is_needed(group: str) -> bool:
        if not group.startswith("g"):
            return group == CONTROLLER
        index = int(group[1:])
        return index >= next_index or index in untrained

    return is_needed


def whole_checkpoints(run: Run) -> list[Path]:
    """The folders that count, oldest first."""
    return sorted((folder for folder in _folders(run) if (folder / MANIFEST).exists()), key=step_of)


def damaged_checkpoints(run: Run) -> list[Path]:
    """Those that could not be loaded, oldest first."""
    return sorted((folder for folder in _folders(run) if (folder / DAMAGED).exists()), key=step_of)


def _folders(run: Run) -> list[Path]:
    """Those of checkpoints; a copy that somebody keeps beside them under a name of its own is left alone."""
    return [path for path in run.checkpoints_dir.glob("step-*") if _STEP.fullmatch(path.name)]


def needed_now(run_dir: Path) -> Callable[[str], bool] | None:
    """As `needed_groups`, of a run that goes on from its newest checkpoint."""
    found = whole_checkpoints(Run(run_dir))
    return needed_groups(found[-1]) if found else None


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of the files under `folder` by relative path. Where a part has a manifest that names its own files, of
    that alone: weights are not read again."""
    found: dict[str, str] = {}
    covered = {path.parent for path in folder.glob(f"*/**/{MANIFEST}")}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.parent != folder and (path.parent not in covered or path.name == MANIFEST):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def damage_of(folder: Path, *, deep: bool = False) -> str:
    """What is wrong with a checkpoint; empty when nothing is. `deep`: read the weights too, which a part's own manifest
    names (rill.training.checkpoint)."""
    try:
        expected = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("files", {})
    except (OSError, ValueError) as error:
        return f"{MANIFEST}: {error}"
    for name, checksum in expected.items():
        if problem := _damage(folder, name, checksum):
            return problem
        if deep and Path(name).name == MANIFEST:
            part = Path(name).parent
            for inner, about in json.loads((folder / name).read_text(encoding="utf-8"))["files"].items():
                if problem := _damage(folder / part, inner, about["sha256"]):
                    return f"{part}: {problem}"
    return ""


def _damage(folder: Path, name: str, checksum: str) -> str:
    try:
        with (folder / name).open("rb") as file:
            is_whole = hashlib.file_digest(file, "sha256").hexdigest() == checksum
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return "" if is_whole else f"{name} is damaged: its checksum is not the one in its manifest"


def score_of(folder: Path) -> float | None:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("score")
    except (OSError, ValueError):
        return None
    return None if found is None else float(found)


def newest_size(run: Run) -> int:
    """Bytes of the newest whole checkpoint; 0 when there is none."""
    found = whole_checkpoints(run)
    try:
        return sum(path.stat().st_size for path in found[-1].rglob("*") if path.is_file()) if found else 0
    except OSError:  # it is being removed
        return 0


def step_of(folder: Path) -> int:
    """Below 0: of the supervised steps before the first."""
    return int(folder.name.removeprefix("step-"))


def place_of(folder: Path) -> str:
    """The same for people."""
    step = step_of(folder)
    return f"step {step}" if step >= 0 else f"the warm-up, {-step} steps before its end"
