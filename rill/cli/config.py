"""`rill config`: what a recipe comes to, and where each value came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rill.cli.arguments import AsJson, recipe_names
from rill.cli.console import Commands, complain, say, say_json
from rill.config import Config, dump_config, load_recipe, resolve
from rill.config.files import RecipeValues
from rill.config.keys import describe_keys
from rill.config.known import check_known, remember
from rill.workflows import recipe_schema

app = typer.Typer(cls=Commands, rich_markup_mode=None, add_completion=False, no_args_is_help=True)

Recipe = Annotated[str, typer.Argument(help="A recipe's name or path.", autocompletion=recipe_names)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes, e.g. loop.steps=20", metavar="KEY=VALUE")
]


@app.callback()
def config() -> None:
    """Show, check and explain configurations.

    \b
    Examples:
      rill config show demo                       the resolved configuration
      rill config show demo loop.steps=20         with a change from the command line
      rill config check recipes/mine.toml         is it valid?
      rill config keys demo                       every key it could have, with its meaning
    """


@app.command()
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Print the resolved configuration as TOML, each value with its source.

    \b
    Examples:
      rill config show demo
      rill config show demo loop.steps=20 rollout.group_size=16
      rill config show demo > recipes/mine.toml       a file that gives the same run
    """
    loaded, resolved = load_and_resolve(recipe, overrides)
    if as_json:
        say_json({"values": resolved.model_dump(mode="json"), "sources": loaded.provenance})
    else:
        say(dump_config(resolved, loaded.provenance).rstrip("\n"))


@app.command()
def check(recipe: Recipe, overrides: Overrides = None) -> None:
    """Check that a recipe can run: its keys, the files and models it names, lengths, and its reward on real rows.

    \b
    Example:
      rill config check recipes/mine.toml
    """
    loaded, resolved = load_and_resolve(recipe, overrides)
    from rill.cli.preflight import preflight
    from rill.workflows.config import RecipeConfig

    if isinstance(resolved, RecipeConfig):
        for note in preflight(resolved):
            say(f"note: {note}")
    say(f"{loaded.path}: valid")


@app.command()
def keys(
    recipe: Recipe,
    overrides: Overrides = None,
    find: Annotated[str, typer.Option(help="Only keys that contain this text.")] = "",
) -> None:
    """Explain every key of the recipe: type, value and meaning.

    \b
    Examples:
      rill config keys demo
      rill config keys demo --find learning_rate
    """
    _, resolved = load_and_resolve(recipe, overrides)
    found = [key for key in describe_keys(resolved) if find in key.name]
    if not found:
        say(f"no key contains {find!r}: `rill config keys {recipe}` lists them all")
    for key in found:
        say(f"{key.name} = {key.value}    ({key.type})")
        if key.description:
            say(f"    {key.description}")


def read_recipe(recipe: str | Path, overrides: Sequence[str] | None) -> RecipeValues:
    """What every command that takes RECIPE [KEY=VALUE]... starts with: what they say, before anything is imported."""
    loaded = load_recipe(recipe, overrides or ())
    for note in loaded.dropped:
        complain(f"note: {note}")
    check_known(loaded)
    return loaded


def load_and_resolve(recipe: str, overrides: Sequence[str] | None) -> tuple[RecipeValues, Config]:
    loaded = read_recipe(recipe, overrides)
    return loaded, resolved_recipe(loaded)


def resolved_recipe(values: RecipeValues) -> Config:
    """As its workflow's Config has it; its keys are remembered, so that the next misspelt one is answered at once."""
    schema = recipe_schema(values.values, str(values.path))
    resolved = resolve(schema, values.values, values.provenance, str(values.path))
    remember(resolved)
    return resolved
