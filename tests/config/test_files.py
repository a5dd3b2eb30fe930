from __future__ import annotations

from pathlib import Path

import pytest

from rill.config.files import COMMAND_LINE, load_recipe, parse_override
from rill.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_values_know_their_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "# about\nworkflow = 'x'\n\n[trainer]\nlr = 1e-3\n")
    loaded = load_recipe(path)
    assert loaded.name == "r"
    assert loaded.values == {"workflow": "x", "trainer": {"lr": 1e-3}}
    assert loaded.provenance["trainer.lr"] == f"{path}:5"


def test_the_including_file_wins_over_what_it_includes_and_tables_merge(tmp_path: Path) -> None:
    base = write(tmp_path / "parts/base.toml", "[trainer]\nlr = 1\nsteps = 2\n")
    path = write(tmp_path / "r.toml", 'include = ["parts/base.toml"]\n[trainer]\nlr = 3\n')
    loaded = load_recipe(path)
    assert loaded.values == {"trainer": {"lr": 3, "steps": 2}}
    assert loaded.provenance["trainer.lr"] == f"{path}:3"
    assert loaded.provenance["trainer.steps"] == f"{base}:3"


def test_later_includes_win_over_earlier_ones(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", "x = 1\ny = 1\n")
    write(tmp_path / "b.toml", "x = 2\n")
    assert load_recipe(write(tmp_path / "r.toml", 'include = ["a.toml", "b.toml"]\n')).values == {
        "x": 2,
        "y": 1,
    }


def test_includes_are_relative_to_the_file_that_includes(tmp_path: Path) -> None:
    write(tmp_path / "deep/er/c.toml", "x = 1\n")
    write(tmp_path / "deep/b.toml", 'include = ["er/c.toml"]\n')
    assert load_recipe(write(tmp_path / "r.toml", 'include = ["deep/b.toml"]\n')).values == {"x": 1}


def test_a_copied_recipe_still_finds_the_parts_that_came_with_rill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "recipes/mine.toml", 'include = ["parts/tiny_model.toml"]\n')
    assert load_recipe(path).values["model"]["tokenizer"] == "chars"
    write(tmp_path / "recipes/parts/tiny_model.toml", 'model = "own"\n')
    assert load_recipe(path).values == {"model": "own"}


def test_a_circle_of_includes_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'include = ["b.toml"]\n')
    write(tmp_path / "b.toml", 'include = ["a.toml"]\n')
    with pytest.raises(ConfigError, match=r"circle: .*a\.toml → .*b\.toml → .*a\.toml"):
        load_recipe(tmp_path / "a.toml")


def test_two_files_may_include_the_same_third(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "x = 1\n")
    write(tmp_path / "a.toml", 'include = ["base.toml"]\n')
    write(tmp_path / "b.toml", 'include = ["base.toml"]\n')
    assert load_recipe(write(tmp_path / "r.toml", 'include = ["a.toml", "b.toml"]\n')).values == {"x": 1}


