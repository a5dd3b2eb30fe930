"""`rill train`: start a recipe, or resume a run; ends with what was reached and what to do next.

The parts of a workflow take seconds to import, so they are imported only once the recipe is found and read: a
misspelt name is answered at once.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rill.cli.arguments import RUNS, Root, recipe_names
from rill.cli.config import read_recipe, resolved_recipe
from rill.cli.console import say, waiting
from rill.config.files import RecipeValues, load_recipe
from rill.config.resolve import dump_config, resolve
from rill.errors import UnsupportedError, UserError
from rill.telemetry.run import Run, RunStatus

if TYPE_CHECKING:
    from rill.workflows.config import RecipeConfig

AUTO = "auto"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name or file (see `rill recipes`).", autocompletion=recipe_names)
    ] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as loop.steps=20.")] = None,
    resume: Annotated[
        str,
        typer.Option(
            "--resume", help="Resume this run (a name or a folder). auto: this recipe's, if it was begun."
        ),
    ] = "",
    name: Annotated[str, typer.Option("--name", help="The run's name. Default: the recipe's.")] = "",
    root: Root = RUNS,
    cluster: Annotated[str, typer.Option("--cluster", help="local or ray; short for cluster.type=…")] = "",
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            help="Who runs where and in what chunks: auto, shared, split, hybrid, or a plan's file.",
            metavar="auto|shared|split|hybrid|FILE",
        ),
    ] = "",
) -> None:
    """Train a model.

    \b
    Examples:
      rill train demo                               a first result in minutes
      rill train demo loop.steps=50 seed=3          with changes
      rill train demo --cluster ray                 the same on Ray
      rill train demo cluster.devices=2 --plan auto   measure, plan, and train by the plan
      rill train --resume runs/demo                 continue from its last checkpoint
      rill train demo --resume auto                 start it, or continue what was begun: for job schedulers
    """
    _require_linux()
    changes = [*(overrides or []), *([f"cluster.type={cluster}"] if cluster else [])]
    if resume == AUTO:
        if not recipe:
            raise typer.BadParameter("--resume auto needs the recipe: it starts the run where none was begun")
        resume = _begun(root / (name or load_recipe(recipe).name))
        if resume and Run.open(resume).state().status is RunStatus.FINISHED:
            say(f"{resume} has finished: nothing to resume")
            return
        if resume:  # with the plan that it has
            recipe, plan = "", ""
    if resume:
        if plan:
            raise UserError("--plan is for a new run: a resumed one goes on with the plan that it has")
        run = Run.open(resume, root=root)
        if recipe and "=" not in recipe:
            raise UserError(f"--resume {resume} goes on with that run's own recipe: leave {recipe!r} out")
        # with --resume there is no recipe, so the first word is a change
        changes = [*([recipe] if recipe else []), *changes]
        if run.state().status is RunStatus.FINISHED and not changes:
            raise UserError(
                f"{run.path} has finished: to continue it, change something, such as loop.steps=200"
            )
        values = read_recipe(run.config_path, changes)
        with _agent_ahead(values):
            _go_on(run, values, changes)
    elif recipe:
        values = read_recipe(recipe, changes)
        with _agent_ahead(values):
            _begin(values, recipe, name, root, plan)
    else:
        raise typer.BadParameter("give a recipe (see `rill recipes`), or --resume RUN")


def _agent_ahead(values: RecipeValues) -> AbstractContextManager[None]:
    """What workers need takes longest to import: begin with it where it is known, while the recipe is checked."""
    cluster = values.values.get("cluster", {})
    is_local = isinstance(cluster, dict) and cluster.get("type", "local") == "local"
    if not is_local or values.values.get("workflow") not in ("grpo", "ppo"):
        return nullcontext()
    from rill.runtime.process.backend import agent_ahead
    from rill.workflows import PRELOAD

    return agent_ahead(PRELOAD)


def _begin(values: RecipeValues, recipe: str, name: str, root: Path, plan: str) -> None:
    config, leave_plan = _checked(values), None
    if plan:
        from rill.cli.plan import choose

        leave_plan = choose(plan, values, root=root)
        config = resolve(type(config), values.values, values.provenance)
    from rill.cli.driver import carry_out

    run = Run.create(name or values.name, root=root, config_toml=dump_config(config, values.provenance))
    if leave_plan is not None:
        leave_plan(run.path)
    carry_out(config, run, recipe)


def _go_on(run: Run, values: RecipeValues, changes: list[str]) -> None:
    config = _checked(values)
    from rill.cli.driver import carry_out
    from rill.journal.changes import accept

    before = resolve(type(config), load_recipe(run.config_path, []).values).model_dump()
    lines, is_log_stale = accept(run.path, before, config.model_dump() if changes else before)
    resumed = Run.resume(str(run.path))
    for line in lines:
        say(line)
    new = dump_config(config, values.provenance)
    carry_out(config, resumed, str(run.config_path), changed_config=new, is_log_stale=is_log_stale)


def _checked(values: RecipeValues) -> RecipeConfig:
    """The recipe as it will run. What can be seen to fail is told here, before anything starts."""
    with waiting("loading"):
        from rill.cli.preflight import preflight
        from rill.workflows.config import RecipeConfig

        config = resolved_recipe(values)
    if not isinstance(config, RecipeConfig):
        raise UserError(
            f"workflow {values.values['workflow']!r}: "
            "its Config must derive from rill.workflows.config.RecipeConfig"
        )
    with waiting("checking"):
        for note in preflight(config):
            say(f"note: {note}")
    return config


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UnsupportedError(
            f"runs need Linux (shared memory, process supervision), and this is {sys.platform}: use a container or a "
            "virtual machine; `rill runs`, `report`, `dashboard`, `config` and `recipes` work here"
        )


def _begun(folder: Path) -> str:
    """The run at this very place; empty where one can begin."""
    if (folder / "status.json").is_file():
        return str(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(
            f"{folder} is there and is no run: each start would make another beside it: move it, or give another --name"
        )
    return ""
