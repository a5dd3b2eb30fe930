"""The keys that a workflow's tables have, remembered from the last time they were looked up.

To know them all, a recipe's parts have to be imported, which takes seconds. What was found is kept in the cache folder,
for one state of rill's files; a misspelt key is then told at once. Nothing here decides that a recipe is valid: what is
not remembered is left to `rill.config.resolve`.

    check_known(values, provenance)      before the imports
    remember(config)                     after them
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rill.config.base import value_at
from rill.config.files import RecipeValues
from rill.config.toml import show_value
from rill.config.words import did_you_mean
from rill.errors import ConfigError

OWN = "rill."
_PACKAGE = Path(__file__).resolve().parents[1]


def remember(config: BaseModel) -> None:
    """Keep the names of the fields of every table of a configuration that was found valid."""
    path = _file(str(config.model_dump(include={"workflow"}).get("workflow", "")))
    known = _read(path)
    found = {**known, **dict(_tables(config, ""))}
    if found == known:
        return
    with suppress(OSError):  # a folder that cannot be written costs the next one some seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(found), encoding="utf-8")
        draft.replace(path)


def check_known(loaded: RecipeValues) -> None:
    """ConfigError for keys that no table of the workflow has."""
    known = _read(_file(str(loaded.values.get("workflow", ""))))
    mistakes = []
    for dotted, name, fields in _unknown(loaded.values, known, ""):
        key = f"{dotted}.{name}" if dotted else name
        given = (key, f"[{key}]", *(other for other in loaded.provenance if other.startswith(f"{key}.")))
        where = next(filter(None, map(loaded.provenance.get, given)), str(loaded.path))
        value = value_at(loaded.values, key)
        shown = key if isinstance(value, Mapping) else f"{key} = {show_value(value)}"
        keys = [
            f"{table.partition('|')[0]}.{has}".lstrip(".") for table, all_ in known.items() for has in all_
        ]
        mistakes.append(f"{where}: {shown}: unknown key{did_you_mean(name, fields, keys, dotted)}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def _tables(config: BaseModel, dotted: str) -> Iterator[tuple[str, list[str]]]:
    """(path, or path|type for a part that is chosen by its type; names of its fields)"""
    if not type(config).__module__.startswith(OWN):
        return  # a user's own part may have other keys the next time
    fields = type(config).model_fields
    chosen = f"|{config.model_dump(include={'type'})['type']}" if "type" in fields else ""
    yield f"{dotted}{chosen}", list(fields)
    for name in fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _tables(value, f"{dotted}.{name}" if dotted else name)


def _unknown(
    values: Mapping[str, Any], known: Mapping[str, list[str]], dotted: str
) -> Iterator[tuple[str, str, list[str]]]:
    chosen = f"|{values['type']}" if "type" in values else ""
    fields = known.get(f"{dotted}{chosen}")
    if fields is None:
        return
    for name, value in values.items():
        if name not in fields:
            yield dotted, name, fields
        elif isinstance(value, Mapping):
            yield from _unknown(value, known, f"{dotted}.{name}" if dotted else name)


def _read(path: Path) -> dict[str, list[str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _file(workflow: str) -> Path:
    """Of this state of rill: any file that was touched makes another."""
    state = hashlib.blake2b(f"{_PACKAGE}|{workflow}".encode(), digest_size=8)
    for folder, folders, files in os.walk(_PACKAGE):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                stat = os.stat(os.path.join(folder, name))
                state.update(f"{name}{stat.st_size}{stat.st_mtime_ns}".encode())
    cache = Path(os.environ.get("RILL_CACHE") or Path.home() / ".cache" / "rill")
    return cache / "keys" / f"{state.hexdigest()}.json"
