"""`rill train`: start a recipe, or resume a run; ends with what was reached and what to do next.

The parts of a workflow take seconds to import, so they are imported only once the recipe is found and read: a
misspelt name is answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rill.cli.console import waiting
from rill.config.files import load_recipe
from rill.config.resolve import dump_config, resolve
from rill.errors import UserError
from rill.telemetry.run import RUNS_FOLDER, Run, RunStatus

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file (see `rill recipes`).")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes, such as loop.steps=20.")] = None,
    resume: Annotated[str, typer.Option("--resume", help="Resume this run (a name or a folder).")] = "",
    name: Annotated[str, typer.Option("--name", help="The run's name. Default: the recipe's.")] = "",
    root: Annotated[Path, typer.Option("--root", help="The folder that holds the runs.")] = Path(RUNS_FOLDER),
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
    """
    changes = [*(overrides or []), *([f"cluster.type={cluster}"] if cluster else [])]
    if resume:
        if plan:
            raise UserError("--plan is for a new run: a resumed one goes on with the plan that it has")
        if recipe:
            changes = [recipe, *changes]  # with --resume there is no recipe, so the first word is a change
        found = Run.open(resume, root=root)
        if found.state().status is RunStatus.FINISHED and not changes:
            raise UserError(
                f"{found.path} has finished: to continue it, change something, such as loop.steps=200"
            )
        values = load_recipe(found.config_path, changes)
    elif recipe:
        values = load_recipe(recipe, changes)
    else:
        raise typer.BadParameter("give a recipe (see `rill recipes`), or --resume RUN")

    chosen = None
    if plan:
        from rill.cli.plan import choose

        chosen = choose(plan, values, root=root)
    with waiting("loading"):
        from rill.cli.driver import carry_out
        from rill.workflows import recipe_schema
        from rill.workflows.config import RecipeConfig

        schema = recipe_schema(values.values, str(values.path))
        config = resolve(schema, values.values, values.provenance)
    if not isinstance(config, RecipeConfig):
        raise UserError(
            f"workflow {values.values['workflow']!r}: "
            "its Config must derive from rill.workflows.config.RecipeConfig"
        )
    config_toml = dump_config(config, values.provenance)
    if resume:
        carry_out(config, Run.resume(resume, root=root), str(found.config_path), changed_config=config_toml)
    else:
        run = Run.create(name or values.name, root=root, config_toml=config_toml)
        if chosen is not None:
            chosen.leave_in(run.path)
        carry_out(config, run, recipe)
