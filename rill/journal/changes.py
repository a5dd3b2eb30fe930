"""A run that is resumed with other settings: what changed, and what follows from it.

    harmless    where and how it runs; what was sampled before is used
    from here   the algorithm, the data, sampling: it goes on from the checkpoint with the new setting. What was sampled
                after it was made by the old one, so the token log is set aside and sampled anew
    refused     another model or workflow: its checkpoints do not fit

Called by `rill train --resume`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rill.errors import UserError
from rill.journal.token_log import FOLDER

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
)
"""Names of settings and of tables."""


def accept(run_dir: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Lines that say what changed and what follows. UserError: the run cannot go on with it."""
    changed = dict(differences(before, after))
    refused = [name for name in changed if _is_in(name, REFUSED)]
    if refused:
        raise UserError(
            f"{refused[0]} = {changed[refused[0]][1]!r} does not fit the checkpoints of {run_dir}, made with "
            f"{changed[refused[0]][0]!r}: start a new run (a model can be given by model.path)"
        )
    lines = [f"changed: {name} = {new!r}, was {old!r}" for name, (old, new) in changed.items()]
    if any(not _is_in(name, HARMLESS) for name in changed):
        kept = set_aside(run_dir)
        if kept is not None:
            lines.append(
                f"what was sampled after the last checkpoint was sampled with the old settings: it is sampled anew "
                f"(the token log is kept as {kept.name})"
            )
    return lines


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


def set_aside(run_dir: Path) -> Path | None:
    """The token log is not looked at any more; None where there is none."""
    folder = run_dir / FOLDER
    if not folder.exists():
        return None
    target = run_dir / f"{FOLDER}-until-{time.strftime('%Y%m%d-%H%M%S')}"
    shutil.move(folder, target)
    return target


def _is_in(name: str, names: tuple[str, ...]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in names)
