"""Rows of every shape, and bad rows named by file and number."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rill.data.base import DATASETS, Dataset, Split, open_dataset, open_indexed, prompts_of
from rill.data.chat import PromptEncoder
from rill.data.pairs import answers_of, encode_pair
from rill.data.sft import SFTEncoder, check_written
from rill.errors import DataError
from rill.models.tokenizer import build_char_tokenizer
from rill.types import Prompt
from tests.data.disjoint import assert_disjoint

VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "2+2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}


CALL = {"function": {"name": "f", "arguments": {}}}
TEXT = {"type": "text", "text": "\ufffc"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def calling(calls: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": "x"}
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": calls}]}


def jsonl(folder: Path, rows: list[Any], **settings: Any) -> Dataset:
    path = folder / "rows.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return opened("jsonl", path=str(path), **settings)


def opened(kind: str, split: Split = Split.TRAIN, **settings: Any) -> Dataset:
    return open_indexed(DATASETS.load(kind).Config.model_validate({"type": kind, **settings}), split)


def test_a_verl_row_keeps_its_parts(tmp_path: Path) -> None:
    prompt = jsonl(tmp_path, [VERL])[0]
    assert prompt.messages[0].content == "2+2?" and prompt.answer == "4" and prompt.task == "gsm8k"
    assert prompt.metadata == {"ability": "math", "style": "rule", "split": "train", "index": 7}


def test_question_and_answer_rows(tmp_path: Path) -> None:
    dataset = jsonl(
        tmp_path, [{"question": "2+2?", "answer": 4}, {"problem": "3+3?", "target": "6"}], system="Brief."
    )
    assert [m.role for m in dataset[0].messages] == ["system", "user"] and dataset[0].answer == 4
    assert dataset[1].answer == "6" and dataset[1].id == "rows/1"


def test_named_fields_bare_form_and_an_answer_after_a_mark(tmp_path: Path) -> None:
    rows = [{"q": "2+2", "a": "two and two\n#### 4"}]
    prompt = jsonl(
        tmp_path, rows, question="q", answer="a", answer_after="####", form="bare", template="{question}="
    )[0]
    assert (prompt.text, prompt.answer, prompt.metadata["solution"]) == ("2+2=", "4", "two and two\n#### 4")


def test_messages_and_completions_become_sft_examples(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": r, "content": c}
                for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
            ]
        },
        {"prompt": "2+2", "completion": "4"},
        {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant", "content": "y"}]},
    ]
    sft = SFTEncoder(PromptEncoder(build_char_tokenizer()))
    trained = []
    for prompt in prompts_of(jsonl(tmp_path, rows)):
        assert prompt.messages[-1].role == "user"
        example = sft.encode(prompt)
        trained.append(sft.encoder.decode(example.token_ids[example.loss_mask], skip_special=False))
    assert trained == ["b<eos>d<eos>", "4<eos>", "y<eos>"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "table of fields"),
        ('{"question": ', "column 14: not JSON"),
        ({"answer": "4"}, "no question"),
        ({"question": None, "answer": "4"}, "no question.*filled in the row: answer$"),
        ({"question": 5}, "must be text"),
        ({"messages": []}, "at least one"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role among"),
        ({"messages": [{"role": "user", "content": 3}]}, "text content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing is asked"),
        ({"prompt": "x", "reward_model": {"style": "rule"}}, "ground_truth"),
        ({"question": "x", "difficulty": "hard"}, "difficulty"),
        ({"question": "x", "difficulty": 10**400}, "difficulty"),
        ('{"question": ' + "9" * 5_000 + "}", "cannot be read: Exceeds the limit"),
        ('{"question": ' + "[" * 100_000, "cannot be read: maximum recursion"),
        ('{"question": "\\ud800"}', "half a character"),
        ('{"question": "x", "answer": ["\\uDFFF"]}', "half a character"),
        (
            {"messages": [{"role": "user", "content": ["x"]}]},
            "message 0 .user.: a content part of type 'str'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "type 'audio'"),
        ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "`name` must be text, got int"),
        ({"messages": [{"role": "user", "content": [TEXT, PICTURE]}]}, "has 1 pictures and 2 places"),
        (calling(5), "message 1 .assistant.: `tool_calls` must be a list"),
        (calling({"function": {"name": "f"}}), "`tool_calls` must be a list"),
        (calling(["f"]), "`tool_calls` must be a list"),
        (calling([{"function": "f"}]), "`tool_calls` must be a list"),
        (calling([{"function": {"name": None}}]), "`tool_calls` must be a list"),
        (calling([{"function": {"name": "f", "arguments": 5}}]), "`tool_calls` must be a list"),
        ({"prompt": "x", "completion": []}, "at least one message"),
        ({"prompt": "x", "completion": calling([CALL])["messages"][1:]}, "an answer must be text here"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        jsonl(tmp_path, [{"question": "a", "answer": "b"}, "", row])
    assert "rows.jsonl, line 3" in str(caught.value)


def test_the_sides_of_a_file_never_overlap_even_with_repeated_rows(tmp_path: Path) -> None:
    rows = [{"question": f"{i % 60}+1?", "answer": i % 60 + 1} for i in range(300)]
    train = jsonl(tmp_path, rows, held_out=0.3)
    held = opened("jsonl", Split.HELD_OUT, path=str(tmp_path / "rows.jsonl"), held_out=0.3)
    both = opened("jsonl", Split.ALL, path=str(tmp_path / "rows.jsonl"), held_out=0.3)
    assert len(train) + len(held) == len(both) == 300 and 30 < len(held) < 150
    assert_disjoint(prompts_of(train), prompts_of(held))


def test_a_dataset_can_be_sent_to_another_process(tmp_path: Path) -> None:
    dataset = jsonl(tmp_path, [VERL, {"question": "a", "answer": "b"}])
    assert pickle.loads(pickle.dumps(dataset))[1] == dataset[1]


def test_an_empty_side_and_a_missing_file_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no held_out prompts"):
        (tmp_path / "one.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
        opened("jsonl", Split.HELD_OUT, path=str(tmp_path / "one.jsonl"))
    with pytest.raises(DataError, match="no file"):
        opened("jsonl", path=str(tmp_path / "none.jsonl"))


def test_parquet_files_and_folders_with_the_row_in_errors(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for k in range(2):
        table = pyarrow.Table.from_pylist([{**VERL, "extra_info": {"index": 10 * k + i}} for i in range(3)])
        parquet.write_table(table, tmp_path / f"part-{k}.parquet")
    dataset = opened("parquet", path=str(tmp_path))
    assert [dataset[i].metadata["index"] for i in range(6)] == [0, 1, 2, 10, 11, 12]
    parquet.write_table(pyarrow.Table.from_pylist([{"answer": "1"}]), tmp_path / "part-2.parquet")
    with pytest.raises(DataError, match=r"part-2\.parquet, row 1"):
        opened("parquet", path=str(tmp_path))
    (tmp_path / "part-3.parquet").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="part-3"):
        opened("parquet", path=str(tmp_path))


def test_a_parquet_file_whose_pages_are_broken_is_named(tmp_path: Path) -> None:
    """Its head and its end are whole: only who unpacks it finds out."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    rows = [{"question": f"{n * n}?" * 9, "answer": str(n)} for n in range(2_000)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="snappy", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[1_000:1_100] = bytes(100)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"rows\.parquet is not a parquet file that can be read"):
        opened("parquet", path=str(path))


