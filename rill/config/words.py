"""Words for error messages about keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(word: str, fields: Iterable[str], keys: Iterable[str], table: str) -> str:
    """What the user may have meant: a key of the same table, else the same word or the nearest elsewhere, among all
    dotted `keys`, else the choices. Every part has a `type`, so that word tells nothing elsewhere."""
    names = list(fields)
    if near := _nearest(word, names):
        return f" (did you mean {near!r}?)"
    places: dict[str, str] = {}
    for key in keys if word != "type" else ():
        places.setdefault(key.rpartition(".")[2], key)
    if near := word if word in places else _nearest(word, list(places)):
        return f" here (did you mean {places[near]!r}?)"
    in_table = f" in [{table}]" if table else ""
    return f": valid{in_table} are {', '.join(sorted(names)) or 'none'}"


def _nearest(word: str, names: Sequence[str]) -> str:
    """The one with these initials, else the closest; empty where there is none."""
    near = [name for name in names if "".join(part[:1] for part in name.split("_")) == word]
    near += difflib.get_close_matches(word, names, n=1)
    return near[0] if near else ""
