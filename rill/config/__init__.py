"""Strict typed configuration: base classes, TOML files with includes, command-line overrides."""

from rill.config.base import Config, OneOf, PartConfig
from rill.config.files import RecipeValues, load_recipe
from rill.config.resolve import dump_config, resolve

__all__ = ["Config", "OneOf", "PartConfig", "RecipeValues", "dump_config", "load_recipe", "resolve"]
