"""Writing TOML, and finding the line on which each key of a TOML file stands.

Reading is the standard library's. What it lacks is here: a writer whose output it reads back as the same values,
with room for a comment on every line, and the line numbers that error messages need.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(
    values: Mapping[str, Any],
    comments: Mapping[str, str] | None = None,
    left_out: Mapping[str, str] | None = None,
) -> str:
    """TOML text for a mapping. `comments` go behind the value of each dotted key; what is `left_out`, a value or a
    whole table, is mentioned in a comment with the words given for it.

    None has no form in TOML: such a key is mentioned in a comment, as its absence means the same. Tuples become arrays.
    """
    rows = list(_table_rows(values, (), left_out or {}))
    while rows and rows[0] == ("", ""):
        rows.pop(0)
    comments = comments or {}
    width = max((len(line) for line, key in rows if key in comments), default=0)
    lines = []
    for line, key in rows:
        comment = comments.get(key) if key else None
        lines.append(f"{line:<{min(width, 60)}}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n" if lines else ""


def dump_value(value: Any) -> str:
    """One value on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _float(value)
        case str():
            return _string(value)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case Mapping():
            inside = ", ".join(
                f"{dump_key(str(k))} = {dump_value(v)}" for k, v in value.items() if v is not None
            )
            return f"{{ {inside} }}" if inside else "{}"
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(dump_value(item) for item in value)}]"
    raise TypeError(f"TOML has no form for a {type(value).__name__}: {value!r}")


def show_value(value: Any) -> str:
    """One value for a person to read: as TOML where it has a form there."""
    try:
        return dump_value(value)
    except TypeError:
        return repr(value)


def dump_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no table; an empty table counts as a value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def key_lines(text: str) -> dict[str, int]:
    """The line (from 1) of every key of a valid TOML text, tables included, by dotted key.

    The text is cut into statements: a statement is the fewest lines that are valid TOML by themselves, so a value
    that runs over several lines is found whole. Values inside an inline table or array share its first line.
    """
    lines = text.replace("\r\n", "\n").split("\n")  # what TOML calls a line; splitlines() knows more
    found: dict[str, int] = {}
    table = ""
    num_in_array: dict[str, int] = {}
    start = 0
    while start < len(lines):
        statement, end = _statement(lines, start)
        if lines[start].lstrip().startswith("[") and statement:
            table = _header(statement, lines[start].lstrip().startswith("[["), num_in_array)
            found.setdefault(table, start + 1)
            if table.rpartition(".")[2] == "0":  # the first entry of an array stands for the array
                found.setdefault(table.rpartition(".")[0], start + 1)
        else:
            for key in _dotted_keys(statement, table):
                found.setdefault(key, start + 1)
        start = end
    return found


def _table_rows(
    values: Mapping[str, Any], path: tuple[str, ...], left_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """(line, dotted key) pairs: the plain values of a table first, then its tables under their headers."""
    tables = []
    for key, value in values.items():
        if (dotted := ".".join((*path, str(key)))) in left_out:
            yield f"# {dump_key(str(key))} {left_out[dotted]}", ""
        elif isinstance(value, Mapping) and value:
            tables.append(((*path, str(key)), value))
        elif value is None:
            yield f"# {dump_key(str(key))} is unset", ""
        else:
            yield f"{dump_key(str(key))} = {dump_value(value)}", dotted
    for inner_path, value in tables:
        # A table that holds only tables needs no header of its own.
        if any(not isinstance(v, Mapping) or not v for v in value.values()):
            yield "", ""
            yield f"[{'.'.join(dump_key(part) for part in inner_path)}]", ".".join(inner_path)
        yield from _table_rows(value, inner_path, left_out)


def _float(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _string(value: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _statement(lines: list[str], start: int) -> tuple[dict[str, Any], int]:
    for end in range(start + 1, len(lines) + 1):
        try:
            return tomllib.loads("\n".join(lines[start:end])), end
        except tomllib.TOMLDecodeError:
            continue
    return {}, len(lines)


def _header(statement: dict[str, Any], is_array: bool, num_in_array: dict[str, int]) -> str:
    parts: list[str] = []
    inner: Any = statement
    while inner:
        if isinstance(inner, list):
            break
        key = next(iter(inner))
        parts.append(key)
        # A header below an array of tables speaks of that array's latest entry.
        path = ".".join(parts)
        inner = inner[key]
        if path in num_in_array and inner and not isinstance(inner, list):
            parts.append(str(num_in_array[path] - 1))
    table = ".".join(parts)
    if is_array:
        num_in_array[table] = num_in_array.get(table, 0) + 1
        table = f"{table}.{num_in_array[table] - 1}"
    return table


def _dotted_keys(value: Any, prefix: str) -> Iterator[str]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        dotted = f"{prefix}.{key}" if prefix else str(key)
        yield dotted
        yield from _dotted_keys(inner, dotted)
