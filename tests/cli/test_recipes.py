from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rill.cli.main import app


@pytest.fixture(autouse=True)
def _workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/small.toml").write_text("# A small run\nsteps = 3\n")


def run(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result.output


def test_recipes_are_listed_with_what_they_do() -> None:
    assert "small" in run("recipes")
    assert "A small run" in run("recipes")
    assert {"name": "small", "path": "recipes/small.toml", "description": "A small run"} in json.loads(
        run("recipes", "--json")
    )


def test_a_copy_is_ones_own_and_never_overwrites() -> None:
    run("recipes", "copy", "small", "mine")
    assert Path("recipes/mine.toml").read_text() == "# A small run\nsteps = 3\n"
    assert "exists" in run("recipes", "copy", "small", "mine", exit_code=2)
    assert "recipes/other.toml: edit it, then `rill train other`" in run(
        "recipes", "copy", "small", "other.toml"
    )
    for wrong in ("", "a/b"):
        assert "is no name" in run("recipes", "copy", "small", wrong, exit_code=2)
