from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rill.errors import ModelError
from rill.models.loading import ModelConfig, load_model, load_model_config, load_tokenizer

SHAPE = {"model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 104, "intermediate_size": 16,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In several files."""
    folder = tmp_path_factory.mktemp("model") / "saved"
    load_model(ModelConfig(shape=SHAPE), dtype=torch.float32).save_pretrained(folder, max_shard_size="20KB")
    load_tokenizer(ModelConfig(shape=SHAPE, tokenizer="chars")).save_pretrained(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the file of tensors that UP is in."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][UP]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(UP), "lacks 1 of the model's parameters, 'model.layers.1.mlp.up_proj.weight'"),
        (lambda tensors: tensors.update({"x.up": tensors.pop(UP)}), "it brings 'x.up', which the model does not have"),
        (lambda tensors: tensors.update({UP: torch.ones(3, 32)}), r"up_proj.weight has shape \(3, 32\), .*\(16, 32\)"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_not_whole_is_refused_and_not_filled_with_random_weights(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(ModelError, match=words):
        load_model(ModelConfig(path=str(folder)), dtype=torch.float32)


def test_a_head_may_be_missing_only_where_none_is_needed(tmp_path: Path) -> None:
    shape = {**SHAPE, "tie_word_embeddings": False}
    load_model(ModelConfig(shape=shape), dtype=torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32)
    load_model(ModelConfig(path=str(tmp_path)), dtype=torch.float32, needs_head=False)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("model-00002-*", None, "the weights in .* cannot be loaded.*model-00002"),
        ("model-00002-*", "cut", "the weights in .* cannot be loaded"),
        ("model.safetensors.index.json", '{"metadata"', "the weights in .* cannot be loaded"),
        ("model.safetensors.index.json", None, "the weights in .* cannot be loaded"),
        ("generation_config.json", '{"eos_', "which tokens end an answer is not known"),
        ("config.json", '{"model_type": ', "holds no config.json that transformers can read"),
        ("config.json", "[]", "holds no config.json that transformers can read"),
        ("config.json", '{"model_type": "qwen2", "hidden_size": "x"}', "config.json .*hidden_size"),
        ("config.json", '{"model_type": "no-such"}', "config.json .*no-such"),
        ("tokenizer.json", "{}", "no tokenizer that transformers can load"),
        ("tokenizer_config.json", "[]", "no tokenizer that transformers can load"),
    ],
)
def test_what_is_damaged_in_a_models_folder_is_named(
    saved: Path, tmp_path: Path, file: str, text: str | None, words: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    (path,) = folder.glob(file)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    config = ModelConfig(path=str(folder))
    with pytest.raises(ModelError, match=f"(?s){words}"):
        if file.startswith("tokenizer"):
            load_tokenizer(config)
        else:
            load_model(config, dtype=torch.float32)


def test_a_misspelt_key_of_a_shape_is_refused_and_one_that_models_may_read_is_kept() -> None:
    with pytest.raises(ModelError, match=r"qwen2 has no 'hiddn_size' \(did you mean 'hidden_size'\?\)"):
        load_model_config(ModelConfig(shape={**SHAPE, "hiddn_size": 64}))
    assert load_model_config(ModelConfig(shape={**SHAPE, "head_dim": 8})).head_dim == 8