def test_parquet_text_that_is_not_utf_8_is_named_by_file_and_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"fine", b"\xff\xfe"], pyarrow.binary())
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, raw.buffers())
    parquet.write_table(pyarrow.table({"question": broken}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="rows.parquet, row 2: text that is not UTF-8"):
        opened("parquet", path=str(tmp_path / "rows.parquet"))


def test_hugging_face_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    plain = datasets.Dataset.from_list([{"question": f"{i}?", "answer": str(i)} for i in range(4)])
    plain.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(train=plain).save_to_disk(str(tmp_path / "split"))
    assert opened("folder", path=str(tmp_path / "plain"))[2].answer == "2"
    assert len(opened("folder", path=str(tmp_path / "split"), subset="train")) == 4
    with pytest.raises(DataError, match="holds train"):
        opened("folder", path=str(tmp_path / "split"), subset="test")


def make(index: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([index, seed])
    a, b = rng.integers(0, 50, 2)
    return {"question": f"{a}+{b}", "answer": str(a + b)}


def make_stream() -> Iterator[dict[str, Any]]:
    yield from ({"question": f"{i}?", "answer": i} for i in range(10))


def test_generated_problems_are_reproducible_and_split() -> None:
    settings = {"function": "tests.data.test_rows:make", "size": 100, "held_out": 0.2}
    train, held = opened("generated", **settings), opened("generated", Split.HELD_OUT, **settings)
    assert_disjoint(prompts_of(train), prompts_of(held))
    assert train[3] == opened("generated", **settings)[3]


def test_a_stream_can_be_read_again_from_its_start() -> None:
    config = DATASETS.load("stream").Config(function="tests.data.test_rows:make_stream")
    stream = open_dataset(config)
    assert not isinstance(stream, Dataset)
    assert [p.answer for p in stream] == [p.answer for p in stream] == list(range(10))
    with pytest.raises(DataError, match="forwards"):
        open_indexed(config)


def test_a_mixture_keeps_its_proportions() -> None:
    sources = [
        {"dataset": {"type": "arithmetic"}, "weight": 3.0},
        {"dataset": {"type": "vault", "size": 50}, "weight": 1.0},
    ]
    dataset = opened("mixture", sources=sources)
    tasks = [dataset[i].task for i in range(1000)]
    assert tasks.count("arithmetic") == 750 and tasks.count("vault") == 250
    assert 25 < tasks[:200].count("vault") < 75
    assert len({dataset[i].id for i in range(1000) if tasks[i] == "arithmetic"}) == 750


def test_sources_of_a_mixture_that_call_their_problems_alike_are_told_apart() -> None:
    sources = [{"dataset": {"type": "arithmetic", "digits": [n, n], "size": 40}} for n in (2, 5)]
    dataset = opened("mixture", sources=sources, size=60)
    by_id = {prompt.id: prompt for prompt in prompts_of(dataset)}
    assert len(by_id) == 60, "no problem comes twice before its source is used up"
    assert {prompt.metadata["level"] for name, prompt in by_id.items() if name.startswith("0/")} == {2}


def test_settings_that_a_dataset_would_not_read_are_refused() -> None:
    arithmetic = {"dataset": {"type": "arithmetic"}}
    with pytest.raises(ValidationError, match="source 1 has a weight of 0.0001.* never have a turn"):
        opened("mixture", sources=[arithmetic, {**arithmetic, "weight": 0.0001}])
    for kind, settings in (
        ("mixture", {"sources": [arithmetic], "held_out": 0.1}),
        ("generated", {"function": "tests.data.test_rows:make", "limit": 5}),
        ("reasoning_gym", {"name": "leg_counting", "answer": "a"}),
    ):
        with pytest.raises(ValidationError, match="Extra inputs"):
            opened(kind, **settings)


@pytest.mark.parametrize("kind", ["generated", "stream"])
def test_a_generator_without_a_held_out_share_says_so_and_does_not_search_for_ever(kind: str) -> None:
    config = DATASETS.load(kind).Config(function="tests.data.test_rows:make_stream")
    with pytest.raises(DataError, match="`held_out` is 0"):
        open_dataset(config, Split.HELD_OUT)


def test_reasoning_gym_tasks_come_split_and_reproducible() -> None:
    pytest.importorskip("reasoning_gym")
    settings = {"name": "leg_counting", "held_out": 0.3, "size": 30}
    train, held = opened("reasoning_gym", **settings), opened("reasoning_gym", Split.HELD_OUT, **settings)
    assert_disjoint(prompts_of(train), prompts_of(held))
    assert isinstance(train[0], Prompt) and train[0] == opened("reasoning_gym", **settings)[0]
    with pytest.raises(DataError, match="did you mean"):
        opened("reasoning_gym", name="leg_countin")


def test_preferences_as_texts_answers_and_conversations(tmp_path: Path) -> None:
    asked, good, bad = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"},
    )
    rows = [
        {"prompt": "q", "chosen": "yes", "rejected": "no", "margin": 2},
        {"prompt": [asked], "chosen": [good], "rejected": [bad]},
        {"chosen": [asked, good], "rejected": [asked, bad]},
    ]
    dataset = jsonl(tmp_path, rows)
    encoder = SFTEncoder(PromptEncoder(build_char_tokenizer()))
    pairs = [encode_pair(encoder, dataset[i]) for i in range(3)]
    assert [pair.margin for pair in pairs] == [2.0, 0.0, 0.0]
    for pair in pairs:
        for example, text in ((pair.chosen, "yes<eos>"), (pair.rejected, "no<eos>")):
            assert example is not None and pairs[0].chosen is not None
            spoken = example.token_ids[example.loss_mask]
            assert encoder.encoder.decode(spoken, skip_special=False) == text
            assert np.array_equal(example.token_ids[:3], pairs[0].chosen.token_ids[:3])


ASKED = {"role": "user", "content": "x"}
SAID, OTHER = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}


