"""The arguments that commands share, and what the shell offers for them when Tab is pressed: recipes and runs by name.

`rill --install-completion` puts the latter in place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rill.errors import UserError
from rill.telemetry.run import RUNS_FOLDER, Run, list_runs

RUNS = Path(RUNS_FOLDER)


def recipe_names(incomplete: str) -> list[str]:
    from rill.config.recipes import list_recipes

    return [recipe.name for recipe in list_recipes() if recipe.name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    return [run.name for run in list_runs() if run.name.startswith(incomplete)]


def model_path(model: str) -> str:
    """What MODEL names: the model that a run has left, a folder, or a name of the hub. Light: a wrong name is answered
    before anything is imported."""
    run = Run.find(model)
    if run is None and "/" not in model and not Path(model).exists():
        run = Run.open(model)  # tells the runs there are
    return model if run is None else str(run.trained_model())


def to_write(path: Path | None) -> Path | None:
    """The callback of an option that names a file to write: its folder is made, and what cannot be written is told
    before the work and not behind it."""
    if path is None:
        return None
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file in it")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: name another file")
    return path


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[
    str,
    typer.Argument(
        help="A run (its trained model), a model's folder, or its name on the hub.", autocompletion=run_names
    ),
]
Root = Annotated[Path, typer.Option("--root", help="The folder that holds the runs.")]
RunName = Annotated[
    str, typer.Argument(help="A run's name, or the path of its folder.", autocompletion=run_names)
]
