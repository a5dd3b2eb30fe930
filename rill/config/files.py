"""From recipe files and the command line to one plain dictionary that knows where each value came from.

A recipe is a TOML file. `include = ["base.toml"]` puts other files, relative to it or to a recipe folder, underneath;
later files win over earlier ones, the including file over what it includes, the command line over everything. Tables
merge key by key, anything else replaces. A table whose `type` changes starts afresh: the settings of another part do
not linger, and `RecipeValues.dropped` tells which they were. Types that read the same settings keep them.

Called by the commands and by tests; `rill.config.resolve` then makes a validated Config of the dictionary.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rill.config.recipes import find_include, find_recipe
from rill.config.toml import key_lines
from rill.errors import ConfigError

COMMAND_LINE = "command line"
INCLUDE = "include"

KIN = (frozenset({"jsonl", "parquet", "folder", "hub"}),)
"""Types whose settings mean the same: data of rows, wherever the rows lie. What names the place goes."""
PLACES = frozenset({"path", "name", "subset", "split"})

_KEY_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]+"|'[^']+'""")
_OVERRIDE = re.compile(rf"\s*((?:{_KEY_PART.pattern})(?:\.(?:{_KEY_PART.pattern}))*)\s*=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeValues:
    """What the files and the command line say, before any schema has looked at it."""

    name: str
    """The recipe's file name without its ending."""
    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    """Where each dotted key was set: "file:line" or "command line". A table, which sets nothing by itself but has a
    line, stands here as "[table]"."""
    dropped: tuple[str, ...] = ()
    """Settings that the command line put out of force by choosing another type, in words."""


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> RecipeValues:
    """Read a recipe by name or path with what it includes, and lay overrides such as `loop.steps=20` on top."""
    path = find_recipe(recipe)
    layer = _load_file(path, ())
    layer.dropped.clear()  # a recipe that replaces a part of what it includes knows what it does
    if overrides:
        layer.put_over(_parse_overrides(overrides))
    return RecipeValues(
        name=path.stem,
        path=path,
        values=layer.values,
        provenance=layer.provenance,
        dropped=tuple(layer.dropped),
    )


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str], name: str) -> RecipeValues:
    """Values that come from no recipe file, with overrides laid on top."""
    layer = _Layer(dict(values), {})
    if overrides:
        layer.put_over(_parse_overrides(overrides))
    return RecipeValues(name=name, path=Path(name), values=layer.values, provenance=layer.provenance)


@dataclass(slots=True)
class _Layer:
    """Values and where each came from; later layers are put over earlier ones."""

    values: dict[str, Any]
    provenance: dict[str, str]
    dropped: list[str] = field(default_factory=list)

    def put_over(self, upper: _Layer) -> None:
        self._merge(self.values, upper.values, upper.provenance, "")

    def _merge(
        self, lower: dict[str, Any], upper: Mapping[str, Any], source: dict[str, str], prefix: str
    ) -> None:
        for key, value in upper.items():
            dotted = f"{prefix}{key}"
            below = lower.get(key)
            # `engine = "vllm"` is short for a table with that type.
            if isinstance(below, str) and isinstance(value, dict):
                below = lower[key] = {"type": below}
                if dotted in self.provenance:
                    self.provenance[f"{dotted}.type"] = self.provenance.pop(dotted)
            if isinstance(below, dict) and isinstance(value, str):
                value = {"type": value}
                source = {f"{k}.type" if k == dotted else k: at for k, at in source.items()}
            if isinstance(below, dict) and isinstance(value, dict):
                if not _changes_type(below, value):
                    self._merge(below, value, source, f"{dotted}.")
                    continue
                kept = _kept(below, value)
                source = {**self._provenance_of(dotted, kept), **source}
                self._note_dropped(dotted, below, value, kept)
                value = {**kept, **value}
            for old in [k for k in self.provenance if _is_inside(k, dotted)]:
                del self.provenance[old]
            lower[key] = value
            self.provenance.update({k: source[k] for k in source if _is_inside(k, dotted)})

    def _provenance_of(self, dotted: str, names: Mapping[str, Any]) -> dict[str, str]:
        inside = [f"{dotted}.{name}" for name in names]
        return {k: v for k, v in self.provenance.items() if any(_is_inside(k, path) for path in inside)}

    def _note_dropped(
        self, dotted: str, below: Mapping[str, Any], value: Mapping[str, Any], kept: Mapping[str, Any]
    ) -> None:
        known = {"type", *value, *kept, *(PLACES if kept else ())}
        lost = [key for key in below if key not in known]
        if lost:
            self.dropped.append(
                f"{dotted}.type is {value['type']!r} now: {', '.join(lost)} of {below['type']!r} no longer "
                f"{'counts' if len(lost) == 1 else 'count'}"
            )


