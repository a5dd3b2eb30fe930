"""Models and data by their names on the hub, against a hub on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rill.data.base import open_indexed
from rill.data.hub import HubDataset, files_of
from rill.errors import DataError, ModelError
from rill.models.hub import is_hub_name, push_folder
from rill.models.loading import ModelConfig, load_model_config, load_tokenizer, model_folder
from rill.models.tokenizer import build_char_tokenizer
from tests.hub import COMMIT, FakeHub, fake_hub

SHAPE = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 104}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(tmp_path, monkeypatch) as running:
        yield running


def put_model(hub: FakeHub, name: str = "lab/tiny") -> Path:
    folder = hub.repo("models", name)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    build_char_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "pytorch_model.bin").write_bytes(b"the same in another form")
    return folder


def test_a_model_is_fetched_by_its_name_and_its_weights_only_where_they_are_wanted(hub: FakeHub) -> None:
    put_model(hub)
    config = ModelConfig(path=f"lab/tiny@{COMMIT}")
    assert load_model_config(config).hidden_size == 8
    assert load_tokenizer(config).encode("1+1=")
    assert not any("safetensors" in path for path in hub.asked)
    folder = Path(model_folder("lab/tiny"))
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not (folder / "pytorch_model.bin").exists()


def test_what_was_fetched_is_found_again_without_a_network(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_model(hub)
    folder = model_folder("lab/tiny")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert model_folder("lab/tiny") == folder
    with pytest.raises(ModelError, match="cannot be reached.*hf download lab/other"):
        model_folder("lab/other")


def test_wrong_names_and_revisions_are_one_line(hub: FakeHub) -> None:
    put_model(hub)
    with pytest.raises(ModelError, match="no model of that name on the hub"):
        model_folder("lab/nothing")
    with pytest.raises(ModelError, match="no such revision"):
        model_folder("lab/tiny@v9")
    with pytest.raises(ModelError, match="as OWNER/NAME"):
        model_folder("./not/here")


def test_a_local_folder_hides_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("lab/tiny")
    (tmp_path / "lab" / "tiny").mkdir(parents=True)
    assert not is_hub_name("lab/tiny")


def test_a_pushed_folder_can_be_fetched(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    url = push_folder(folder, "me/trained", private=True, message="run demo")
    assert url.startswith(hub.url)
    assert json.loads((Path(model_folder("me/trained")) / "config.json").read_text()) == SHAPE


def test_a_push_without_a_network_says_where_the_model_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(ModelError, match=f"nothing was uploaded.*stays in {tmp_path}.*hf upload me/trained"):
        push_folder(tmp_path, "me/trained", private=True, message="run demo")


# --- data --------------------------------------------------------------------------------------------------


def put_rows(path: Path, *questions: str) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"question": questions, "answer": [f"so\n#### {len(q)}" for q in questions]})
    pyarrow.parquet.write_table(table, path)


def test_a_split_of_a_data_set_is_read_by_name(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    folder = hub.repo("datasets", "lab/sums")
    put_rows(folder / "main" / "train-00000-of-00001.parquet", "a", "bb")
    put_rows(folder / "main" / "test-00000-of-00001.parquet", "ccc")
    put_rows(folder / "hard" / "train-00000-of-00001.parquet", "dddd")
    config = HubDataset.Config(name="lab/sums", subset="main", split="test", answer_after="####")
    rows = open_indexed(config)
    assert [(row.messages[0].content, row.answer, row.task) for row in rows] == [("ccc", "3", "lab/sums")]  # type: ignore[attr-defined]
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert len(open_indexed(config)) == 1
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(DataError, match="subsets hard, main"):
        open_indexed(HubDataset.Config(name="lab/sums"))
    with pytest.raises(DataError, match=r"split 'dev'; it has hard/train"):
        open_indexed(HubDataset.Config(name="lab/sums", split="dev"))


def test_json_lines_of_the_hub_are_read_too(hub: FakeHub) -> None:
    (hub.repo("datasets", "lab/math") / "test.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    assert open_indexed(HubDataset.Config(name="lab/math", split="test"))[0].answer == "2"


def test_files_of_a_split_are_found_in_the_layouts_of_the_hub() -> None:
    def found(*files: str, subset: str = "", split: str = "test") -> list[str]:
        return files_of(list(files), subset, split)

    assert found("data/test-00000-of-00002.parquet", "data/test-00001-of-00002.parquet") != []
    assert found("default/test/0000.parquet", "default/train/0000.parquet") == ["default/test/0000.parquet"]
    assert found("test.jsonl", "latest.jsonl") == ["test.jsonl"]
    assert found("README.md", "testing.parquet") == []
