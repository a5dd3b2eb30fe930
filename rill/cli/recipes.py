"""`rill recipes`: which runs can be started by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rill.cli.arguments import AsJson
from rill.cli.console import Commands, say, say_json, say_table
from rill.config.recipes import find_recipe, list_recipes, recipe_folders
from rill.errors import UserError

app = typer.Typer(cls=Commands, rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the recipes: runs that can be started by name.

    \b
    Examples:
      rill recipes                   what there is
      rill recipes copy demo mine    start your own from it, in ./recipes/mine.toml
    """
    if context.invoked_subcommand is not None:
        return
    found = list_recipes()
    if as_json:
        say_json([{"name": r.name, "path": str(r.path), "description": r.description} for r in found])
    elif found:
        say_table(["recipe", "what it does", "file"], [[r.name, r.description, str(r.path)] for r in found])
    else:
        searched = ", ".join(str(folder) for folder in recipe_folders()) or "./recipes"
        say(f"no recipes in {searched}")


@app.command()
def copy(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    name: Annotated[str, typer.Argument(help="The name of your recipe.")],
) -> None:
    """Copy a recipe to ./recipes/NAME.toml to make it your own.

    \b
    Example:
      rill recipes copy demo mine
    """
    source = find_recipe(recipe)
    name = name.removesuffix(".toml")
    if not name or Path(name).name != name:
        raise UserError(f"{name!r} is no name: give a name, and the file becomes recipes/NAME.toml")
    target = Path("recipes") / f"{name}.toml"
    if target.exists():
        raise UserError(f"{target} exists: choose another name")
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(source, target)
    say(f"{target}: edit it, then `rill train {name}`")