def _kept(below: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    """What a table keeps when its type becomes another."""
    if not any({below["type"], value["type"]} <= kin for kin in KIN):
        return {}
    return {
        key: held for key, held in below.items() if key != "type" and key not in PLACES and key not in value
    }


def _is_inside(key: str, dotted: str) -> bool:
    path = key.strip("[]")
    return path == dotted or path.startswith(f"{dotted}.")


def _changes_type(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> bool:
    return "type" in lower and "type" in upper and lower["type"] != upper["type"]


def _load_file(path: Path, including: tuple[Path, ...]) -> _Layer:
    if path.resolve() in [p.resolve() for p in including]:
        circle = " → ".join(str(p) for p in (*including, path))
        raise ConfigError(f"recipes include each other in a circle: {circle}")
    text = _read_text(path, including)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {_explain_toml(str(error), text)}") from None
    lines = key_lines(text)
    includes = values.pop(INCLUDE, [])
    line = lines.pop(INCLUDE, 1)
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise ConfigError(
            f'{path}:{line}: include = {includes!r}: expected a list of files, such as include = ["base.toml"]'
        )
    result = _Layer({}, {})
    for name in includes:
        result.put_over(_load_file(find_include(name, path), (*including, path)))
    tables = set(_tables(values, ""))
    own = {
        f"[{key}]" if key in tables else key: f"{path}:{line}"
        for key, line in lines.items()
        if not key.startswith(f"{INCLUDE}.")
    }
    result.put_over(_Layer(values, own))
    return result


def _tables(value: Any, prefix: str) -> Iterator[str]:
    """The dotted paths of all tables, those inside arrays too."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        dotted = f"{prefix}{key}"
        if isinstance(inner, dict):
            yield dotted
        if isinstance(inner, dict | list):
            yield from _tables(inner, f"{dotted}.")


def _read_text(path: Path, including: tuple[Path, ...]) -> str:
    by = f", included by {including[-1]}" if including else ""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}{by}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}{by} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}{by}: {error.strerror}") from None


def _explain_toml(message: str, text: str) -> str:
    """The parser's words, and the line it speaks of."""
    at = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    number = int(at.group(1)) if at else len(lines)
    if 1 <= number <= len(lines):
        return f"{message}\n  {number} | {lines[number - 1]}"
    return message


def _parse_overrides(overrides: Sequence[str]) -> _Layer:
    """All overrides as one layer: what several say of one table adds up, in whatever order they stand."""
    layer = _Layer({}, {})
    for override in overrides:
        path, value = parse_override(override)
        keys = dict.fromkeys(_set_keys(value, ".".join(path)), COMMAND_LINE)
        below: Any = layer.values
        for depth, part in enumerate(path[:-1], start=1):
            below = below.get(part, {}) if isinstance(below, dict) else {}
            if not isinstance(below, dict | str):
                raise ConfigError(
                    f"command line: {override!r} goes into {'.'.join(path[:depth])}, which was just set to {below!r}"
                )
        for part in reversed(path):
            value = {part: value}
        layer.put_over(_Layer(value, keys))
    return layer


def _set_keys(value: Any, dotted: str) -> Iterator[str]:
    """The keys that setting `dotted` to a value sets: a table sets what is in it."""
    if not isinstance(value, dict):
        yield dotted
        return
    yield f"[{dotted}]"
    for key, inner in value.items():
        yield from _set_keys(inner, f"{dotted}.{key}")


def parse_override(override: str) -> tuple[list[str], Any]:
    """`a.b=VALUE` → (["a", "b"], value). VALUE is TOML; a word that is not may go without quotes."""
    found = _OVERRIDE.fullmatch(override)
    if found is None:
        raise ConfigError(f"command line: {override!r} is not KEY=VALUE, such as loop.steps=20")
    parts = [part.strip("\"'") for part in _KEY_PART.findall(found[1])]
    return parts, _parse_value(override, found[2].strip())


def _parse_value(override: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError as error:
        if text[:1] in "[{\"'" and text:
            why = str(error).partition(" (at ")[0]  # a place in a line that the user has not written
            raise ConfigError(
                f"command line: {override!r}: the value is not valid TOML ({why}): "
                "texts in a list or a table have quotes"
            ) from None
        return text