def test_a_preference_keeps_all_of_the_conversation_before_it(tmp_path: Path) -> None:
    """Calls, their results and pictures, too."""
    asked = {"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE]}
    call, told = calling([CALL])["messages"][1], {"role": "tool", "content": "4", "tool_call_id": "c"}
    before = [asked, call, told]
    prompt = jsonl(tmp_path, [{"chosen": [*before, SAID], "rejected": [*before, OTHER]}])[0]
    user, assistant, tool = prompt.messages
    assert user.pictures and list(assistant.tool_calls) == [CALL] and tool.tool_call_id == "c"
    assert (prompt.metadata["chosen"], prompt.metadata["rejected"]) == ("a", "b")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "q", "chosen": "a"}, "`rejected`"),
        ({"chosen": "a", "rejected": "b"}, "no question"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "much"}, "`margin` must be a number"),
        (
            '{"prompt": "q", "chosen": "a", "rejected": "b", "margin": NaN}',
            "`margin` must be a number, got nan",
        ),
        (
            {
                "chosen": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}],
                "rejected": [{"role": "user", "content": "y"}, {"role": "assistant", "content": "b"}],
            },
            "differ in their last message only",
        ),
        ({"chosen": [{"role": "user", "content": "x"}], "rejected": "b"}, "end with an assistant message"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "`rejected` is missing or empty"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "`chosen` is missing or empty"),
        ({"prompt": "q", "chosen": 5, "rejected": "b"}, "must be a list"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same"),
        ({"prompt": "q", "chosen": [{"role": "assistant", "content": ""}], "rejected": "b"}, "must be text"),
        (
            {"chosen": calling([CALL])["messages"], "rejected": [{"role": "user", "content": "x"}, SAID]},
            "must be text here, without tool calls",
        ),
        ({"chosen": [ASKED, SAID, SAID], "rejected": [ASKED, SAID, OTHER]}, "two assistant messages"),
        ({"chosen": [ASKED, SAID], "rejected": "b"}, "differ in their last message only"),
    ],
)
def test_a_bad_preference_is_named_by_file_and_line(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(DataError, match="line 1") as caught:
        jsonl(tmp_path, [row])
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "mixture"])
def test_a_row_that_cannot_be_learnt_from_is_named_when_the_data_is_opened(tmp_path: Path, kind: str) -> None:
    """By its place, also where rows have ids of their own, and whichever side it lies on."""
    path = tmp_path / "rows.jsonl"
    rows = [{"id": f"own {n}", "question": f"{n}", "completion": "yes"} for n in range(9)]
    rows[7]["completion"] = ""
    path.write_text("\n".join(map(json.dumps, rows)))
    settings: dict[str, Any] = {"type": "jsonl", "path": str(path), "held_out": 0.5}
    if kind == "mixture":
        settings = {"type": kind, "sources": [{"dataset": {"type": "arithmetic"}}, {"dataset": settings}]}
    config = DATASETS.load(kind).Config.model_validate(settings)
    for split in (Split.TRAIN, Split.HELD_OUT):
        open_dataset(config, split)
        for check, says in ((check_written, "has no written solution"), (answers_of, "is no preference")):
            line = 8 if check is check_written else 1
            with pytest.raises(DataError, match=rf"rows.jsonl, line {line}: prompt own {line - 1} {says}"):
                open_dataset(config, split, check=check)
