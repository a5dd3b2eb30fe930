"""Words for error messages about keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(word: str, fields: Iterable[str], elsewhere: Sequence[str], table: str) -> str:
    """What the user may have meant: a key of the same table, else the same word elsewhere, else the choices."""
    names = list(fields)
    near = difflib.get_close_matches(word, names, n=1)
    near += [name for name in names if "".join(part[:1] for part in name.split("_")) == word]
    if near:
        return f" (did you mean {near[0]!r}?)"
    if elsewhere:
        return f" here (did you mean {elsewhere[0]!r}?)"
    in_table = f" in [{table}]" if table else ""
    return f": valid{in_table} are {', '.join(sorted(names)) or 'none'}"
