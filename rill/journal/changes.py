"""A run that is resumed with other settings: what changed, and what follows from it.

    harmless    where and how it runs; what was sampled before is used
    from here   the algorithm, the data, sampling: it goes on from the checkpoint with the new setting. What was sampled
                after it was made by the old one, so the token log is set aside and sampled anew
    refused     another model or workflow: its checkpoints do not fit

Called by `rill train --resume`: `accept` before the run is held, `begin_anew` by its driver.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rill.errors import UserError
from rill.journal.token_log import FOLDER
from rill.telemetry.run import Run, write_atomically

REFUSED = ("workflow", "model")
HARMLESS = (
    "loop.steps",
    "loop.checkpoint_every",
    "loop.keep_checkpoints",
    "loop.keep_best",
    "loop.step_timeout_s",
    "loop.max_relaunches",
    "loop.max_refills",
    "rollout.log_groups",
    "rollout.max_concurrent",
    "rollout.env_workers",
    "cluster",
    "placement",
    "flow",
    "sync",
    "eval",
    "sinks",
    "journal",
    "elastic",
    "guard_actions",
    "stop_grace_s",
)
"""Names of settings and of tables."""


def accept(run_dir: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Lines that say what changed, and whether the token log has to be set aside. UserError: it cannot go on so."""
    changed = dict(differences(before, after))
    refused = [name for name in changed if _is_in(name, REFUSED)]
    if refused:
        raise UserError(
            f"{refused[0]} = {changed[refused[0]][1]!r} does not fit the checkpoints of {run_dir}, made with "
            f"{changed[refused[0]][0]!r}: start a new run (a model can be given by model.path)"
        )
    lines = [f"changed: {name} = {new!r}, was {old!r}" for name, (old, new) in changed.items()]
    is_stale = any(not _is_in(name, HARMLESS) for name in changed)
    if is_stale and (run_dir / FOLDER).exists():
        lines.append(
            f"what was sampled after the last checkpoint is sampled anew (its log: {FOLDER}-until-…)"
        )
    return lines, is_stale


def begin_anew(run: Run, config_toml: str) -> Callable[[], None]:
    """From now on the run has these settings and an empty token log. What is returned undoes it, for a change that does
    not work. At no moment is there a log beside settings that it was not sampled with: a kill may come at any."""
    before = run.config_path.read_text(encoding="utf-8")
    folder = run.path / FOLDER
    aside = run.path / f"{FOLDER}-until-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        folder.rename(aside)
    write_atomically(run.config_path, config_toml)

    def undo() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        write_atomically(run.config_path, before)
        if aside.exists():
            aside.rename(folder)

    return undo


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """(dotted name, (old, new)) of every setting that differs."""
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", (old, new)


def _is_in(name: str, names: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in names)
