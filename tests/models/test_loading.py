from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rill.errors import ModelError
from rill.models.loading import ModelConfig, load_model, load_tokenizer

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


def test_a_model_in_bfloat16_keeps_its_rotary_frequencies_whether_drawn_or_loaded(tmp_path: Path) -> None:
    shape = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    drawn = load_model(ModelConfig(shape=shape), dtype=torch.bfloat16)
    drawn.save_pretrained(tmp_path)
    loaded = load_model(ModelConfig(path=str(tmp_path)), dtype=torch.bfloat16)
    exact = load_model(ModelConfig(shape=shape), dtype=torch.float32)
    for model in (drawn, loaded):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model.dtype == torch.bfloat16
        for (name, buffer), wanted in zip(model.named_buffers(), exact.buffers(), strict=True):
            assert torch.equal(buffer, wanted), name
    for a, b in zip(drawn.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_folder_without_a_tokenizer_is_named_before_every_prompt_comes_out_empty(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match=r"holds no tokenizer .*model.tokenizer"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
