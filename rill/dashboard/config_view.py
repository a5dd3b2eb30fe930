"""A run's configuration as rows: every key with its value and where that came from, read back from config.toml.

`config.toml` is written by rill.config with one key to a line and the origin as a comment. A file that was edited by
hand still gives its values; keys without a comment have no origin.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rill.config.toml import leaves, show_value

_TABLE = re.compile(r"\s*\[+([^\]]+)\]+")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-.\"']+)\s*=")
_UNSET = re.compile(r"# (\S+) (is unset|follows .*)$")
MAX_CONFIG_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ConfigRow:
    key: str
    value: str
    origin: str


def read_config(path: Path) -> tuple[dict[str, Any], list[ConfigRow], str]:
    """(values, rows, what is wrong with the file). A file that is no TOML gives no values, but its text's rows."""
    if path.is_symlink() or not path.is_file():
        return {}, [], "there is no config.toml in the run folder"
    if path.stat().st_size > MAX_CONFIG_BYTES:
        return {}, [], "config.toml is too large to be one of rill's"
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return {}, [], f"config.toml cannot be read: {error}"
    return values, _rows(values, _origins(text)), ""


def _rows(values: dict[str, Any], origins: dict[str, str]) -> list[ConfigRow]:
    rows = [ConfigRow(key, show_value(value), origins.pop(key, "")) for key, value in leaves(values)]
    rows += [ConfigRow(key, "", origin) for key, origin in origins.items() if origin]
    return sorted(rows, key=lambda row: (row.key.count(".") > 0, row.key.rpartition(".")[0], row.key))


def _origins(text: str) -> dict[str, str]:
    """The comment behind each key; for keys that are only mentioned, what is said of them."""
    origins, table = {}, ""
    for line in text.splitlines():
        if found := _TABLE.match(line):
            table = f"{found[1].strip()}."
        elif found := _UNSET.match(line.strip()):
            origins[f"{table}{found[1]}"] = found[2].removeprefix("is ")
        elif found := _KEY.match(line):
            origins[f"{table}{found[1]}"] = line.rpartition("  # ")[2].strip() if "  # " in line else ""
    return origins
