from __future__ import annotations

from rill.config.keys import describe_keys
from tests.config.parts import NativeEngine, SmallRecipe

KEYS = {
    key.name: key
    for key in describe_keys(SmallRecipe(workflow="x", steps=3, engine=NativeEngine.Config(block_size=8)))
}


def test_every_key_is_explained_through_chosen_parts() -> None:
    assert KEYS["engine.block_size"].description == "Tokens in a block."
    assert KEYS["engine.block_size"].value == "8"
    assert KEYS["trainer.warmup"].value == "unset"
    assert KEYS["steps"].value == "3"


def test_what_may_stand_there_is_said_in_words_with_the_choices_of_closed_sets() -> None:
    assert KEYS["engine.type"].type == "native | remote"
    assert KEYS["judges"].type == "list of native | remote"
    assert KEYS["trainer.schedule"].type == "constant | cosine"
    assert KEYS["trainer.warmup"].type == "int or unset"
    assert KEYS["tags"].type == "table of int"
    assert KEYS["workflow"].type == "text"
