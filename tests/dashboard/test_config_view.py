from __future__ import annotations

from pathlib import Path

from rill.config.toml import dumps
from rill.dashboard.config_view import ConfigRow, read_config


def test_every_value_has_the_origin_that_was_written_behind_it(tmp_path: Path) -> None:
    values = {"seed": 1, "text": "a  # b", "loop": {"steps": 5, "path": None}, "parts": {"x": {"type": "y"}}}
    comments = {
        "seed": "command line",
        "text": "x.toml:3",
        "loop.steps": "default",
        "parts.x.type": "x.toml:9",
    }
    path = tmp_path / "config.toml"
    path.write_text(dumps(values, comments, {"model": "follows the recipe's model"}))
    read, rows, problem = read_config(path)
    assert problem == ""
    assert read["loop"] == {"steps": 5}
    by_key = {row.key: row for row in rows}
    assert by_key["seed"] == ConfigRow("seed", "1", "command line")
    assert by_key["text"] == ConfigRow("text", '"a  # b"', "x.toml:3")
    assert by_key["loop.path"] == ConfigRow("loop.path", "", "unset")
    assert by_key["parts.x.type"].origin == "x.toml:9"


def test_a_file_without_origins_still_gives_its_values(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('a = "x"\n[b]\nc = [1,\n  2]\n')
    assert [(row.key, row.value, row.origin) for row in read_config(path)[1]] == [
        ("a", '"x"', ""),
        ("b.c", "[1, 2]", ""),
    ]


def test_a_damaged_or_missing_file_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert "no config.toml" in read_config(path)[2]
    path.write_text("= nothing")
    assert "cannot be read" in read_config(path)[2]
