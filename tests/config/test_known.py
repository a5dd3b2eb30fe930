"""Misspelt keys are told before anything is imported, once a recipe of the workflow was resolved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rill.config.files import RecipeValues, with_overrides
from rill.config.known import check_known, remember
from rill.config.resolve import resolve
from rill.errors import ConfigError
from rill.workflows import recipe_schema

SMALL: dict[str, Any] = {"workflow": "tests.config.parts:SmallWorkflow", "steps": 3}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))
    monkeypatch.setattr("rill.config.known.OWN", "tests.")


def given(*overrides: str) -> RecipeValues:
    return with_overrides(SMALL, overrides, "small.toml")


def resolved(loaded: RecipeValues) -> None:
    remember(resolve(recipe_schema(loaded.values), loaded.values, loaded.provenance, str(loaded.path)))


def test_nothing_is_known_at_first() -> None:
    check_known(given("stepz=3"))


@pytest.mark.parametrize(
    "override", ["stepz=3", "trainer.learning_rat=1", "trainer.steps=1", "trainer.nonsense=1", "run.name=x"]
)
def test_what_is_remembered_is_told_in_the_words_of_the_whole_check(override: str) -> None:
    resolved(given())
    check_known(given())
    with pytest.raises(ConfigError) as whole:
        resolved(given(override))
    with pytest.raises(ConfigError) as quick:
        check_known(given(override))
    assert str(quick.value) == str(whole.value)


def test_a_part_that_was_never_seen_is_left_to_the_whole_check() -> None:
    resolved(given())
    check_known(given("engine.type=other", "engine.nonsense=1"))


def test_a_part_of_the_users_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rill.config.known.OWN", "rill.")
    resolved(given())
    check_known(given("stepz=3"))


def test_the_quick_check_imports_no_part() -> None:
    code = (
        "import sys; import rill.config.known, rill.config.files\n"
        "assert not {'torch', 'transformers', 'rill.workflows'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)
