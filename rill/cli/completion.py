"""What the shell offers when Tab is pressed: recipes and runs by name. `rill --install-completion` puts it in place."""

from __future__ import annotations


def recipe_names(incomplete: str) -> list[str]:
    from rill.config.recipes import list_recipes

    return [recipe.name for recipe in list_recipes() if recipe.name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    from rill.telemetry.run import list_runs

    return [run.name for run in list_runs() if run.name.startswith(incomplete)]
