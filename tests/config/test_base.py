from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.config.parts import NativeEngine, RemoteEngine, SmallRecipe, Trainer


def test_unknown_keys_are_errors() -> None:
    with pytest.raises(ValidationError, match="lr"):
        Trainer(lr=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        Trainer(learning_rate=value)


def test_a_config_is_frozen() -> None:
    trainer = Trainer()
    with pytest.raises(ValidationError, match="frozen"):
        trainer.learning_rate = 1.0


def test_the_docstring_of_a_field_is_its_description() -> None:
    assert Trainer.model_fields["learning_rate"].description == "Per step."


def test_a_part_is_chosen_by_type_by_name_or_given_whole() -> None:
    by_type = SmallRecipe.model_validate(
        {"workflow": "x", "steps": 1, "engine": {"type": "remote", "address": "a"}}
    )
    by_name = SmallRecipe.model_validate({"workflow": "x", "steps": 1, "engine": "native"})
    whole = SmallRecipe(workflow="x", steps=1, engine=RemoteEngine.Config(address="a"))
    assert by_type.engine == whole.engine
    assert by_name.engine == NativeEngine.Config()


def test_a_part_survives_a_dump_with_all_its_fields() -> None:
    recipe = SmallRecipe(workflow="x", steps=1, engine=RemoteEngine.Config(address="a"))
    assert recipe.model_dump()["engine"] == {"type": "remote", "address": "a"}
    assert SmallRecipe.model_validate(recipe.model_dump()) == recipe


def test_a_part_without_a_type_is_the_default_one_or_lists_the_parts() -> None:
    recipe = SmallRecipe.model_validate({"workflow": "x", "steps": 1, "engine": {"block_size": 4}})
    assert recipe.engine == NativeEngine.Config(block_size=4)
    with pytest.raises(ValidationError, match="native, remote"):
        SmallRecipe.model_validate({"workflow": "x", "steps": 1, "judges": [{"block_size": 4}]})


def test_something_that_is_no_part_is_told_what_a_part_is() -> None:
    with pytest.raises(
        ValidationError, match="cannot serve as .*engine: it must be a class with a Config inside"
    ):
        SmallRecipe.model_validate({"workflow": "x", "steps": 1, "engine": "json:loads"})


class Derived(NativeEngine):
    pass


def test_a_part_that_derives_from_another_needs_a_config_of_its_own() -> None:
    with pytest.raises(ValidationError, match="`type` 'native' of the part it derives from"):
        SmallRecipe.model_validate({"workflow": "x", "steps": 1, "engine": f"{__name__}:Derived"})
