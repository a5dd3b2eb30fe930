from __future__ import annotations

from pathlib import Path

import pytest

from rill.config.recipes import find_recipe, list_recipes
from rill.errors import ConfigError


@pytest.fixture
def own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.toml").write_text("# What mine does\nworkflow = 'x'\n")
    (folder / "silent.toml").write_text("workflow = 'x'\n# too late\n")
    return folder


def test_a_recipe_is_found_by_name_and_by_path(own_recipes: Path) -> None:
    assert find_recipe("mine") == Path("recipes/mine.toml")
    assert find_recipe(own_recipes / "mine.toml") == own_recipes / "mine.toml"
    assert find_recipe("recipes/mine.toml") == Path("recipes/mine.toml")


def test_the_first_comment_is_the_description(own_recipes: Path) -> None:
    described = {recipe.name: recipe.description for recipe in list_recipes()}
    assert described["mine"] == "What mine does"
    assert described["silent"] == ""


def test_a_description_of_several_lines_is_shown_whole_and_ends_with_its_paragraph(own_recipes: Path) -> None:
    for name, more in (
        ("long", "#\n# Details.\n"),
        ("told", "#   rill train told\n"),
        ("closed", "x = 1\n# y\n"),
    ):
        (own_recipes / f"{name}.toml").write_text(f"# It learns to name\n# the colour of a shape.\n{more}")
    described = {recipe.name: recipe.description for recipe in list_recipes()}
    for name in ("long", "told", "closed"):
        assert described[name] == "It learns to name the colour of a shape."


def test_an_unknown_name_suggests_the_nearest(own_recipes: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        find_recipe("mime")


def test_a_missing_path_says_so(own_recipes: Path) -> None:
    with pytest.raises(ConfigError, match=r"no recipe file .*gone\.toml"):
        find_recipe("recipes/gone.toml")


def test_a_folder_is_no_recipe(own_recipes: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        find_recipe(own_recipes)


def test_a_user_recipe_hides_one_that_came_with_rill(
    tmp_path: Path, own_recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site/rill"
    (package / "recipes").mkdir(parents=True)
    (package / "recipes/mine.toml").write_text("# installed\n")
    (package / "recipes/other.toml").write_text("# installed\n")
    monkeypatch.setattr("rill.config.recipes._PACKAGE", package)
    described = {recipe.name: recipe.description for recipe in list_recipes()}
    assert described["mine"] == "What mine does"
    assert described["other"] == "installed"
