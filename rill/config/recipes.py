"""Where recipes are found: by path, or by name in ./recipes, in the checkout, or inside the installed package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rill.errors import ConfigError
from rill.registry import unknown_name_message

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    name: str
    path: Path
    description: str
    """The first paragraph of the file's first comment."""


def recipe_folders() -> list[Path]:
    """The folders searched, nearest first: a user's own recipes hide those of the same name that came with rill."""
    candidates = [Path("recipes"), _PACKAGE.parent / "recipes", _PACKAGE / "recipes"]
    folders: dict[Path, Path] = {}
    for folder in candidates:
        if folder.is_dir():
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def list_recipes() -> list[RecipeFile]:
    """Every recipe that can be started by its name."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return [
        RecipeFile(name=name, path=path, description=_first_comment(path))
        for name, path in sorted(found.items())
    ]


def find_recipe(recipe: str | Path) -> Path:
    """The file behind a recipe's name or path."""
    path = Path(recipe)
    if path.suffix == ".toml" or len(path.parts) > 1:
        if path.is_file():
            return path
        if path.is_dir():
            raise ConfigError(
                f"{path} is a folder: name a recipe file in it, such as {path / 'my_recipe.toml'}"
            )
        raise ConfigError(f"there is no recipe file {path}: check the path, or see `rill recipes`")
    names = {found.name: found.path for found in list_recipes()}
    if str(recipe) not in names:
        raise ConfigError(unknown_name_message("recipe", str(recipe), names))
    return names[str(recipe)]


def find_include(name: str, including: Path) -> Path:
    """The file that a recipe includes: next to that recipe, else in a recipe folder, so that a copied recipe still
    finds the parts of the original."""
    beside = including.parent / name
    candidates = [beside, *(folder / name for folder in recipe_folders())]
    return next((path for path in candidates if path.is_file()), beside)


def _first_comment(path: Path) -> str:
    """Its first paragraph, in one line; an indented line, a command say, ends it too."""
    words: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.removeprefix("#").strip()
            if line.startswith("#") and text and not (words and line.startswith("#  ")):
                words.append(text)
            elif words or line.strip():
                break
    return " ".join(words)
