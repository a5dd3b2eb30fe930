from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rill.config.toml import dump_value, dumps, key_lines

SCALARS = (
    st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_is_written_reads_back_as_the_same_values(values: dict[str, Any]) -> None:
    assert tomllib.loads(dumps(values)) == values


def test_infinities_and_nan_read_back() -> None:
    back = tomllib.loads(dumps({"a": math.inf, "b": -math.inf, "c": math.nan}))
    assert back["a"] == math.inf
    assert back["b"] == -math.inf
    assert math.isnan(back["c"])


def test_an_unset_key_is_mentioned_and_reads_back_as_absent() -> None:
    text = dumps({"a": None, "t": {"b": None, "c": 1}})
    assert "# a is unset" in text
    assert tomllib.loads(text) == {"t": {"c": 1}}


def test_comments_stand_behind_the_values_they_belong_to() -> None:
    text = dumps({"lr": 0.1, "t": {"n": 2}}, {"lr": "demo.toml:3", "t.n": "default"})
    lines = text.splitlines()
    assert any(line.startswith("lr = 0.1") and line.endswith("# demo.toml:3") for line in lines)
    assert any(line.startswith("n = 2") and line.endswith("# default") for line in lines)
    assert tomllib.loads(text) == {"lr": 0.1, "t": {"n": 2}}


def test_a_value_toml_has_no_form_for_is_refused() -> None:
    with pytest.raises(TypeError, match="object"):
        dump_value(object())


def test_every_key_is_found_on_its_line() -> None:
    text = "\n".join(
        [
            "# a comment = 1",
            "a = 1",
            "b.c = [",
            "  1, # inside",
            "  2,",
            "]",
            'text = """',
            "looks_like = 'a key'",
            '"""',
            "[table.inner]",
            "k = {x = 1, y = {z = 2}}",
            "[[array]]",
            "n = 1",
            "[[array]]",
            "n = 2",
            "[array.sub]",
            "q = 1",
            '["quoted.name"]',
            "v = 1",
        ]
    )
    lines = key_lines(text)
    assert lines["a"] == 2
    assert lines["b.c"] == 3
    assert lines["text"] == 7
    assert "looks_like" not in lines
    assert lines["table.inner"] == 10
    assert lines["table.inner.k.y.z"] == 11
    assert lines["array.0.n"] == 13
    assert lines["array.1.n"] == 15
    assert lines["array.1.sub.q"] == 17
    assert lines["quoted.name.v"] == 19


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_are_counted_as_toml_counts_them(newline: str) -> None:
    text = newline.join(["a = 'x\u2028y'", "b = 2", ""])
    assert tomllib.loads(text)["b"] == 2
    assert key_lines(text) == {"a": 1, "b": 2}