def test_a_missing_include_names_both_files(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", 'include = ["gone.toml"]\n')
    with pytest.raises(ConfigError, match=r"gone\.toml, included by .*r\.toml"):
        load_recipe(path)


def test_an_include_that_is_no_list_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", 'x = 1\ninclude = "base.toml"\n')
    with pytest.raises(ConfigError, match=r"r\.toml:2: include = 'base\.toml': expected a list"):
        load_recipe(path)


def test_broken_toml_shows_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "a = 1\nlr = = 2\n")
    with pytest.raises(ConfigError, match=r"(?s)r\.toml is not valid TOML: .*line 2.*2 \| lr = = 2"):
        load_recipe(path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"a = '\xff\xfe'\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_recipe(path)


def test_overrides_win_and_are_marked(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[trainer]\nlr = 1\nsteps = 2\n")
    loaded = load_recipe(path, ["trainer.lr=1e-5", "new.table.key=[1, 2]"])
    assert loaded.values == {"trainer": {"lr": 1e-5, "steps": 2}, "new": {"table": {"key": [1, 2]}}}
    assert loaded.provenance["trainer.lr"] == COMMAND_LINE
    assert loaded.provenance["trainer.steps"] == f"{path}:3"


def test_a_table_whose_type_changes_starts_afresh(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[engine]\ntype = 'native'\nblock_size = 16\n")
    loaded = load_recipe(path, ["engine.dtype=bfloat16", "engine.type=vllm"])
    assert loaded.values == {"engine": {"dtype": "bfloat16", "type": "vllm"}}
    assert "engine.block_size" not in loaded.provenance


def test_what_no_longer_counts_under_another_type_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[engine]\ntype = 'native'\nblock_size = 8\n")
    for override in ("engine.type=vllm", "engine=vllm"):
        [note] = load_recipe(path, [override]).dropped
        assert "'vllm' now: block_size of 'native' no longer count" in note
    assert load_recipe(path, ["engine.type=native"]).dropped == ()


def test_rows_that_lie_elsewhere_are_read_in_the_same_way(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[data]\ntype = 'jsonl'\npath = 'a'\nanswer_after = '####'\n")
    loaded = load_recipe(path, ["data.type=parquet", "data.path=b"])
    assert loaded.values["data"] == {"type": "parquet", "path": "b", "answer_after": "####"}
    assert loaded.provenance["data.answer_after"] == f"{path}:4"
    assert loaded.dropped == ()
    assert load_recipe(path, ["data.type=hub", "data.name=a/b"]).values["data"] == {
        "type": "hub", "name": "a/b", "answer_after": "####",
    }  # fmt: skip


def test_a_table_whose_type_stays_keeps_its_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[engine]\ntype = 'native'\nblock_size = 16\n")
    loaded = load_recipe(path, ["engine.type=native", "engine.dtype=bfloat16"])
    assert loaded.values == {"engine": {"type": "native", "block_size": 16, "dtype": "bfloat16"}}


def test_a_part_given_by_its_name_alone_takes_further_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "engine = 'native'\n")
    loaded = load_recipe(path, ["engine.block_size=8"])
    assert loaded.values == {"engine": {"type": "native", "block_size": 8}}
    assert loaded.provenance["engine.type"] == f"{path}:1"


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("a=1", ["a"], 1),
        ("a.b=1e-5", ["a", "b"], 1e-5),
        ("a.b=true", ["a", "b"], True),
        ("a=word", ["a"], "word"),
        ("a=/tmp/some path", ["a"], "/tmp/some path"),
        ("a='1'", ["a"], "1"),
        ("a=", ["a"], ""),
        ("a=x=y", ["a"], "x=y"),
        ("a=[1, 'two']", ["a"], [1, "two"]),
        ("a={ b = 1 }", ["a"], {"b": 1}),
        ('a."b.c"=1', ["a", "b.c"], 1),
        ('a."b=c"=1', ["a", "b=c"], 1),
        ("a=1\nb = 2", ["a"], "1\nb = 2"),
    ],
)
def test_an_override_is_toml_or_a_bare_word(override: str, path: list[str], value: object) -> None:
    assert parse_override(override) == (path, value)


@pytest.mark.parametrize("override", ["novalue", "=1", "a..b=1", ".a=1", "a b=1", "a.=1"])
def test_what_is_no_override_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_override(override)


def test_a_list_that_does_not_end_is_no_bare_word() -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse_override("a=[1, 2")


@pytest.mark.parametrize(
    "overrides",
    [
        ["loop={ steps = 6 }", "loop.max_lag=1"],
        ["loop.max_lag=1", "loop={ steps = 6 }"],
        ["loop={ max_lag = 1 }", "loop={ steps = 6 }"],
    ],
)
def test_what_overrides_say_of_one_table_adds_up(overrides: list[str], tmp_path: Path) -> None:
    loaded = load_recipe(write(tmp_path / "r.toml", "[loop]\nsteps = 1\nkeep = 2\n"), overrides)
    assert loaded.values == {"loop": {"steps": 6, "max_lag": 1, "keep": 2}}
    given = {key for key, at in loaded.provenance.items() if at == COMMAND_LINE}
    assert given == {"loop.steps", "loop.max_lag"}


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=vllm", "engine.dtype=bfloat16"],
        ["engine.dtype=bfloat16", "engine=vllm"],
        ["engine.dtype=bfloat16", "engine={type='vllm'}"],
    ],
)
def test_a_part_by_its_name_alone_and_a_key_of_it_go_together(overrides: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[engine]\ntype = 'native'\nblock_size = 16\n")
    loaded = load_recipe(path, overrides)
    assert loaded.values == {"engine": {"type": "vllm", "dtype": "bfloat16"}}
    assert loaded.provenance["engine.type"] == loaded.provenance["engine.dtype"] == COMMAND_LINE


def test_a_part_that_is_named_again_keeps_its_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "[engine]\ntype = 'native'\nblock_size = 16\n")
    loaded = load_recipe(path, ["engine=native"])
    assert loaded.values == {"engine": {"type": "native", "block_size": 16}}
    assert loaded.provenance["engine.type"] == COMMAND_LINE and loaded.dropped == ()


def test_overrides_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.toml", "")
    with pytest.raises(ConfigError, match="just set to 1"):
        load_recipe(path, ["a=1", "a.b=2"])
