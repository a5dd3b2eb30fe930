"""Strict typed configuration: base classes, TOML files with includes, command-line overrides."""

from rill.config.base import Config, OneOf, PartConfig

__all__ = ["Config", "OneOf", "PartConfig"]
