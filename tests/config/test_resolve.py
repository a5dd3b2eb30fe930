from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import model_validator

from rill.config import Config, dump_config, load_recipe, resolve
from rill.config.resolve import source_of
from rill.errors import ConfigError
from tests.config.parts import NativeEngine, RemoteEngine, SmallRecipe, Trainer

VALID = "workflow = 'small'\nsteps = 3\n"


def resolved(tmp_path: Path, text: str, *overrides: str) -> SmallRecipe:
    path = tmp_path / "r.toml"
    path.write_text(text)
    loaded = load_recipe(path, overrides)
    return resolve(SmallRecipe, loaded.values, loaded.provenance, str(path))


def mistake(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        resolved(tmp_path, text, *overrides)
    return str(raised.value).replace(f"{tmp_path}/", "")


def test_a_valid_recipe_becomes_a_config_with_its_parts(tmp_path: Path) -> None:
    config = resolved(tmp_path, VALID + "judges = ['native', {type = 'remote', address = 'x'}]\n")
    assert isinstance(config.engine, NativeEngine.Config)
    assert isinstance(config.judges[1], RemoteEngine.Config)
    assert config.judges[1].address == "x"


def test_a_misspelt_key_names_file_line_value_and_the_nearest_key(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "[trainer]\nlearning_rat = 0.1\n")
    assert message == "r.toml:4: trainer.learning_rat = 0.1: unknown key (did you mean 'learning_rate'?)"


def test_a_misspelt_key_inside_a_chosen_part_is_compared_with_that_part(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "[engine]\ntype = 'native'\nblocksize = 8\n")
    assert message == "r.toml:5: engine.blocksize = 8: unknown key (did you mean 'block_size'?)"


def test_initials_are_understood(tmp_path: Path) -> None:
    assert mistake(tmp_path, VALID, "trainer.lr=1").endswith("unknown key (did you mean 'learning_rate'?)")


def test_a_misspelt_key_in_a_list_of_parts_is_found(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "[[judges]]\ntype = 'remote'\naddres = 'x'\n")
    assert "r.toml:5: judges.0.addres = \"x\": unknown key (did you mean 'address'?)" in message


def test_a_key_in_the_wrong_table_is_pointed_to_the_right_one(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "learning_rate = 0.1\n")
    assert (
        message == "r.toml:3: learning_rate = 0.1: unknown key here (did you mean 'trainer.learning_rate'?)"
    )
    message = mistake(tmp_path, VALID + "block_size = 8\n")
    assert "did you mean 'engine.block_size'?" in message


def test_a_key_like_no_other_lists_the_valid_ones(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "[trainer]\nzzz = 1\n")
    assert message.endswith("unknown key: valid in [trainer] are learning_rate, schedule, warmup")


def test_a_value_of_the_wrong_type_says_what_was_expected(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "[trainer]\nlearning_rate = 'fast'\n")
    assert message == 'r.toml:4: trainer.learning_rate = "fast": expected a number'


def test_a_value_out_of_range_says_the_range(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID, "trainer.learning_rate=-1")
    assert message == "command line: trainer.learning_rate = -1: expected greater than 0"


def test_a_wrong_choice_lists_the_choices(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID, "trainer.schedule=linear")
    assert message == "command line: trainer.schedule = \"linear\": expected 'constant' or 'cosine'"


def test_an_unknown_part_lists_the_parts(tmp_path: Path) -> None:
    expected = "unknown engine 'nativ' (did you mean 'native'?): valid are native, remote"
    message = mistake(tmp_path, VALID + "[engine]\ntype = 'nativ'\n")
    assert message == f'r.toml:4: engine.type = "nativ": {expected}'
    assert mistake(tmp_path, VALID, "engine=nativ") == f'command line: engine = "nativ": {expected}'
    assert mistake(tmp_path, VALID, "engine.type=nativ") == f'command line: engine.type = "nativ": {expected}'


def test_a_missing_key_says_what_it_is_for(tmp_path: Path) -> None:
    assert mistake(tmp_path, "workflow = 'small'\n") == "r.toml: steps: missing: How many steps to train."
    message = mistake(tmp_path, VALID + "[engine]\ntype = 'remote'\n")
    assert message == "r.toml:3: engine.address: missing: Where the server is."


def test_a_contradiction_within_a_table_is_told_in_the_words_of_its_owner(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "[trainer]\nschedule = 'cosine'\n")
    assert message == "r.toml:3: trainer: cosine needs `warmup`"


def test_the_members_of_a_union_complain_once(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID, "trainer.warmup=soon")
    assert message.count("\n") == 0
    assert message.startswith('command line: trainer.warmup = "soon": expected a whole number')


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    message = mistake(tmp_path, VALID + "x = 1\n[trainer]\nlearning_rate = 0\nwarm = 2\n")
    assert [line.partition(":")[2].partition(":")[0] for line in message.splitlines()] == ["5", "6", "3"]


def test_the_dump_shows_every_value_with_its_source_and_reads_back_as_the_same(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(VALID + "[engine]\ntype = 'remote'\naddress = 'here'\n[tags]\na = 1\n")
    loaded = load_recipe(path, ["trainer.learning_rate=0.5"])
    config = resolve(SmallRecipe, loaded.values, loaded.provenance)
    text = dump_config(config, loaded.provenance)
    sources = {line.split(" = ")[0]: line.split("# ")[-1] for line in text.splitlines() if " = " in line}
    assert sources["steps"] == f"{path}:2"
    assert sources["address"] == f"{path}:5"
    assert sources["learning_rate"] == "command line"
    assert sources["schedule"] == "default"
    assert sources["a"] == f"{path}:7"
    assert "# warmup is unset" in text
    assert resolve(SmallRecipe, tomllib.loads(text)) == config


@pytest.mark.parametrize(
    ("text", "overrides", "sources"),
    [
        ("[engine]\ntype = 'native'\n", [], {"engine.type": "r.toml:4", "engine.block_size": "default"}),
        ("engine = 'native'\n", [], {"engine.type": "r.toml:3", "engine.block_size": "default"}),
        ("engine = {type = 'native', block_size = 8}\n", [], {"engine.block_size": "r.toml:3"}),
        ("[trainer]\nwarmup = 1\n", [], {"trainer.learning_rate": "default", "trainer.warmup": "r.toml:4"}),
        ("[[judges]]\ntype = 'native'\n", [], {"judges": "r.toml:3"}),
        ("", ["trainer={warmup=2}"], {"trainer.warmup": "command line", "trainer.learning_rate": "default"}),
        ("[trainer]\nwarmup = 1\n", ["trainer={schedule='cosine'}"], {"trainer.warmup": "r.toml:4"}),
    ],
)
def test_a_value_is_from_where_it_was_set_and_its_neighbours_are_defaults(
    text: str, overrides: list[str], sources: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "r.toml"
    path.write_text(VALID + text)
    loaded = load_recipe(path, overrides)
    resolve(SmallRecipe, loaded.values, loaded.provenance)
    for key, source in sources.items():
        assert source_of(key, loaded.provenance).replace(f"{tmp_path}/", "") == source


class Following(Config):
    seed: int = 0
    trainer: Trainer = Trainer()
    other: Trainer = Trainer()

    handed_down = {"other": "trainer"}

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {"other": values.get("trainer", {}), **values}


def test_what_was_handed_down_is_not_written_out_so_that_it_follows_a_later_change() -> None:
    config = resolve(Following, {"trainer": {"warmup": 3}}, {"trainer.warmup": "r.toml:2"})
    text = dump_config(config, {"trainer.warmup": "r.toml:2"})
    assert "# other follows the recipe's trainer" in text
    saved = tomllib.loads(text)
    assert resolve(Following, saved) == config
    saved["trainer"]["warmup"] = 5
    assert resolve(Following, saved).other.warmup == 5


def test_what_was_given_in_place_of_the_handed_down_is_written_out() -> None:
    config = resolve(Following, {"other": {"warmup": 3}})
    assert tomllib.loads(dump_config(config, {"other.warmup": "r.toml:2"}))["other"]["warmup"] == 3


def test_a_mistake_that_was_handed_down_is_told_once_and_where_it_was_given() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(Following, {"trainer": {"warmup": "long"}}, {"trainer.warmup": "r.toml:2"})
    assert str(refused.value) == 'r.toml:2: trainer.warmup = "long": expected a whole number'
    with pytest.raises(ConfigError, match="other.warmup"):
        resolve(Following, {"other": {"warmup": "long"}})
