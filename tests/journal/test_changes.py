"""Resuming with other settings: what follows is said, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rill.config import load_recipe, resolve
from rill.errors import UserError
from rill.journal.changes import HARMLESS, accept
from rill.journal.token_log import FOLDER
from rill.workflows import recipe_schema

BEFORE = {"workflow": "grpo", "model": {"path": "a"}, "loop": {"steps": 4, "max_lag": 0}, "seed": 1}


def test_where_and_how_long_it_runs_may_change_and_the_token_log_is_used(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    after = {**BEFORE, "loop": {"steps": 9, "max_lag": 0}}
    assert accept(tmp_path, BEFORE, after) == (["changed: loop.steps = 9, was 4"], False)


def test_what_bears_on_nothing_that_was_sampled_is_named_as_the_recipe_has_it(tmp_path: Path) -> None:
    values = load_recipe("demo").values
    recipe = resolve(recipe_schema(values), values).model_dump()
    assert "stop_grace_s" in HARMLESS
    for name in HARMLESS:
        table, _, key = name.rpartition(".")
        assert key in (recipe[table] if table else recipe), name


def test_what_bears_on_sampling_sets_the_token_log_aside_and_says_so(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    lines, is_stale = accept(tmp_path, BEFORE, {**BEFORE, "seed": 2})
    assert lines[0] == "changed: seed = 2, was 1" and "sampled anew" in lines[1]
    assert is_stale and (tmp_path / FOLDER).exists(), "its driver does it, who holds the run"


def test_another_model_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    with pytest.raises(UserError, match=r"model.path = 'b' does not fit .* made with 'a'"):
        accept(tmp_path, BEFORE, {**BEFORE, "model": {"path": "b"}, "seed": 2})
    assert (tmp_path / FOLDER).exists()
