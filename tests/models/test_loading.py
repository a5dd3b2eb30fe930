from __future__ import annotations

from rill.models.loading import ModelConfig

FRESH = {"shape": {"model_type": "qwen2"}, "tokenizer": "chars"}


def test_a_path_replaces_a_fresh_model_and_its_character_tokenizer() -> None:
    config = ModelConfig.model_validate({**FRESH, "path": "some/folder"})
    assert (config.path, config.shape, config.tokenizer) == ("some/folder", {}, None)


def test_a_tokenizer_folder_stays_when_a_path_replaces_a_fresh_model() -> None:
    config = ModelConfig.model_validate({**FRESH, "path": "some/folder", "tokenizer": "its/tokenizer"})
    assert config.tokenizer == "its/tokenizer"


def test_a_model_in_a_folder_may_use_the_character_tokenizer() -> None:
    values = {"path": "some/folder", "shape": {}, "tokenizer": "chars"}
    assert ModelConfig.model_validate(values).tokenizer == "chars"
